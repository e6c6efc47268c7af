"""The reservation table: fencing, leases of hand-off sources and of ingresses."""

from __future__ import annotations

from services.decode.reservation import Drop, GoLocal, Kind, ReservationTable, Verdict
from shared.contracts.attempt import Attempt
from shared.contracts.ids import Dispatch, Epoch, IngressId, RequestId, Term, WorkerId

INGRESS, PREFILL = IngressId("gw-1"), WorkerId("prefill-1")


def attempt(epoch: int = 1, dispatch: int = 1, request: str = "req-a") -> Attempt:
    return Attempt(RequestId(request), Epoch(epoch), Dispatch(dispatch))


def reserve(
    table: ReservationTable,
    a: Attempt,
    *,
    term: int = 1,
    source: WorkerId = PREFILL,
    lease_s: float = 5.0,
    now: float = 0,
) -> Verdict:
    return table.reserve(a, Term(term), INGRESS, source, lease_s, now)


def test_a_first_attempt_is_new_and_repeats_are_answered_alike() -> None:
    table = ReservationTable()
    assert reserve(table, attempt()).kind is Kind.NEW
    assert reserve(table, attempt()).kind is Kind.REPEATED
    assert table.attempts == (attempt(),)


def test_a_newer_attempt_restamps_and_fences_the_old_one() -> None:
    table = ReservationTable()
    reserve(table, attempt(1, 1))
    verdict = reserve(table, attempt(1, 2))
    assert verdict == Verdict(Kind.RESTAMPED, old=attempt(1, 1))
    assert table.get(attempt(1, 1)) is None
    assert reserve(table, attempt(1, 1)) == Verdict(Kind.REFUSED, reason="older_attempt")
    assert table.cancel(attempt(1, 1)) is None, "a cancel of the old attempt spares the new one"
    assert table.attempts == (attempt(1, 2),)


def test_a_lower_term_is_refused_even_for_a_newer_attempt() -> None:
    table = ReservationTable()
    reserve(table, attempt(), term=4)
    assert reserve(table, attempt(2), term=3) == Verdict(Kind.REFUSED, reason="lower_term")
    table.fences.see_term(Term(9))
    assert reserve(table, attempt(3), term=8).reason == "lower_term"


def test_cancel_ends_older_attempts_and_is_remembered() -> None:
    table = ReservationTable()
    reserve(table, attempt(1, 1))
    assert table.cancel(attempt(2, 0)) == attempt(1, 1)
    assert len(table) == 0
    assert reserve(table, attempt(1, 2)).reason == "older_attempt"
    assert reserve(table, attempt(2, 1)).kind is Kind.NEW


def test_cancel_before_the_reservation_arrives_refuses_it() -> None:
    table = ReservationTable()
    assert table.cancel(attempt()) is None
    assert reserve(table, attempt()).reason == "older_attempt"


def test_withdraw_lets_the_same_attempt_try_again() -> None:
    table = ReservationTable()
    reserve(table, attempt())
    table.withdraw(attempt())
    assert len(table) == 0
    assert table.sources == ()
    assert reserve(table, attempt()).kind is Kind.NEW


def test_an_ended_attempt_stays_fenced() -> None:
    table = ReservationTable()
    reserve(table, attempt())
    table.end(attempt())
    assert reserve(table, attempt()).reason == "older_attempt"


def test_the_lease_needs_progress_not_only_beats() -> None:
    table = ReservationTable()
    reserve(table, attempt(), lease_s=5)
    assert table.source_beat(PREFILL, 7, {attempt(): 10}, now=4) == []
    assert table.tick(now=8.9) == []
    assert table.source_beat(PREFILL, 7, {attempt(): 10}, now=8.9) == [], "listed, but the counter stands still"
    assert table.tick(now=9) == [GoLocal(attempt(), PREFILL, "prefill_lease")]
    assert table.tick(now=100 - 91) == [], "told once"
    assert table.attempts == (attempt(),), "the reservation outlives the hand-off"


def test_beats_that_do_not_list_the_attempt_renew_nothing() -> None:
    table = ReservationTable()
    reserve(table, attempt(), lease_s=5)
    table.source_beat(PREFILL, 7, {attempt(request="req-b"): 10}, now=4)
    assert table.tick(now=5) == [GoLocal(attempt(), PREFILL, "prefill_lease")]


def test_a_restarted_or_dead_source_is_given_up_at_once() -> None:
    table = ReservationTable()
    reserve(table, attempt())
    table.source_beat(PREFILL, 7, {attempt(): 1}, now=0)
    assert table.source_beat(PREFILL, 6, {}, now=0.5) == [], "a late beat of the process before"
    assert table.source_beat(PREFILL, 8, {}, now=1) == [GoLocal(attempt(), PREFILL, "prefill_restarted")]
    reserve(table, attempt(1, 2))
    assert table.source_died(PREFILL) == [GoLocal(attempt(1, 2), PREFILL, "prefill_died")]
    assert table.source_died(PREFILL) == []


def test_settled_kv_needs_no_lease() -> None:
    table = ReservationTable()
    reserve(table, attempt(), lease_s=5)
    table.kv_settled(attempt())
    table.ingress_beat(INGRESS, 1, {RequestId("req-a")}, now=5)
    assert table.tick(now=9) == []


def test_a_commit_renews_the_lease() -> None:
    table = ReservationTable()
    reserve(table, attempt(), lease_s=5)
    table.source_progress(attempt(), 7, now=4)
    assert table.tick(now=6) == []


def test_a_silent_ingress_loses_its_requests() -> None:
    table = ReservationTable()
    reserve(table, attempt(), source=WorkerId(""))
    table.ingress_beat(INGRESS, 1, {RequestId("req-a")}, now=1)
    assert table.tick(now=10.9) == []
    assert table.tick(now=11) == [Drop(attempt(), "ingress_silent")]
    assert len(table) == 0
    assert reserve(table, attempt()).reason == "older_attempt"


def test_an_unlisted_request_is_dropped_after_two_beats_and_the_grace() -> None:
    table = ReservationTable()
    reserve(table, attempt(), source=WorkerId(""))
    assert table.ingress_beat(INGRESS, 1, (), now=0.5) == [], "sent before the request existed"
    assert table.ingress_beat(INGRESS, 2, (), now=2.5) == []
    assert table.ingress_beat(INGRESS, 2, (), now=2.6) == [], "a duplicate"
    assert table.ingress_beat(INGRESS, 3, (), now=3.5) == [Drop(attempt(), "ingress_unlisted")]
