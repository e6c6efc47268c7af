"""The request table: the way to PLACED, what puts a request back, what ends it, and what a new leader adopts."""

from __future__ import annotations

import msgspec
import pytest

from services.scheduler.effects import AskMatch, AskPrefill, AskReserve, CancelAt, PlacingEnded
from services.scheduler.placer import MOST_OVERTAKEN, MOST_TRIED
from services.scheduler.record import State
from services.scheduler.worker_registry import REMEMBER_LOST_S, UNRESPONSIVE_S
from shared.contracts import messages as m
from shared.contracts.errors import ErrorInfo
from shared.contracts.ids import Incarnation, RequestId, WorkerId
from shared.contracts.parts import ClassRoom, Holder
from shared.telemetry import attributes as a
from tests.unit.scheduler_support import INGRESS, Bench, attempt, no_room, reserved, submit

ACCEPTED = m.PrefillAccepted(incarnation=Incarnation(1))


def pair(**limits: object) -> Bench:
    bench = Bench(**limits)  # type: ignore[arg-type]
    bench.beat("d1")
    bench.beat("p1", "prefill")
    return bench


def state(bench: Bench, name: str) -> State | None:
    record = bench.table.record(RequestId(name))
    return record.state if record is not None else None


# ---------------------------------------------------------------------------------------------- the way to placed


def test_a_short_prompt_goes_local() -> None:
    bench = pair()
    answer = bench.submit(submit("r", 60))
    assert isinstance(answer, m.Queued)
    assert answer.predicted_ttft_s > 0
    bench.match()
    ask = bench.reserve(reserved())
    assert (ask.worker, ask.message.prefill_worker, ask.message.attempt) == ("d1", "", attempt("r", 1, 1))
    (placed,) = bench.told
    assert (placed.path, placed.reason, placed.decode_worker) == ("local", "estimate", "d1")
    assert 0 < placed.local_s < placed.handed_off_s
    ended: PlacingEnded = bench.pop(PlacingEnded)
    assert ended.outcome == "placed"
    assert {a.PATH, a.REASON, a.LOCAL_S, a.HANDED_OFF_S, a.QUEUE_S} <= set(ended.attributes)
    assert bench.effects == []


def test_it_is_settled_while_all_have_their_place() -> None:
    bench = pair()
    assert bench.table.is_settled
    bench.submit(submit("r", 60))
    assert not bench.table.is_settled
    bench.match()
    assert not bench.table.is_settled
    bench.reserve(reserved())
    assert state(bench, "r") == State.PLACED
    assert bench.table.is_settled
    bench.lose("d1")
    assert not bench.table.is_settled


def test_an_event_nobody_saw_unsettles_it() -> None:
    bench = pair()
    bench.submit(submit("r", 60))
    bench.match()
    ask: AskReserve = bench.pop(AskReserve)
    effects = bench.table.reserve_replied(bench.now, ask.message.attempt, ask.worker, reserved())
    assert state(bench, "r") == State.PLACED
    assert not bench.table.is_settled
    bench.take(effects)
    assert bench.table.is_settled


def test_waiting_requests_are_counted_by_class() -> None:
    bench = pair()
    assert bench.table.waiting_by_class == {}
    for number, klass in enumerate(("interactive", "batch", "batch")):
        bench.submit(submit(f"r{number}", 60), klass=klass)
    waiting = bench.table.waiting_by_class
    assert waiting == {"interactive": 1, "batch": 2}
    assert sum(waiting.values()) == bench.table.queued + bench.table.placing


def test_tenants_that_wait_are_told_with_what_they_run() -> None:
    bench = pair(max_placing=1)
    bench.submit(submit("r", 20), tenant="b", weight=2.0)
    bench.reserve(reserved())
    assert bench.table.waiting_tenants() == ()
    for number, tenant in enumerate("aab"):
        bench.submit(submit(f"{tenant}{number}", 20), tenant=tenant, weight=2.0 if tenant == "b" else 1.0)
    a, b = bench.table.waiting_tenants()
    assert (a.tenant, a.klass, a.weight, a.waiting, a.running) == ("a", "interactive", 1.0, 2, 0)
    assert (b.tenant, b.weight, b.waiting, b.running) == ("b", 2.0, 1, 1)
    assert bench.table.waiting_tenants(most=1) == (a,)


