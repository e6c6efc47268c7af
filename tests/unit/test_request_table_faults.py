"""The request table under faults: lost workers and answers, duplicates, cancels, and a new leader."""

from __future__ import annotations

from services.scheduler.effects import AskMatch, AskReserve
from services.scheduler.record import State
from shared.contracts import messages as m
from shared.contracts.ids import Dispatch, Incarnation, RequestId, WorkerId
from shared.contracts.parts import AttemptProgress
from tests.unit.scheduler_support import INGRESS, Bench, attempt, no_room, reserved, submit

ACCEPTED = m.PrefillAccepted(incarnation=Incarnation(1))


def progress(*attempts: object) -> tuple[AttemptProgress, ...]:
    return tuple(AttemptProgress(a, 1) for a in attempts)  # type: ignore[arg-type]


def pair(**limits: object) -> Bench:
    bench = Bench(**limits)  # type: ignore[arg-type]
    bench.beat("d1")
    bench.beat("p1", "prefill")
    return bench


def state(bench: Bench, name: str) -> State | None:
    record = bench.table.record(RequestId(name))
    return record.state if record is not None else None


def test_a_refused_prefill_leg_is_restamped_as_local() -> None:
    for reply, reason in ((no_room(), "prefill_refused"), (None, "prefill_timeout")):
        bench = pair()
        bench.submit(submit("r", 600))
        bench.match()
        bench.reserve(reserved())
        bench.prefill(reply)
        assert bench.cancels() == [("p1", attempt("r", 1, 1))]
        again = bench.reserve(reserved())
        assert (again.message.attempt, again.message.prefill_worker) == (attempt("r", 1, 2), "")
        assert (bench.told[0].path, bench.told[0].reason) == ("local", reason)


def test_a_prefill_worker_lost_while_asked_is_the_same() -> None:
    bench = pair()
    bench.submit(submit("r", 600))
    bench.match()
    bench.reserve(reserved())
    bench.lose("p1")
    bench.reserve(reserved())
    assert bench.told[0].reason == "prefill_lost"


def test_a_prefill_worker_lost_before_the_reserve_is_answered() -> None:
    bench = pair()
    bench.submit(submit("r", 600))
    bench.match()
    bench.lose("p1")
    bench.reserve(reserved())
    assert bench.reserve(reserved()).message.attempt.dispatch == 2
    assert bench.told[0].reason == "prefill_lost"


def test_an_unanswered_reserve_that_was_accepted_is_adopted_by_the_beat() -> None:
    bench = pair()
    bench.submit(submit("r"))
    bench.match()
    bench.reserve(None)
    assert state(bench, "r") == State.QUEUED
    bench.beat("d1", attempts=progress(attempt("r", 1, 1)))
    assert state(bench, "r") == State.PLACED
    assert bench.told[0].attempt == attempt("r", 1, 1)


def test_an_accepted_hand_off_we_did_not_hear_of_is_asked_again_so_that_its_prefill_leg_begins() -> None:
    for there, path in ((True, "handed_off"), (False, "local")):
        bench = pair()
        bench.submit(submit("r", 600))
        bench.match()
        bench.reserve(None)
        if not there:
            bench.lose("p1")
        bench.beat("d1", attempts=progress(attempt("r", 1, 1)))
        assert bench.told[:-1] == bench.told[1:] == []  # not placed yet: nobody computes its prompt
        again = bench.reserve(reserved())
        assert again.message.attempt == attempt("r", 1, 2)  # the worker re-stamps what it holds
        if there:
            assert bench.prefill(ACCEPTED).message.attempt == attempt("r", 1, 2)
        assert (bench.told[-1].path, bench.told[-1].attempt) == (path, attempt("r", 1, 2))


def test_a_late_yes_of_a_lost_worker_places_nothing() -> None:
    bench = pair()
    bench.submit(submit("r"))
    bench.match()
    bench.reserve(None)
    bench.lose("d1")
    bench.take(bench.table.reserve_replied(0.0, attempt("r", 1, 1), WorkerId("d1"), reserved()))
    assert state(bench, "r") == State.QUEUED
    assert bench.cancels() == [("d1", attempt("r", 1, 1))]
    bench.beat("d2")
    assert state(bench, "r") == State.RESERVING


