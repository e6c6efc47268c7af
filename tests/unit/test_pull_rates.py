"""What a worker tells of its pulls, and what the scheduler makes of it."""

from __future__ import annotations

import pytest

from services.scheduler.handoff_cost import HandoffCost
from shared.contracts.ids import WorkerId
from shared.contracts.parts import KvEnd, KvLink
from shared.kv.pull_rates import AVOID_S, FRESH_S, LEAST_BYTES, MAX_PEERS, PullRates
from shared.kv.transfer_path import KvAddress, is_loopback, parse_address, transfer_path

P1, P2 = WorkerId("prefill-1"), WorkerId("prefill-2")
COST = HandoffCost(bandwidth_bytes_s=2e9, tcp_bytes_s=5e8)
HERE = KvEnd("here", "net", "tcp://127.0.0.1:5")
NEAR = KvEnd("near", "net", "tcp://127.0.0.1:5")
FAR = KvEnd("far", "other", "tls://10.0.0.7:5")


def test_a_rate_follows_what_comes_and_forgets_what_was() -> None:
    rates = PullRates()
    for _ in range(20):
        rates.came(P1, "tcp", LEAST_BYTES, LEAST_BYTES / 1e8, 0.0)
    assert rates.links(0.0) == (KvLink(P1, "tcp", 1e8),)
    for _ in range(20):
        rates.came(P1, "tcp", LEAST_BYTES, LEAST_BYTES / 1e9, 1.0)
    (link,) = rates.links(1.0)
    assert link.bytes_s == pytest.approx(1e9, rel=0.2)
    assert rates.links(1.0 + FRESH_S) == ()


def test_a_pull_that_says_nothing_of_the_rate_is_not_one() -> None:
    rates = PullRates()
    rates.came(P1, "tcp", LEAST_BYTES - 1, 1.0, 0.0)
    rates.came(P2, "tcp", LEAST_BYTES, 0.0, 0.0)
    assert rates.links(0.0) == ()


def test_a_peer_out_of_reach_is_told_for_a_while_or_until_it_answers() -> None:
    rates = PullRates()
    rates.failed(P1, "tcp", 0.0)
    assert rates.links(AVOID_S - 1) == (KvLink(P1, "tcp", failed=True),)
    assert rates.links(AVOID_S) == ()
    rates.failed(P1, "tcp", 50.0)
    rates.came(P1, "tcp", 1, 0.1, 51.0)
    assert rates.links(51.0) == ()


def test_another_way_starts_anew_and_peers_are_bounded() -> None:
    rates = PullRates()
    rates.came(P1, "tcp", LEAST_BYTES, 1.0, 0.0)
    rates.came(P1, "shared_memory", 2 * LEAST_BYTES, 1.0, 0.0)
    assert rates.links(0.0) == (KvLink(P1, "shared_memory", 2.0 * LEAST_BYTES),)
    for number in range(2 * MAX_PEERS):
        rates.came(WorkerId(f"prefill-{number}"), "tcp", LEAST_BYTES, 1.0, 0.0)
    assert len(rates.links(0.0)) == MAX_PEERS


@pytest.mark.parametrize(
    ("sink", "source", "path"),
    [
        (KvEnd(), KvEnd(), "shared_memory"),
        (HERE, HERE, "shared_memory"),
        (HERE, NEAR, "tcp"),
        (HERE, FAR, "tcp"),
        (HERE, KvEnd("near", "net"), ""),
        (HERE, KvEnd("near", "elsewhere", "tcp://127.0.0.1:5"), ""),
        (HERE, KvEnd("near", "net", "nonsense"), ""),
        (KvEnd("here", "net", transfer="shared-memory"), HERE, "shared_memory"),
        (KvEnd("here", "net", transfer="shared-memory"), FAR, ""),
        (KvEnd("here", "net", transfer="tcp"), HERE, "tcp"),
        (KvEnd("here", "net", transfer="tcp"), KvEnd("here", "net"), ""),
    ],
)
def test_which_way_there_is(sink: KvEnd, source: KvEnd, path: str) -> None:
    assert transfer_path(sink, source) == path


def test_the_rate_of_a_pair_is_its_own_else_the_ways_else_the_default() -> None:
    measured = (KvLink(P2, "tcp", 1e8), KvLink(WorkerId("prefill-3"), "tcp", 3e8), KvLink(P2, "shared_memory", 9e9))
    assert COST.bytes_s(P1, NEAR, HERE, ()) == 5e8
    assert COST.bytes_s(P1, HERE, HERE, ()) == 2e9
    assert COST.bytes_s(P1, NEAR, HERE, measured) == 2e8
    assert COST.bytes_s(P1, HERE, HERE, measured) == 9e9
    assert COST.bytes_s(P1, NEAR, HERE, (*measured, KvLink(P1, "tcp", 7e7))) == 7e7
    assert COST.bytes_s(P1, NEAR, HERE, (*measured, KvLink(P1, "tcp", 7e7, failed=True))) == 0
    assert COST.bytes_s(P1, KvEnd("near"), HERE, measured) == 0
    assert COST.bytes_s(P1, HERE, HERE, (KvLink(P1, "cuda_ipc", 4e10),)) == 4e10


@pytest.mark.parametrize(("failed", "bytes_s"), [(False, 7e7), (True, 0.0)])
def test_a_pool_that_could_not_be_mapped_after_all_costs_what_tcp_costs(failed: bool, bytes_s: float) -> None:
    """The ends lie together, and what came from there came over TCP."""
    links = (KvLink(P2, "shared_memory", 9e9), KvLink(P1, "tcp", 7e7, failed=failed))
    assert COST.bytes_s(P1, HERE, HERE, links) == bytes_s
    assert COST.bytes_s(P2, HERE, HERE, links) == 9e9


@pytest.mark.parametrize(
    "address", [KvAddress("127.0.0.1", 5, False), KvAddress("::1", 65535, True), KvAddress("h", 1, True)]
)
def test_an_address_is_read_as_it_was_written(address: KvAddress) -> None:
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text",
    ["", "h:1", "http://h:1", "tcp://h", "tcp://h:0", "tcp://h:99999", "tcp://u@h:1", "tcp://h:1/x", "tcp://[::1:5"],
)
def test_what_is_no_address_is_none(text: str) -> None:
    assert parse_address(text) is None


def test_what_loopback_is() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "localhost.example", "")))