def test_a_long_prompt_is_handed_off_from_the_true_hit() -> None:
    bench = pair()
    bench.submit(submit("r", 600))
    bench.match(Holder(WorkerId("p1"), (2,)), Holder(WorkerId("gone"), (9,)))
    assert bench.reserve(reserved(num_cached_tokens=32)).message.prefill_worker == "p1"
    assert bench.told == []
    run = bench.prefill(ACCEPTED)
    assert (run.worker, run.message.decode_worker, run.message.first_token) == ("p1", "d1", 32)
    assert len(run.message.token_ids) == 4 * 599  # all but the last token
    assert run.message.lease_token == b"t" * 16
    (placed,) = bench.told
    assert (placed.path, placed.prefill_worker) == ("handed_off", "p1")


def test_a_prompt_without_a_full_block_asks_no_match_and_one_token_has_no_prefill_leg() -> None:
    bench = pair()
    bench.submit(submit("r", 1))
    assert bench.count(AskMatch) == 0
    bench.reserve(reserved())
    assert (bench.told[0].path, bench.told[0].reason) == ("local", "one_token")


def test_no_prefill_leg_when_all_is_cached_or_it_runs_already() -> None:
    for reply in (reserved(num_cached_tokens=599), reserved(already_running=True)):
        bench = pair()
        bench.submit(submit("r", 600))
        bench.match()
        bench.reserve(reply)
        assert bench.count(AskPrefill) == 0
        assert bench.told[0].path == "local"


def test_a_match_that_does_not_come_counts_as_no_match() -> None:
    bench = pair()
    bench.submit(submit("r", 600))
    ask: AskMatch = bench.pop(AskMatch)
    assert 0.02 <= ask.timeout_s <= 0.5
    bench.take(bench.table.matched(0.0, ask.attempt, None))
    assert bench.pop(AskReserve).message.tags == ()


def test_what_is_withdrawn_from_the_queue_is_never_placed() -> None:
    bench = pair(gather_s=1.0)
    bench.submit(submit("r"))
    bench.submit(submit("other"))
    bench.withdraw("r")
    assert (bench.table.queued, state(bench, "other")) == (1, State.QUEUED)
    bench.submit(submit("r"))  # a late duplicate
    bench.now = 2.0
    bench.beat("d1")
    bench.match()
    assert bench.reserve(reserved()).message.attempt.request_id == "other"
    assert state(bench, "r") is None
    assert [told.attempt.request_id for told in bench.told] == ["other"]


def test_a_withdrawal_that_overtakes_its_submit_holds() -> None:
    bench = pair()
    bench.withdraw("r")
    assert isinstance(bench.submit(submit("r")), m.Queued)
    assert (state(bench, "r"), bench.effects) == (None, [])
    bench.submit(submit("r", epoch=2))  # the request again, in another life
    bench.withdraw("r")
    assert state(bench, "r") == State.MATCHING


def test_what_is_withdrawn_while_it_is_placed_is_cancelled_there() -> None:
    bench = pair()
    bench.submit(submit("r"))
    bench.match()
    ask: AskReserve = bench.pop(AskReserve)
    bench.withdraw("r")
    cancel: CancelAt = bench.pop(CancelAt)
    assert (cancel.worker, cancel.message.attempt, cancel.message.reason) == ("d1", ask.message.attempt, "withdrawn")
    ended: PlacingEnded = bench.pop(PlacingEnded)
    assert ended.outcome == "withdrawn"
    # the worker's yes was under way
    bench.take(bench.table.reserve_replied(bench.now, ask.message.attempt, ask.worker, reserved()))
    again: CancelAt = bench.pop(CancelAt)
    assert again.message.attempt == ask.message.attempt
    assert (bench.told, bench.effects) == ([], [])


def test_of_what_has_its_place_a_withdrawal_frees_the_place() -> None:
    bench = pair()
    bench.submit(submit("r"))
    bench.match()
    bench.reserve(reserved())
    assert bench.table.placed == 1
    bench.withdraw("r", epoch=0)  # of an earlier life
    assert bench.table.placed == 1
    bench.withdraw("r")
    assert (bench.table.placed, bench.table.queued) == (0, 0)


def test_a_refused_grant_ends_the_request() -> None:
    bench = pair()
    bench.submit(submit("r", 600))
    ask: AskMatch = bench.pop(AskMatch)
    refusal = m.Refusal(error=ErrorInfo("Forbidden/purged", "scope generation is over"))
    bench.take(bench.table.matched(0.0, ask.attempt, refusal))
    assert bench.told[0].error.code == "Forbidden/purged"
    assert bench.table.queued == 0


# ---------------------------------------------------------------------------------------------- putting back, refusing