def test_an_unanswered_reserve_goes_elsewhere_and_the_late_holder_is_cancelled() -> None:
    bench = pair()
    bench.beat("d2")
    bench.submit(submit("r"))
    bench.match()
    first = bench.reserve(None)
    second = bench.reserve(reserved())
    assert (first.worker, second.worker) == ("d1", "d2")
    bench.beat("d1", attempts=progress(attempt("r", 1, 1)))
    assert bench.cancels() == [("d1", attempt("r", 1, 1))]
    assert state(bench, "r") == State.PLACED


def test_a_late_yes_is_taken_while_queued_and_cancelled_when_fenced() -> None:
    bench = pair(max_placing=1)
    bench.submit(submit("r"))
    bench.match()
    first = bench.reserve(None)
    bench.take(bench.table.reserve_replied(0.0, first.message.attempt, first.worker, reserved()))
    assert state(bench, "r") == State.PLACED
    bench.take(bench.table.reserve_replied(0.0, attempt("r", 1, 0), WorkerId("d9"), reserved()))
    assert bench.cancels() == [("d9", attempt("r", 1, 0))]


def test_hops_the_shell_never_answers_time_out_in_the_table() -> None:
    bench = pair()
    bench.submit(submit("r", 600))
    bench.tick(1.0)  # match
    assert bench.count(AskReserve) == 1
    bench.tick(3.0)  # reserve
    assert bench.effects[-1].outcome == "requeued"  # type: ignore[union-attr]


def test_a_lost_decode_worker_is_told_and_the_higher_epoch_replaces() -> None:
    bench = pair()
    bench.submit(submit("r"))
    bench.match()
    bench.reserve(reserved())
    bench.lose("d1")
    assert isinstance(bench.told[-1], m.WorkerLost)
    assert bench.told[-1].number == bench.told[0].number + 1
    assert state(bench, "r") == State.LOST
    assert isinstance(bench.submit(submit("r", 65, epoch=2)), m.Queued)
    bench.beat("d2")
    bench.match()
    assert bench.reserve(reserved()).message.attempt == attempt("r", 2, 1)


def test_a_decode_worker_lost_while_reserving_puts_the_request_back() -> None:
    bench = pair()
    bench.beat("d2")
    bench.submit(submit("r"))
    bench.match()
    ask: AskReserve = bench.pop(AskReserve)
    bench.lose(ask.worker)
    assert bench.pop(AskReserve).worker == "d2"
    bench.take(bench.table.reserve_replied(0.0, ask.message.attempt, ask.worker, reserved()))
    assert bench.cancels() == [("d1", attempt("r", 1, 1))]


def test_a_replaced_incarnation_counts_as_lost() -> None:
    bench = pair()
    bench.submit(submit("r"))
    bench.match()
    bench.reserve(reserved())
    bench.beat("d1", incarnation=Incarnation(2))
    assert isinstance(bench.told[-1], m.WorkerLost)
    assert bench.told[-1].incarnation == 1


# ---------------------------------------------------------------------------------------------- idempotency, ingresses


def test_submit_is_idempotent_and_older_epochs_are_refused() -> None:
    bench = pair()
    for _ in range(3):
        assert isinstance(bench.submit(submit("r")), m.Queued)
    assert bench.count(AskMatch) == 1
    bench.submit(submit("r", epoch=2))
    assert isinstance(bench.submit(submit("r", epoch=1)), m.Refusal)


def test_a_duplicate_of_an_ended_request_does_not_run_again() -> None:
    bench = pair()
    bench.submit(submit("r"))
    bench.match()
    bench.reserve(reserved())
    bench.beat("d1", attempts=progress(attempt("r", 1, 1)))
    bench.beat("d1")
    assert state(bench, "r") == State.PLACED  # one beat may be older than the placement
    bench.beat("d1")
    assert state(bench, "r") is None
    bench.effects.clear()
    assert isinstance(bench.submit(submit("r")), m.Queued)
    assert bench.effects == []
    bench.submit(submit("r", epoch=2))
    assert bench.count(AskMatch) == 1


def test_what_is_being_placed_is_cancelled_when_its_ingress_drops_it() -> None:
    bench = pair(max_placing=1)
    bench.submit(submit("placing", 600))
    bench.match()
    bench.reserve(reserved())
    for number in (1, 2):
        bench.take(bench.table.ingress_beat(3.0, m.GatewayBeat(ingress_id=INGRESS, number=number)))
    assert bench.cancels() == [("d1", attempt("placing", 1, 1)), ("p1", attempt("placing", 1, 1))]
    bench.beat("d1", attempts=progress(attempt("placing", 1, 1)))  # the cancel was lost
    assert bench.cancels() == [("d1", attempt("placing", 1, 1))]


