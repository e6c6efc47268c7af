"""The prefill worker's table of sources: fencing and the ways a source ends."""

from __future__ import annotations

from services.prefill.source_table import SourceTable
from shared.contracts.attempt import Attempt
from shared.contracts.ids import Dispatch, Epoch, Incarnation, RequestId, Term, WorkerId
from shared.contracts.messages import HandoffAck, HandoffRelease
from shared.kv.handoff import Free, Source, SourceIdentity

DECODE = WorkerId("decode-1")


def attempt(dispatch: int = 1, request: str = "req-a") -> Attempt:
    return Attempt(RequestId(request), Epoch(1), Dispatch(dispatch))


def source(a: Attempt) -> Source:
    identity = SourceIdentity(WorkerId("prefill-1"), Incarnation(3), "fp", "pool-a", (4,))
    return Source(identity, a, DECODE, Incarnation(9), b"t" * 16, 0, 10, 5.0, 0.0)


def test_a_newer_attempt_ends_the_older_one() -> None:
    table = SourceTable()
    table.open(source(attempt(1)))
    assert table.open(source(attempt(2))) == [Free(attempt(1), "superseded")]
    assert table.refuses(attempt(1), Term(1)) == "older_attempt"
    assert table.attempts == (attempt(2),)


def test_terms_fence() -> None:
    table = SourceTable()
    assert table.refuses(attempt(), Term(3)) == ""
    assert table.refuses(attempt(), Term(2)) == "lower_term"


def test_cancel_ends_older_attempts_even_before_they_arrive() -> None:
    table = SourceTable()
    assert table.cancel(attempt(2)) == []
    assert table.refuses(attempt(1), Term(1)) == "older_attempt"
    assert table.refuses(attempt(3), Term(1)) == ""
    table.open(source(attempt(3)))
    assert table.cancel(attempt(2)) == []
    assert table.cancel(attempt(3)) == [Free(attempt(3), "cancelled")]
    assert len(table) == 0


def test_done_release_death_and_lease_free() -> None:
    table = SourceTable()
    for name in ("req-a", "req-b", "req-c", "req-d"):
        table.open(source(attempt(request=name)))
    done = HandoffAck(attempt=attempt(), worker=DECODE, number=1, num_tokens=10, done=True)
    assert table.ack(done, 1) == [Free(attempt(), "done")]
    assert table.ack(done, 1) == []
    foreign = HandoffRelease(attempt=attempt(request="req-b"), worker=WorkerId("decode-2"), reason="x")
    assert table.release(foreign) == []
    release = HandoffRelease(attempt=attempt(request="req-b"), worker=DECODE, reason="digest")
    assert table.release(release) == [Free(attempt(request="req-b"), "released:digest")]
    assert table.decode_beat(DECODE, 9, {attempt(request="req-c"): 1}, now=4) == []
    assert table.tick(5) == [Free(attempt(request="req-d"), "lease")]
    assert table.decode_died(DECODE) == [Free(attempt(request="req-c"), "decode_died")]
    assert len(table) == 0


def test_withdrawn_runs_may_be_tried_again() -> None:
    table = SourceTable()
    table.open(source(attempt()))
    table.withdraw(attempt())
    assert table.refuses(attempt(), Term(1)) == ""
