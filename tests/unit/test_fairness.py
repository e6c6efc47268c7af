"""Shares of tenants: what two that wait may be served apart, over random arrivals and lengths."""

from __future__ import annotations

import itertools
import random

import pytest

from services.scheduler import queue as queue_module
from services.scheduler.queue import LATE_SHARE, FairQueue
from services.scheduler.shares import Shares
from shared.contracts.ids import RequestId, TenantId
from tests.unit.fair_world import Job, Pool, random_jobs, worst_gap

A, B, C = (TenantId(name) for name in "abc")
LARGEST = 250.0
"""Of `random_jobs`."""


def push(
    queue: FairQueue, name: str, tenant: TenantId, cost: float = 1.0, arrival_s: float = 0.0, **more: float
) -> None:
    queue.push(RequestId(name), "interactive", arrival_s, len(queue), tenant=tenant, cost=cost, **more)  # type: ignore[arg-type]


def serve(queue: FairQueue, costs: dict[str, float], count: int, now: float = float("-inf")) -> list[str]:
    """Take `count` heads, charged at once, which end at once."""
    order = []
    for _ in range(count):
        head = queue.head(now)
        assert head is not None
        waiting = queue._where[head]
        late = queue.is_late(head, now)
        queue.remove(head)
        charge = queue.charge(waiting.klass, waiting.tenant, waiting.weight, costs.get(head, waiting.cost))
        if late:
            queue.began_late(waiting.cost)
        queue.count_placed(waiting.klass, waiting.cost, late=late)
        queue.close(waiting.klass, charge)
        order.append(str(head))
    return order


@pytest.mark.parametrize("seed", range(40))
def test_two_that_wait_are_never_served_apart_by_more_than_their_largest_requests(seed: int) -> None:
    """Bound: the sum of the largest requests of the two, over their weights; whatever arrives when, at equal or other
    weights, in one slot or many."""
    rng = random.Random(seed)
    tenants = [TenantId(f"t{i}") for i in range(rng.randrange(2, 7))]
    weights = {tenant: rng.choice((1.0, 1.0, 0.5, 2.0, 5.0)) for tenant in tenants}
    pool = Pool(rng.choice((1, 3, 8)), weights)
    bound = sum(sorted((LARGEST / weight for weight in weights.values()), reverse=True)[:2])
    assert worst_gap(pool, random_jobs(rng, tenants, exact=True)) <= bound


@pytest.mark.parametrize("seed", range(12))
def test_late_ones_at_most_double_that(seed: int) -> None:
    rng = random.Random(1000 + seed)
    tenants = [TenantId(f"t{i}") for i in range(rng.randrange(2, 7))]
    pool = Pool(rng.choice((1, 3, 8)), dict.fromkeys(tenants, 1.0), {"interactive": rng.choice((1.0, 30.0, 300.0))})
    assert worst_gap(pool, random_jobs(rng, tenants, exact=True)) <= 4 * LARGEST


@pytest.mark.parametrize("seed", range(12))
def test_wrong_guesses_are_made_good(seed: int) -> None:
    """Guesses between a fifth and three times the cost: the bound grows by what was wrong in the requests that run at
    the beginning and at the end, and by no more, however many there were in between."""
    rng = random.Random(2000 + seed)
    tenants = [TenantId(f"t{i}") for i in range(rng.randrange(2, 7))]
    pool = Pool(slots := rng.choice((1, 3, 8)), dict.fromkeys(tenants, 1.0))
    wrong = 2 * LARGEST * slots * 2
    assert worst_gap(pool, random_jobs(rng, tenants, exact=False)) <= 2 * 3 * LARGEST + wrong