def test_an_ingress_drops_by_not_listing_and_by_falling_silent() -> None:
    bench = Bench()
    bench.beat("d1", free_blocks=(0,))
    for name in ("kept", "dropped"):
        bench.submit(submit(name))
    for number, now in enumerate((0.0, 1.0, 2.9, 3.0, 4.0)):
        bench.now = now
        assert bench.table.queued == 2  # beats within the grace do not count
        beat = m.GatewayBeat(ingress_id=INGRESS, number=number, requests=(RequestId("kept"),))
        bench.take(bench.table.ingress_beat(now, beat))
    assert (bench.table.queued, state(bench, "dropped")) == (1, None)
    assert bench.told[0].error.code == "Cancelled/unlisted"  # were it a mistake, the request would end, not hang
    bench.tick(9.9)
    assert bench.table.queued == 1
    bench.tick(0.2)
    assert bench.table.queued == 0
    assert bench.told[1].error.code == "Unavailable/ingress_silent"


def test_events_for_a_silent_ingress_are_given_up_after_a_while() -> None:
    bench = Bench(remember_s=20.0)
    bench.beat("d1", free_blocks=(0,))
    bench.submit(submit("r"))
    bench.table.tick(10.0)  # the event is not seen
    assert bench.table.unseen_events == 1
    bench.table.ingress_beat(15.0, m.GatewayBeat(ingress_id=INGRESS, number=1))
    bench.table.tick(29.0)
    assert bench.table.unseen_events == 1  # it came back at 15 and fell silent again at 25
    bench.table.tick(49.0)
    assert bench.table.unseen_events == 0


# ---------------------------------------------------------------------------------------------- a new term


def test_a_new_leader_gathers_adopts_and_places_the_rest() -> None:
    bench = Bench(term=2, gather_s=1.5)
    bench.beat("d1", attempts=progress(attempt("held", 1, 3)))
    for name in ("rest", "held", "late"):
        bench.submit(submit(name, age_s=5.0))
    assert state(bench, "held") == State.PLACED
    placed = bench.told[0]
    assert (placed.attempt, placed.reason, placed.term) == (attempt("held", 1, 3), "adopted", 2)
    bench.tick(1.0)
    assert bench.count(AskMatch) == 0
    bench.beat("d2", attempts=progress(attempt("late", 1, 1)))
    assert state(bench, "late") == State.PLACED
    bench.tick(0.6)
    assert bench.pop(AskMatch).attempt.request_id == "rest"


def test_dispatches_of_a_later_term_are_above_all_earlier_ones() -> None:
    bench = Bench(term=3)
    bench.beat("d1")
    bench.submit(submit("r"))
    bench.match()
    ask = bench.reserve(reserved())
    assert ask.message.attempt.dispatch == Dispatch((2 << 16) + 1)
    bench.beat("d2", attempts=progress(attempt("r", 1, 7)))  # placed by an earlier leader, seen too late
    assert bench.cancels() == [("d2", attempt("r", 1, 7))]


def test_a_beat_with_a_newer_attempt_wins_over_ours() -> None:
    bench = pair()
    bench.submit(submit("r"))
    bench.match()
    bench.reserve(reserved())
    bench.beat("d2", attempts=progress(attempt("r", 1, 5)))
    assert bench.cancels() == [("d1", attempt("r", 1, 1))]
    record = bench.table.record(RequestId("r"))
    assert record is not None
    assert (record.decode_worker, record.attempt) == ("d2", attempt("r", 1, 5))
    bench.beat("d3", attempts=progress(attempt("r", 2, 1)))
    assert state(bench, "r") is None


def test_a_resend_keeps_its_arrival() -> None:
    bench = Bench(gather_s=1.0)
    bench.beat("d1")
    bench.submit(submit("young", age_s=0.0))
    bench.submit(submit("old", age_s=9.0))
    bench.tick(1.1)
    first, second = bench.pop(AskMatch), bench.pop(AskMatch)
    assert (first.attempt.request_id, second.attempt.request_id) == ("old", "young")


def test_prefill_beats_with_fenced_attempts_are_cancelled() -> None:
    bench = pair()
    bench.submit(submit("r", 600))
    bench.match()
    bench.reserve(reserved())
    bench.prefill(None)
    bench.cancels()
    bench.beat("p1", "prefill", attempts=progress(attempt("r", 1, 1)))
    assert bench.cancels() == [("p1", attempt("r", 1, 1))]
