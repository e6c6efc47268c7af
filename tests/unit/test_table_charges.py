"""What the request table charges a tenant for a request: predicted, corrected, given back, and never twice."""

from __future__ import annotations

import msgspec
import pytest

from services.scheduler.costs import CACHED_TOKEN, FIRST_GUESS, OutputGuess, request_cost
from services.scheduler.effects import AskMatch
from services.scheduler.record import State
from shared.contracts.attempt import Attempt
from shared.contracts.ids import RequestId, TenantId
from shared.contracts.parts import AttemptOutput, AttemptProgress
from tests.unit.scheduler_support import INGRESS, Bench, attempt, no_room, reserved, submit


def placed(bench: Bench, name: str, num_tokens: int = 60, *, cached: int = 0, max_tokens: int = 1000) -> Attempt:
    """A request of the tenant `t` that runs at d1."""
    bench.submit(submit(name, num_tokens, max_tokens=max_tokens))
    bench.match()
    return bench.reserve(reserved(num_cached_tokens=cached)).message.attempt


def bench_of(*workers: str, **limits: object) -> Bench:
    bench = Bench(**limits)  # type: ignore[arg-type]
    for worker in workers or ("d1",):
        bench.beat(worker)
    return bench


def served(bench: Bench, tenant: str = "t") -> float:
    return bench.table._book.queue._lanes["interactive"].shares.account(TenantId(tenant)).served


def tell(bench: Bench, *outputs: AttemptOutput, worker: str = "d1") -> None:
    listed = tuple(AttemptProgress(output.attempt, 1) for output in outputs if not output.ended)
    bench.beat(worker, outputs=outputs, attempts=listed)


def test_a_request_costs_what_is_computed_for_it() -> None:
    assert request_cost(100, 0, 10) == 110
    assert request_cost(100, 80, 10) == 20 + CACHED_TOKEN * 80 + 10
    assert request_cost(0, 0, 0.0) == 1.0
    guess = OutputGuess()
    assert guess.guess(TenantId("a"), "batch", 8) == 8
    assert guess.guess(TenantId("a"), "batch", 1000) == FIRST_GUESS
    for _ in range(50):
        guess.learn(TenantId("a"), "batch", 20)
    assert guess.guess(TenantId("a"), "batch", 1000) == pytest.approx(20)
    assert 20 < guess.guess(TenantId("b"), "batch", 1000) < FIRST_GUESS


def test_it_is_charged_as_it_leaves_the_queue_and_corrected_by_the_true_hit() -> None:
    bench = bench_of()
    bench.submit(submit("r", 60, max_tokens=1000))
    assert served(bench) == 60 + FIRST_GUESS
    bench.match()
    bench.reserve(reserved(num_cached_tokens=32))
    assert served(bench) == pytest.approx(28 + CACHED_TOKEN * 32 + FIRST_GUESS)


def test_an_end_before_or_after_what_was_expected_is_made_good() -> None:
    bench = bench_of()
    first, second = placed(bench, "short"), placed(bench, "long")
    assert served(bench) == 2 * (60 + FIRST_GUESS)
    tell(bench, AttemptOutput(first, 7, ended=True), AttemptOutput(second, 100))
    assert served(bench) == 60 + 7 + 60 + FIRST_GUESS
    learnt = bench.table._book.outputs.guess(TenantId("t"), "interactive", 1000)
    tell(bench, AttemptOutput(first, 7, ended=True), AttemptOutput(second, 400))
    assert bench.table._book.outputs.guess(TenantId("t"), "interactive", 1000) == learnt  # told again, learnt once
    assert served(bench) == 60 + 7 + 60 + 400
    tell(bench, AttemptOutput(second, 401, ended=True))
    assert served(bench) == 60 + 7 + 60 + 401
    tell(bench)
    assert bench.table.placed == 0
    assert served(bench) == 60 + 7 + 60 + 401
    bench.submit(submit("next", 60, max_tokens=1000))
    assert served(bench) < 60 + 7 + 60 + 401 + 60 + FIRST_GUESS  # what ended taught something


def test_what_is_put_back_or_ends_before_it_runs_costs_nothing() -> None:
    bench = bench_of()
    bench.submit(submit("r", 60))
    bench.match()
    bench.reserve(no_room())
    assert served(bench) == 0.0
    bench.beat("d1")
    assert served(bench) == 68
    bench.withdraw("r")
    assert served(bench) == 0.0
    bench.effects.clear()
    bench.submit(submit("s", 60))
    bench.match()
    bench.reserve(no_room("ContextExceeded/pool", never=True))
    assert served(bench) == 0.0


def test_blocks_that_are_taken_back_are_not_charged_twice() -> None:
    bench = bench_of("d1", "d2")
    held = placed(bench, "r")
    before = served(bench)
    bench.beat("d1", attempts=(AttemptProgress(held, 1),), revoked=(held,))
    bench.reserve(reserved())
    record = bench.table.record(RequestId("r"))
    assert record is not None
    assert (record.state, record.decode_worker) == (State.PLACED, "d2")
    assert served(bench) == before