def test_no_blocks_now_keeps_the_place_in_the_queue() -> None:
    bench = pair(max_placing=1)
    bench.submit(submit("first"))
    bench.submit(submit("second"))
    bench.match()
    bench.reserve(no_room())
    assert [bench.table.queued, state(bench, "first")] == [2, State.QUEUED]
    assert bench.effects[-1].outcome == "requeued"  # type: ignore[union-attr]
    assert bench.count(AskReserve) == 0  # the only worker just refused
    bench.beat("d1")
    ask = bench.pop(AskReserve)
    assert ask.message.attempt == attempt("first", 1, 2)  # the dispatch rises, the match is still fresh


def test_a_refusing_worker_is_asked_again_after_a_while_without_its_beat() -> None:
    bench = pair()
    bench.submit(submit("r"))
    bench.match()
    bench.reserve(no_room())
    bench.tick(0.5)
    assert bench.count(AskReserve) == 0
    bench.tick(0.6)
    assert bench.count(AskReserve) == 1


def test_a_head_without_room_is_passed_so_often_and_no_more() -> None:
    bench = Bench(max_placing=1)
    bench.beat("d1", free_blocks=(5,), max_sequences=0)
    bench.submit(submit("large", 32 * 6))
    for number in range(MOST_OVERTAKEN + 5):
        bench.submit(submit(f"small{number}", 31))
        if number < MOST_OVERTAKEN:
            bench.reserve(reserved())
            assert state(bench, f"small{number}") == State.PLACED
            bench.beat("d1", free_blocks=(5,), max_sequences=0)  # it has ended already
    assert bench.effects[-1].outcome == "placed"  # type: ignore[union-attr]
    assert bench.count(AskReserve) == 0  # the workers are emptied for it
    assert state(bench, "large") == State.QUEUED
    bench.beat("d1", free_blocks=(50,), max_sequences=0)
    assert state(bench, "large") == State.MATCHING


def test_a_lower_class_that_has_the_turn_keeps_no_higher_one_from_what_it_could_not_have() -> None:
    """All places are lower classes' own, which give them up to the higher one only."""
    bench, rooms = Bench(max_placing=1), (ClassRoom(8, (90,)), ClassRoom(8, (90,)), ClassRoom(0, (0,)))
    bench.beat("d1", rooms=rooms)
    bench.submit(submit("low", 31), klass="batch")
    for number in range(4 * MOST_OVERTAKEN):
        bench.submit(submit(f"high{number}", 31))
        bench.reserve(reserved())
        assert state(bench, f"high{number}") == State.PLACED
        bench.beat("d1", rooms=rooms)
    assert state(bench, "low") == State.QUEUED
    # what is free is the lower one's, as it has the turn
    free = (ClassRoom(1, (90,)),) * 3
    bench.submit(submit("last", 31))
    bench.reserve(no_room())
    bench.beat("d1", rooms=free)
    assert state(bench, "low") == State.RESERVING


def test_a_lower_class_whose_turn_it_is_holds_back_no_room_from_a_higher_one() -> None:
    bench = Bench(max_placing=1, max_wait_s={"batch": 1.0})
    bench.beat("d1", free_blocks=(60,))
    bench.submit(submit("giant", 32 * 90), klass="batch")
    bench.now = 2.0  # it is late
    for number in range(2 * MOST_OVERTAKEN):
        bench.ingresses.heard(INGRESS, bench.now)
        bench.submit(submit(f"high{number}", 31))
        bench.reserve(reserved())
        assert state(bench, f"high{number}") == State.PLACED
        bench.beat("d1", free_blocks=(60,))
    placed = 0
    for number in range(2 * MOST_OVERTAKEN):  # but from its own
        bench.submit(submit(f"same{number}", 31), klass="batch")
        if bench.count(AskReserve):
            bench.reserve(reserved())
            placed += 1
        bench.beat("d1", free_blocks=(60,))
    assert placed == MOST_OVERTAKEN
    assert state(bench, "giant") == State.QUEUED


def test_each_class_has_a_first_that_is_passed_only_so_often() -> None:
    """Interactive requests wait for their own worker; on the one for batch a large request is not passed for ever."""
    bench = Bench(max_placing=1)
    bench.beat("d1", classes=("interactive",), free_blocks=(0,))
    bench.submit(submit("high", 31))
    placed = 0
    for number in range(2 * MOST_OVERTAKEN):
        bench.beat("d2", classes=("batch",), free_blocks=(60,))
        if number == 0:
            bench.submit(submit("giant", 32 * 90), klass="batch")
        bench.submit(submit(f"low{number}", 31), klass="batch")
        if bench.count(AskReserve):
            bench.reserve(reserved())
            placed += 1
    assert placed == MOST_OVERTAKEN
    bench.beat("d2", classes=("batch",))
    assert state(bench, "giant") == State.MATCHING


