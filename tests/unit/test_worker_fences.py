"""Fences and leases: what a worker remembers of attempts, terms and its peers' progress."""

from __future__ import annotations

from shared.contracts.attempt import Attempt
from shared.contracts.ids import Dispatch, Epoch, RequestId, Term
from shared.engine.worker_fences import Fences
from shared.kv.lease import ProgressLease


def attempt(epoch: int, dispatch: int, request: str = "req-a") -> Attempt:
    return Attempt(RequestId(request), Epoch(epoch), Dispatch(dispatch))


def test_opening_fences_what_is_older_closing_also_itself() -> None:
    fences = Fences()
    fences.open(attempt(1, 2))
    assert not fences.admits(attempt(1, 1))
    assert fences.admits(attempt(1, 2))
    fences.close(attempt(1, 2))
    assert not fences.admits(attempt(1, 2))
    assert fences.admits(attempt(1, 3))
    assert fences.admits(attempt(2, 0))


def test_a_late_close_never_lowers_a_fence() -> None:
    fences = Fences()
    fences.open(attempt(3, 1))
    fences.close(attempt(1, 1))
    assert not fences.admits(attempt(2, 5))
    assert fences.admits(attempt(3, 1))


def test_memory_is_bounded_and_forgets_the_oldest() -> None:
    fences = Fences(capacity=10)
    for i in range(25):
        fences.close(attempt(1, 1, f"req-{i}"))
    assert len(fences) == 10
    assert not fences.admits(attempt(1, 1, "req-24"))


def test_terms_only_rise() -> None:
    fences = Fences()
    fences.see_term(Term(5))
    fences.see_term(Term(3))
    assert fences.term == 5
    assert fences.admits_term(Term(5))
    assert not fences.admits_term(Term(4))


def test_a_lease_is_renewed_by_progress_only() -> None:
    lease = ProgressLease.start(2.0, now=0.0)
    assert lease.beat(7, 1, now=1.0)
    assert lease.beat(7, 1, now=2.5)
    assert not lease.expired(2.9)
    assert lease.expired(3.0)
    assert lease.beat(7, None, now=2.9)
    assert lease.expired(3.0)
    lease.renew(3.0)
    assert not lease.expired(4.9)


def test_only_a_younger_process_is_a_restart() -> None:
    lease = ProgressLease.start(2.0, now=0.0, incarnation=7)
    assert lease.beat(6, 99, now=1.0), "late, and renews nothing"
    assert lease.expired(2.0)
    assert not lease.beat(8, 1, now=1.5)