def test_the_bound_notices_first_come_first_served_and_turns_counted_in_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gap(costs: object = None) -> float:
        """`costs`: what a guess is taken for, for good."""
        with monkeypatch.context() as patch:
            if costs is not None:
                patch.setattr(Shares, "correct", lambda self, held, tokens: real(self, held, costs(tokens)))  # type: ignore[operator]
            pool = Pool(3, dict.fromkeys((A, B), 1.0))
            jobs = [Job(RequestId(f"a{i}"), A, 0.0, 50.0, 50.0) for i in range(60)]
            jobs += [Job(RequestId(f"b{i}"), B, 1.0, 1.0, 1.0) for i in range(1000)]
            return worst_gap(pool, jobs)

    real = Shares.correct
    assert gap() <= 51
    assert gap(lambda _: 0.0) > 900
    assert gap(lambda _: 1.0) > 900


def test_turns_go_by_tokens_over_weight() -> None:
    queue = FairQueue()
    for i in range(40):
        push(queue, f"a{i}", A, cost=10.0)
        push(queue, f"b{i}", B, cost=30.0)
        push(queue, f"c{i}", C, cost=10.0, weight=2.0)
    order = serve(queue, {}, 36)
    counts = [sum(name.startswith(tenant) for name in order) for tenant in "abc"]
    assert counts == [pytest.approx(n, abs=1) for n in (10.8, 3.6, 21.6)]


def test_who_was_away_has_saved_nothing_up_and_who_used_idle_slots_owes_nothing() -> None:
    queue = FairQueue()
    for i in range(100):
        push(queue, f"a{i}", A, cost=10.0)
    serve(queue, {}, 100)  # alone, in idle slots
    for i in range(20):
        push(queue, f"b{i}", B, cost=10.0)
    for i in range(20):
        push(queue, f"a{100 + i}", A, cost=10.0)
    order = serve(queue, {}, 20)
    assert abs(sum(name.startswith("a") for name in order) - 10) <= 1
    longest = max(len(list(run)) for _, run in itertools.groupby(order, lambda name: name[0]))
    assert longest <= 2


def test_a_giant_at_a_time_pays_for_each() -> None:
    """A tenant that always has one giant, which ends before the next comes, gets no turn for each small one."""
    queue = FairQueue()
    for i in range(400):
        push(queue, f"a{i}", A)
    order: list[str] = []
    for i in range(5):
        push(queue, f"b{i}", B, cost=50.0)
        while (found := serve(queue, {}, 1)) and not found[0].startswith("b"):
            order += found
        order += found
    smalls = [len(list(run)) for small, run in itertools.groupby(order, lambda name: name[0] == "a") if small]
    assert all(48 <= count <= 51 for count in smalls[1:]), smalls


def test_a_request_put_back_has_cost_nothing_and_stands_where_it_stood() -> None:
    queue = FairQueue()
    push(queue, "a", A, cost=50.0)
    push(queue, "b", B, cost=50.0, arrival_s=1.0)
    push(queue, "b2", B, cost=50.0, arrival_s=2.0)
    assert queue.head() == "a"
    queue.remove(RequestId("a"))
    charge = queue.charge("interactive", A, 1.0, 50.0)
    assert queue.head() == "b"
    queue.push(RequestId("a"), "interactive", 0.0, 0, tenant=A, cost=50.0, again=True)
    queue.correct("interactive", charge, 0.0)
    queue.close("interactive", charge)
    assert serve(queue, {}, 3) == ["a", "b", "b2"]


def test_what_ran_before_goes_first_in_its_class_whatever_its_tenant_was_served() -> None:
    queue = FairQueue()
    for i in range(3):
        push(queue, f"a{i}", A)
        push(queue, f"b{i}", B)
    assert serve(queue, {"a0": 100.0}, 1) == ["a0"]
    queue.push(RequestId("resumed"), "interactive", 50.0, 9, tenant=A, resumed=True)
    queue.push(RequestId("batch"), "batch", 50.0, 10, tenant=B, resumed=True)
    assert queue.before(RequestId("resumed")) == []
    assert queue.ahead("interactive", B, cost=1.0)[:2] == ["b0", "b1"]
    assert "resumed" in queue.ahead("interactive", B, cost=1.0)
    assert serve(queue, {}, 7) == ["resumed", "b0", "b1", "b2", "a1", "a2", "batch"]