def test_a_worker_kept_for_a_lower_class_works_while_a_higher_one_has_no_room() -> None:
    bench = Bench(slo_ttft_s={})
    bench.beat("d1", classes=("interactive",), free_blocks=(0,))
    bench.beat("d2", classes=("batch",))
    for number in range(4 * MOST_TRIED):  # each smaller than those before, so that each is tried
        bench.submit(submit(f"high{number}", 31, max_tokens=1000 - number), tenant=f"t{number % (MOST_TRIED + 4)}")
    bench.submit(submit("low", 31), klass="batch")
    assert state(bench, "low") == State.RESERVING


def test_what_is_small_is_tried_behind_many_that_have_no_room() -> None:
    bench = Bench()
    bench.beat("d1", free_blocks=(5,))
    for number in range(2 * MOST_TRIED):
        bench.submit(submit(f"large{number}", 32 * 6))
    bench.submit(submit("small", 31))
    assert state(bench, "small") == State.RESERVING


def test_what_is_no_smaller_than_one_without_room_is_not_tried() -> None:
    bench = Bench()
    bench.beat("d1", free_blocks=(5,))
    for name, num_tokens in (("large", 32 * 6), ("larger", 32 * 7), ("small", 32)):
        bench.submit(submit(name, num_tokens))
    states = [state(bench, name) for name in ("large", "larger", "small")]
    assert states == [State.QUEUED, State.QUEUED, State.RESERVING]


def test_never_fits_is_refused_at_once() -> None:
    bench = pair()
    bench.submit(submit("r", 600))
    bench.match()
    bench.reserve(no_room("ContextExceeded/pool", never=True))
    (told,) = bench.told
    assert isinstance(told, m.PlacementRefused)
    assert told.error.code == "ContextExceeded/pool"
    assert state(bench, "r") is None


def test_early_refusals() -> None:
    bench = Bench(queue_bound=2, no_worker_s=0.0)

    def code(answer: m.Queued | m.Refusal) -> str:
        return answer.error.code if isinstance(answer, m.Refusal) else ""

    assert code(bench.submit(submit("a"))) == "Unavailable/no_worker"
    assert code(bench.submit(submit("b", epoch=2))) == ""  # it ran before: it may wait for a worker
    bench.beat("d1", free_blocks=(0,))
    assert code(bench.submit(submit("c", age_s=200.0))) == "DeadlineExceeded/deadline_exceeded"
    slow = bench.submit(submit("d", 3_000), budget_s=1.0)
    assert code(slow) == "Overloaded/overloaded"
    assert isinstance(slow, m.Refusal)
    assert 1 <= slow.error.retry_after_s <= 60
    assert code(bench.submit(submit("e"))) == ""
    assert code(bench.submit(submit("f"))) == "Overloaded/overloaded"


def test_without_a_decode_worker_who_has_no_token_waits_a_moment_and_is_refused() -> None:
    # Given a worker that is lost, with one request that has tokens and one that has none waiting for another
    bench = Bench(no_worker_s=5.0)
    bench.beat("d1")
    bench.lose("d1")
    begun = submit("begun", 20, epoch=2)
    begun = msgspec.structs.replace(begun, num_prompt_tokens=15)
    for request in (begun, submit("new"), submit("again", epoch=2)):
        assert isinstance(bench.submit(request), m.Queued)
    # When no worker comes for as long as one takes to start again
    bench.tick(4.9)
    assert bench.told[1:] == []
    bench.tick(0.2)
    # Then who has no token is told, who has some goes on waiting, and a newcomer is refused at once
    refused = [event for event in bench.told if isinstance(event, m.PlacementRefused)]
    assert {(e.attempt.request_id, e.error.code) for e in refused} == {
        ("new", "Unavailable/no_worker"),
        ("again", "Unavailable/no_worker"),
    }
    late = bench.submit(submit("late"))
    assert isinstance(late, m.Refusal)
    assert late.error.code == "Unavailable/no_worker"
    assert late.error.retry_after_s > 0
    # And when a worker is up again, all are served
    bench.beat("d2")
    assert isinstance(bench.submit(submit("next")), m.Queued)
    assert bench.table.record(begun.attempt.request_id) is not None


def test_a_queue_of_batch_work_turns_no_interactive_request_away() -> None:
    bench = Bench()
    bench.beat("d1", free_blocks=(0,))
    for number in range(40):
        assert isinstance(bench.submit(submit(f"b{number}", 3_000), klass="batch", budget_s=86_400.0), m.Queued)
    late = bench.submit(submit("late", 60), klass="batch", budget_s=10.0)
    assert isinstance(late, m.Refusal)
    assert late.error.code == "Overloaded/overloaded"
    urgent = bench.submit(submit("urgent", 60), budget_s=10.0)
    assert isinstance(urgent, m.Queued)
    assert urgent.predicted_ttft_s < 1.0