def test_what_a_lost_worker_had_computed_is_not_charged_again() -> None:
    bench = bench_of("d1", "d2")
    bench.submit(submit("r", 60, max_tokens=1000))
    bench.match()
    first = bench.reserve(reserved())
    bench.lose(first.worker)
    bench.submit(msgspec.structs.replace(submit("r", 60 + 20, epoch=2, max_tokens=1000), num_prompt_tokens=60))
    assert served(bench) == 60 + 20 + FIRST_GUESS
    bench.match()
    again = bench.reserve(reserved()).message.attempt
    assert again.epoch == 2
    tell(bench, AttemptOutput(again, 30, ended=True), worker="d2" if first.worker == "d1" else "d1")
    assert served(bench) == 60 + 20 + 30


def test_who_leaves_pays_for_what_was_seen_of_it() -> None:
    bench = bench_of()
    held = placed(bench, "r")
    tell(bench, AttemptOutput(held, 12))
    assert served(bench) == 60 + FIRST_GUESS
    bench.withdraw("r")
    assert served(bench) == 60 + FIRST_GUESS  # its worker has not said the last of it
    tell(bench, AttemptOutput(held, 20))
    assert served(bench) == 60 + FIRST_GUESS
    tell(bench, AttemptOutput(held, 25, ended=True))
    assert served(bench) == 60 + 25
    tell(bench, AttemptOutput(held, 25, ended=True))
    assert served(bench) == 60 + 25
    assert bench.table._book.queue._lanes["interactive"].shares.account(TenantId("t")).running == 0


def test_who_leaves_before_the_next_beat_pays_for_more_than_the_prompt() -> None:
    bench = bench_of()
    for i in range(3):
        held = placed(bench, f"r{i}")
        bench.withdraw(f"r{i}")
        tell(bench, AttemptOutput(held, 30, ended=True))
        assert served(bench) == (i + 1) * (60 + 30)


@pytest.mark.parametrize("lost", [True, False])
def test_where_the_worker_says_nothing_it_is_what_was_seen(lost: bool) -> None:
    bench = bench_of()
    held = placed(bench, "r")
    tell(bench, AttemptOutput(held, 12))
    bench.withdraw("r")
    if lost:
        bench.lose("d1")
    else:
        bench.beat("d1", attempts=(AttemptProgress(held, 1),))  # it has not heard of the cancel
        bench.beat("d1")
        assert served(bench) == 60 + FIRST_GUESS
        bench.beat("d1")
    assert served(bench) == 60 + 12


def test_under_a_new_leader_nobody_owes_anything() -> None:
    bench = Bench(term=2, gather_s=1.0)
    old = attempt("r", 1, 7)
    bench.beat("d1", attempts=(AttemptProgress(old, 1),))
    bench.submit(submit("r", 60))
    assert bench.table.placed == 1
    assert served(bench) == 0.0
    tell(bench, AttemptOutput(old, 100))
    tell(bench, AttemptOutput(old, 100, ended=True))
    assert served(bench) == 0.0


def test_a_news_of_another_attempt_changes_nothing() -> None:
    bench = bench_of()
    held = placed(bench, "r")
    before = served(bench)
    tell(bench, AttemptOutput(attempt("r", 1, held.dispatch + 1), 1, ended=True), AttemptOutput(held, 1))
    bench.beat("p1", "prefill", outputs=(AttemptOutput(held, 1, ended=True),))
    assert served(bench) == before


def test_a_late_turn_that_is_given_back_leaves_no_debt() -> None:
    bench = Bench(slo_ttft_s={}, max_wait_s={"interactive": 1.0})
    bench.beat("d1", free_blocks=(0,))
    bench.submit(submit("r", 60), tenant="a")
    bench.now = 2.0
    bench.ingresses.heard(INGRESS, bench.now)
    bench.beat("d1")
    queue = bench.table._book.queue
    assert queue._late_debt > 0
    record = bench.table.record(RequestId("r"))
    assert record is not None
    bench.match()
    bench.reserve(reserved(num_cached_tokens=32))  # the cost is corrected
    assert record.state == State.PLACED
    bench.beat("d1", attempts=(AttemptProgress(record.attempt, 1),), revoked=(record.attempt,))
    assert record.state == State.QUEUED
    assert queue._late_debt == 0.0


def test_a_flood_of_one_tenant_is_placed_turn_by_turn_with_another() -> None:
    bench = bench_of(max_placing=1)
    for i in range(30):
        bench.submit(submit(f"a{i}", 3_000 if i % 2 else 60), tenant="a")
    for i in range(5):
        bench.submit(submit(f"b{i}", 60), tenant="b")
    order = []
    for _ in range(8):
        if bench.count(AskMatch):
            bench.match()
        order.append(bench.reserve(reserved()).message.attempt.request_id)
        bench.beat("d1", free_blocks=(1000,), total_blocks=(1000,))
    assert order[:3] == ["a0", "b0", "a1"]
    assert [name for name in order if name.startswith("b")] == [f"b{i}" for i in range(5)]  # no giant between


def test_tenants_with_less_than_their_share_may_wait_in_a_full_queue() -> None:
    bench = Bench(queue_bound=10)
    bench.beat("d1", free_blocks=(0,))
    answers = [bench.submit(submit(f"a{i}", 60), tenant="a") for i in range(12)]
    assert [hasattr(answer, "error") for answer in answers] == [False] * 10 + [True] * 2
    answers = [bench.submit(submit(f"b{i}", 60), tenant="b") for i in range(7)]
    assert [hasattr(answer, "error") for answer in answers] == [False] * 5 + [True] * 2
    answers = [bench.submit(submit(f"c{i}", 60), tenant="c", weight=2.0) for i in range(7)]
    assert [hasattr(answer, "error") for answer in answers] == [False] * 5 + [True] * 2
