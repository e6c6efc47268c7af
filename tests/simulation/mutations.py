"""Cores broken on purpose: the simulator must notice each of them. Every entry patches one rule away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from services.decode.reservation import ReservationTable
from services.policy import ledger
from services.scheduler import placer
from services.scheduler.book import Book
from services.scheduler.outbox import Outbox
from services.scheduler.request_table import RequestTable
from shared.engine.worker_fences import Fences
from shared.kv.handoff import Closed, Sink, Source
from shared.text.stream_commit import StreamCommit

Mutation = Callable[[pytest.MonkeyPatch], None]


def ingress_accepts_older_attempts(patch: pytest.MonkeyPatch) -> None:
    real = StreamCommit._adopt

    def adopt(self: StreamCommit, attempt: Any, worker: Any, now: float) -> bool:
        return real(self, attempt, worker, now) or self.end is None

    patch.setattr(StreamCommit, "_adopt", adopt)


def ingress_skips_gaps(patch: pytest.MonkeyPatch) -> None:
    real = StreamCommit.on_record

    def on_record(self: StreamCommit, worker: Any, record: Any, now: float) -> Any:
        first = min(record.first_seq, len(self.committed(record.choice)))
        return real(self, worker, msgspec.structs.replace(record, first_seq=first), now)

    patch.setattr(StreamCommit, "on_record", on_record)


def ingress_never_sees_a_lost_tail(patch: pytest.MonkeyPatch) -> None:
    """A listing neither shows a gap nor a forgotten attempt, and a final that came is not missed."""
    patch.setattr(StreamCommit, "on_listing", lambda self, worker, held, now: [])
    patch.setattr(StreamCommit, "_ask_replay", lambda self, index, now: [])


def ingress_settles_again(patch: pytest.MonkeyPatch) -> None:
    real = StreamCommit._settle_if_done

    def settle(self: StreamCommit) -> Any:
        effects = real(self)
        return [effects[0], *effects] if effects else effects

    patch.setattr(StreamCommit, "_settle_if_done", settle)


def ledger_charges_twice(patch: pytest.MonkeyPatch) -> None:
    real = ledger.apply
    patch.setattr(ledger, "apply", lambda row, settle: real(None, settle))


def sink_skips_the_digest(patch: pytest.MonkeyPatch) -> None:
    real = Sink.pulled
    patch.setattr(Sink, "pulled", lambda self, ticket, bad, error="": real(self, ticket, (), error))


def sink_lets_go_during_a_pull(patch: pytest.MonkeyPatch) -> None:
    def close(self: Sink) -> Any:
        self.state = "closed"
        return [Closed(self.attempt)]

    patch.setattr(Sink, "close", close)


def source_frees_before_the_final_ack(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Source, "ack", lambda self, message, now: [] if self.freed else [self.free("early")])


def source_never_frees(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Source, "ack", lambda self, message, now: [])
    patch.setattr(Source, "tick", lambda self, now: [])


def worker_fences_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fences, "admits", lambda self, attempt: True)
    patch.setattr(Fences, "admits_term", lambda self, term: True)


def worker_obeys_old_leaders(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fences, "admits_term", lambda self, term: True)


def worker_hears_no_ingress(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReservationTable, "ingress_beat", lambda self, *args: [])


def worker_waits_for_kv_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReservationTable, "tick", lambda self, now: [])
    patch.setattr(ReservationTable, "source_died", lambda self, worker: [])


def scheduler_forgets_a_refused_request(patch: pytest.MonkeyPatch) -> None:
    real = Book.requeue

    def requeue(self: Book, record: Any, reason: str) -> None:
        real(self, record, reason)
        self.end(0.0, record, dropped=True)

    patch.setattr(Book, "requeue", requeue)


def scheduler_keeps_what_was_dropped(patch: pytest.MonkeyPatch) -> None:
    real = Book.end

    def end(self: Book, now: float, record: Any, *, dropped: bool, outcome: str = "dropped") -> None:
        if not dropped or record.choice is None:
            real(self, now, record, dropped=dropped, outcome=outcome)

    patch.setattr(Book, "end", end)


def scheduler_keeps_what_was_placed(patch: pytest.MonkeyPatch) -> None:
    real = RequestTable.worker_beat

    def worker_beat(self: RequestTable, now: float, beat: Any) -> Any:
        for record in self._book.records.values():
            record.unlisted = -9
        return real(self, now, beat)

    patch.setattr(RequestTable, "worker_beat", worker_beat)


def leaders_name_tries_alike(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(placer, "TERM_SHIFT", 0)


def scheduler_sends_events_once(patch: pytest.MonkeyPatch) -> None:
    real = Outbox.due

    def due(self: Outbox, now: float) -> Any:
        events = real(self, now)
        for ingress, event in events:
            self.seen(ingress, event.number)
        return events

    patch.setattr(Outbox, "due", due)


def scheduler_drops_what_it_adopts(patch: pytest.MonkeyPatch) -> None:
    """A new leader that takes a resent request for a duplicate of one that ended."""
    real = RequestTable.submit

    def submit(self: RequestTable, now: float, submit: Any, grant: Any) -> Any:
        if submit.age_s > 1.0:
            self._book.ended.add(submit.attempt.request_id, submit.attempt.epoch, dropped=False, now=now)
        return real(self, now, submit, grant)

    patch.setattr(RequestTable, "submit", submit)


MUTATIONS: dict[str, Mutation] = {
    f.__name__: f
    for f in (
        ingress_accepts_older_attempts,
        ingress_skips_gaps,
        ingress_never_sees_a_lost_tail,
        ingress_settles_again,
        ledger_charges_twice,
        sink_skips_the_digest,
        sink_lets_go_during_a_pull,
        source_frees_before_the_final_ack,
        source_never_frees,
        worker_fences_nothing,
        worker_obeys_old_leaders,
        worker_hears_no_ingress,
        worker_waits_for_kv_for_ever,
        scheduler_forgets_a_refused_request,
        scheduler_keeps_what_was_dropped,
        scheduler_keeps_what_was_placed,
        leaders_name_tries_alike,
        scheduler_sends_events_once,
        scheduler_drops_what_it_adopts,
    )
}
