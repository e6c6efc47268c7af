"""Who may wait, and that coming back when told is worth it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from services.scheduler.promises import GRACE_S, Promises, digest_of
from shared.contracts import messages as m
from shared.contracts.ids import TenantId
from shared.contracts.parts import ClassRoom
from tests.unit.retry_world import Client, Clients
from tests.unit.scheduler_support import INGRESS, Bench, reserved, submit

A, B = TenantId("a"), TenantId("b")
LINE = (A, "interactive")


def waiting(answer: m.Queued | m.Refusal) -> float:
    assert isinstance(answer, m.Queued)
    return answer.predicted_ttft_s


def busy_bench(**limits: object) -> Bench:
    """Nothing has room, and 128 tokens a step of 179 ms are computed: about 715 a second."""
    bench = Bench(**limits)  # type: ignore[arg-type]
    bench.beat("d1", free_blocks=(0,))
    return bench


def test_a_flood_of_one_tenant_is_turned_away_and_others_are_not() -> None:
    bench = busy_bench(slo_ttft_s={"interactive": 20.0})
    answers = [bench.submit(submit(f"a{i}", 1000 + i), tenant="a") for i in range(30)]
    refused = [answer for answer in answers if isinstance(answer, m.Refusal)]
    assert 10 <= len(refused) <= 20
    waits = [answer.error.retry_after_s for answer in refused]
    assert waits[-1] > waits[0] + 10  # each is told to come after those before it
    assert waiting(bench.submit(submit("b0", 1000), tenant="b")) < 5
    assert waiting(bench.submit(submit("b1", 1000), tenant="b")) < 8  # beside each of its own one of the other's
    assert bench.table.refusals == {"slo": len(refused)}


def test_the_share_is_by_weight() -> None:
    bench = busy_bench()
    for i in range(20):
        bench.submit(submit(f"a{i}", 1000), tenant="a")
        bench.submit(submit(f"b{i}", 1000), tenant="b", weight=4.0)
    light = waiting(bench.submit(submit("a", 1000), tenant="a"))
    heavy = waiting(bench.submit(submit("b", 1000), tenant="b", weight=4.0))
    assert heavy == pytest.approx(25 / 40 * light, rel=0.1)  # 20 of its own and 5 of the other's against all 40


def test_each_class_has_a_limit_of_its_own() -> None:
    bench = busy_bench(slo_ttft_s={"interactive": 2.0, "analysis": 10.0, "batch": 0.0})
    taken = {
        klass: sum(isinstance(bench.submit(submit(f"{klass}{i}", 700), klass=klass), m.Queued) for i in range(40))
        for klass in ("batch", "analysis", "interactive")
    }
    assert taken["batch"] == 40
    assert 8 <= taken["analysis"] <= 13
    assert 1 <= taken["interactive"] <= 3


def test_memory_that_frees_slowly_is_seen_before_it_is_missing() -> None:
    bench = Bench(slo_ttft_s={"interactive": 20.0}, max_placing=1)
    bench.beat("d1", free_blocks=(40,), total_blocks=(1000,), max_sequences=0)
    for i in range(4):
        bench.submit(submit(f"r{i}", 30), tenant="a")
    for _ in range(3):
        bench.now += 1.0
        bench.reserve(reserved())
        bench.beat("d1", free_blocks=(40,), total_blocks=(1000,), max_sequences=0)
    small = bench.submit(submit("small", 30), tenant="a")
    assert waiting(small) < 10
    large = bench.submit(submit("large", 6_000), tenant="a", budget_s=1000.0)
    assert isinstance(large, m.Refusal)  # a second for 38 tokens of KV, as things go
    assert large.error.code == "Overloaded/overloaded"


def test_what_lower_classes_hold_keeps_no_higher_one_out() -> None:
    bench = Bench(slo_ttft_s={"interactive": 20.0}, max_placing=1)
    rooms = (ClassRoom(8, (4000,)), ClassRoom(8, (4000,)), ClassRoom(1, (0,)))
    full: dict[str, Any] = {"total_blocks": (4000,), "free_blocks": (0,), "rooms": rooms, "running": 7}
    bench.beat("d1", **full | {"free_blocks": (4000,), "rooms": (ClassRoom(8, (4000,)),) * 3})
    for i in range(4):
        bench.submit(submit(f"r{i}", 30), klass="batch", budget_s=1e6)
    for _ in range(3):
        bench.now += 40.0
        bench.reserve(reserved())
        bench.ingresses.heard(INGRESS, bench.now)
        bench.beat("d1", **full | {"free_blocks": (40,), "rooms": (*rooms[:2], ClassRoom(1, (40,)))})
    bench.beat("d1", queue_tokens=64_000, class_tokens=(0, 0, 64_000), **full)
    assert waiting(bench.submit(submit("first", 2_000, max_tokens=1_000))) < 10
    assert waiting(bench.submit(submit("batch", 2_000), klass="batch", budget_s=1e6)) > 80
    bench.beat("d1", queue_tokens=64_000, class_tokens=(64_000, 0, 0), **full)
    assert isinstance(bench.submit(submit("second", 2_000)), m.Refusal)  # its own class's prompts go first


def test_no_promise_keeps_what_is_idle_idle() -> None:
    bench = busy_bench(slo_ttft_s={"interactive": 20.0})
    for i in range(60):
        bench.submit(submit(f"a{i}", 1000 + i), tenant="a")
    for i in range(60):
        bench.withdraw(f"a{i}")
    assert isinstance(bench.submit(submit("full", 500), tenant="a"), m.Refusal)
    bench.beat("d1")
    assert waiting(bench.submit(submit("new", 500), tenant="a")) < 5
    bench.beat("d1", free_blocks=(0,))
    assert isinstance(bench.submit(submit("again", 500), tenant="a"), m.Refusal)  # those promised go first


def test_who_asks_again_too_early_has_one_place_and_not_many() -> None:
    bench = busy_bench(slo_ttft_s={"interactive": 20.0})
    for i in range(24):
        bench.submit(submit(f"a{i}", 2000 + i), tenant="a")
    first = bench.submit(submit("first", 1001), tenant="a")
    other = bench.submit(submit("other", 1002), tenant="a")
    for i in range(50):
        bench.now += 0.01
        again = bench.submit(submit(f"again{i}", 1001), tenant="a")
    behind = bench.submit(submit("behind", 1003), tenant="a")
    assert isinstance(first, m.Refusal)
    assert isinstance(other, m.Refusal)
    assert isinstance(again, m.Refusal)
    assert isinstance(behind, m.Refusal)
    assert again.error.retry_after_s <= 1.3 * first.error.retry_after_s  # it stands where it stood
    assert behind.error.retry_after_s <= 1.3 * other.error.retry_after_s + 3


def test_a_flood_of_one_tenant_makes_no_other_s_promise_forgotten() -> None:
    promises = Promises(limit=10)
    promises.give(0.0, (B, "interactive"), b"b", 30.0, 1.0)
    for i in range(50):
        promises.give(1.0, LINE, b"%d" % i, 60.0, 1.0)
    assert len(promises) == 10
    assert promises.due(30.0, b"b") is not None
    assert promises.ahead_s(LINE, None) == 9.0


def test_promises_keep_their_order_and_lapse() -> None:
    promises = Promises(limit=3)
    promises.give(0.0, LINE, b"1", 10.0, 2.0)
    promises.give(0.0, LINE, b"2", 12.0, 3.0)
    assert promises.due(0.0, b"new") is None
    assert promises.ahead_s(LINE, None) == 5.0
    assert promises.ahead_s((B, "interactive"), None) == 0.0
    assert promises.ahead_s((A, "batch"), None) == 0.0
    assert promises.due(5.0, b"2") is None  # too early: as any other
    second = promises.due(12.0, b"2")
    assert promises.ahead_s(LINE, second) == 2.0
    first = promises.due(12.0, b"1")
    assert promises.ahead_s(LINE, first) == 0.0
    promises.give(12.0, LINE, b"1", 20.0, 2.0, first)
    assert promises.ahead_s(LINE, second) == 2.0  # turned away once more, it stands where it stood
    promises.keep(second)
    assert promises.ahead_s(LINE, None) == 2.0
    assert promises.due(32.0 + GRACE_S, b"1") is None
    assert len(promises) == 0
    for i in range(5):
        promises.give(60.0, LINE, b"same", 1.0, float(i))
    assert promises.ahead_s(LINE, None) == 2.0 + 3.0 + 4.0
    assert digest_of(b"k", A, b"text") != digest_of(b"k", B, b"text") != digest_of(b"l", B, b"text")


@pytest.mark.parametrize("seed", range(2))
def test_who_obeys_retry_after_is_mostly_taken_and_no_slot_is_idle(seed: int) -> None:
    """For a minute and a half three times as many come as can be served, of two tenants. Of returns on time at least
    four in five are taken, nearly all who are taken begin within half as much again as the class bears, and the slots
    stay in use."""
    slots, slo_s, load_s = 4, 10.0, 90.0
    clients = Clients(slots, seed, limits={"slo_ttft_s": {"interactive": slo_s}})
    rng, now, number = random.Random(seed), 0.0, 0
    while now < load_s:
        now += rng.expovariate(3.0 * slots)  # each takes a second
        number += 1
        tenant = "a" if rng.random() < 0.7 else "b"
        clients.expect(Client(f"c{number}", tenant, rng.uniform(0.5, 1.5), rng.randrange(20, 200)), now)
    clients.run(load_s)
    late = [taken for at_s, taken in clients.returns if at_s > 20.0]
    assert len(late) > 100
    assert sum(late) >= 0.8 * len(late), f"{sum(late)} of {len(late)}"
    assert clients.busy_s >= 0.9 * slots * (load_s - 2.0)
    begun = [c for c in clients.clients.values() if c.placed_s >= 0]
    waits = sorted(c.placed_s - c.admitted_s for c in begun)
    assert waits[int(0.95 * len(waits))] <= 1.5 * slo_s