def test_a_late_request_passes_classes_but_only_a_share_of_the_tokens() -> None:
    queue = FairQueue(max_wait_s={"batch": 10.0})
    for i in range(200):
        queue.push(RequestId(f"i{i}"), "interactive", 0.0, i, tenant=A)
        queue.push(RequestId(f"b{i}"), "batch", 0.0, i, tenant=B)
    on_time = serve(queue, {}, 18, now=9.0)
    assert sum(name.startswith("b") for name in on_time) == 2  # passed over eight times each
    late = serve(queue, {}, 80, now=10.0)
    share = sum(name.startswith("b") for name in late) / len(late)
    assert 0.9 * LATE_SHARE <= share <= LATE_SHARE + 1 / (queue_module.PASSES + 1) + 0.02


def test_what_was_due_first_goes_first_among_the_late() -> None:
    queue = FairQueue(max_wait_s={"interactive": 30.0, "analysis": 20.0})
    queue.push(RequestId("i"), "interactive", 0.0, 0, tenant=A)
    queue.push(RequestId("n"), "analysis", 5.0, 1, tenant=B)
    queue.push(RequestId("o"), "analysis", 11.0, 2, tenant=C)
    assert queue.head(24.0) == "i"  # nobody is late
    assert queue.head(26.0) == "n"
    assert queue.head(31.0) == "n"
    assert serve(queue, {}, 1, now=31.0) == ["n"]
    assert queue.head(32.0) == "i"


def test_a_flood_of_late_ones_brings_nobody_ahead() -> None:
    queue = FairQueue(max_wait_s={"interactive": 1.0})
    for i in range(300):
        push(queue, f"a{i}", A, cost=50.0)
    for i in range(300):
        push(queue, f"b{i}", B, arrival_s=100.0 + i)
    order = serve(queue, {}, 200, now=101.0)
    giants = sum(name.startswith("a") for name in order)
    assert abs(50 * giants - (len(order) - giants)) <= 2 * (50 + 1)


def test_who_has_a_turn_before_a_newcomer() -> None:
    queue = FairQueue()
    for i in range(10):
        push(queue, f"a{i}", A, cost=10.0)
    for i in range(4):
        push(queue, f"b{i}", B, cost=20.0)
    assert queue.ahead("interactive", C, cost=20.0) == ["a0", "b0"]  # equals that are smaller, or came first
    assert queue.ahead("interactive", C, cost=15.0) == ["a0"]
    assert queue.ahead("interactive", B) == ["b0", "b1", "b2", "b3", *(f"a{i}" for i in range(8))]
    assert queue.ahead("interactive", B, cost=20.0)[4:] == [f"a{i}" for i in range(9)]
    assert queue.before(RequestId("b1")) == ["b0", "a0", "a1", "a2"]
    assert [str(name) for name in serve(queue, {}, 6)] == ["a0", "b0", "a1", "a2", "b1", "a3"]
    assert queue.ahead("batch", C) == [str(name) for name in queue]


def test_accounts_of_tenants_long_gone_are_forgotten() -> None:
    shares = Shares(keep=10)
    held = shares.charge(A, 1.0, 5.0)
    for i in range(100):
        tenant = TenantId(f"t{i}")
        shares.waits(tenant, 1.0)
        shares.waits_no_more(tenant)
    assert len(shares._accounts) == 10 + 1  # idle ones, and one that is not
    assert shares.account(A).running == 1
    shares.correct(held, 7.0)
    shares.close(held)
    assert shares.account(A).served == 7.0
    assert len(shares._accounts) == 10


def test_those_who_are_busy_take_no_place_of_the_idle() -> None:
    shares = Shares(keep=2)
    for i in range(5):
        shares.charge(TenantId(f"busy{i}"), 1.0, 100.0)
    shares.close(shares.charge(A, 1.0, 300.0))
    shares.waits(A, 1.0)
    assert shares.account(A).served == 300.0  # what it had is remembered: at most its largest above the least