def test_a_spent_budget_ends_a_queued_request_with_an_error() -> None:
    bench = Bench()
    bench.beat("d1", free_blocks=(0,))
    bench.submit(submit("r", age_s=1.0), budget_s=5.0)
    bench.tick(3.9)
    assert bench.told == []
    bench.tick(0.2)
    assert bench.told[0].error.code == "DeadlineExceeded/deadline_exceeded"


def test_what_no_worker_could_ever_hold_is_told_at_once_however_many_wait() -> None:
    bench = Bench()
    bench.beat("d1", free_blocks=(0,), total_blocks=(10,))
    bench.submit(submit("waits", 60))
    answer = bench.submit(submit("huge", 60, max_tokens=262))
    assert isinstance(answer, m.Refusal)
    assert answer.error.code == "ContextExceeded/context_length_exceeded"
    assert "hold 321 tokens" in answer.error.message
    assert isinstance(bench.submit(submit("fits", 60, max_tokens=261)), m.Queued)
    open_ended = submit("open", 60, max_tokens=4000)
    sampling = tuple(msgspec.structs.replace(choice, open_ended=True) for choice in open_ended.sampling)
    assert isinstance(bench.submit(msgspec.structs.replace(open_ended, sampling=sampling)), m.Queued)
    # a larger pool comes: it may wait for that one
    bench.beat("d2", free_blocks=(0,), total_blocks=(20,))
    assert isinstance(bench.submit(submit("huge", 60, max_tokens=262)), m.Queued)


@pytest.mark.parametrize("way", ["lost", "draining", "silent"])
def test_what_only_a_worker_that_is_away_for_a_moment_can_hold_waits_for_it(way: str) -> None:
    bench = Bench(max_placing=1)
    bench.beat("small", total_blocks=(10,), free_blocks=(10,))
    bench.beat("large")
    bench.submit(submit("runs", 1000))
    bench.match()
    assert bench.reserve(reserved()).worker == "large"
    if way == "draining":
        bench.beat("large", draining=True)
    elif way == "silent":
        bench.now = UNRESPONSIVE_S
        bench.registry.no_answer(WorkerId("large"), bench.now, bench.now)
        bench.beat("small", total_blocks=(10,), free_blocks=(10,))
    else:
        bench.lose("large")
        assert isinstance(bench.submit(submit("runs", 1000, epoch=2)), m.Queued)
    assert isinstance(bench.submit(submit("huge", 1000)), m.Queued)
    for number in range(2 * MOST_OVERTAKEN):  # the small worker is not emptied for what it cannot hold
        bench.submit(submit(f"small{number}", 31))
        assert bench.reserve(reserved()).worker == "small"
        bench.beat("small", total_blocks=(10,), free_blocks=(10,))
    assert not [event for event in bench.told if isinstance(event, m.PlacementRefused)]
    assert state(bench, "huge") == State.QUEUED
    bench.beat("large", incarnation=Incarnation(2))
    assert State.MATCHING in (state(bench, "huge"), state(bench, "runs"))


def test_what_only_a_worker_that_is_gone_for_good_could_hold_is_told_so() -> None:
    bench = Bench()
    bench.beat("small", total_blocks=(10,), free_blocks=(10,))
    bench.beat("large")
    bench.lose("large")
    assert isinstance(bench.submit(submit("huge", 1000)), m.Queued)
    bench.now += REMEMBER_LOST_S
    bench.registry.expire(bench.now)
    bench.beat("small", total_blocks=(10,), free_blocks=(10,))
    bench.ingresses.heard(INGRESS, bench.now)
    assert isinstance(bench.submit(submit("other", 1000)), m.Refusal)
    bench.tick()
    bench.match()
    assert bench.pop(AskReserve).worker == "small"  # which says so


def test_a_class_that_no_decode_worker_takes_is_refused_after_a_moment_and_the_others_run() -> None:
    bench = Bench(no_worker_s=5.0)
    bench.beat("d1", classes=("batch", "analysis"))
    assert isinstance(bench.submit(submit("urgent")), m.Queued)
    bench.submit(submit("later"), klass="batch")
    assert state(bench, "later") == State.MATCHING
    bench.tick(6.0)
    (refused,) = [event for event in bench.told if isinstance(event, m.PlacementRefused)]
    assert refused.attempt.request_id == "urgent"
    assert "takes interactive requests" in refused.error.message
    assert state(bench, "later") != State.QUEUED
