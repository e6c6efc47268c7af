"""The scheduler's records with their queue, outbox and tombstones, kept consistent; and the effects gathered so far.

Knows how a request enters, goes back, ends and is spoken of. Does not decide where anything runs: see `placer.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from services.scheduler.effects import CancelAt, Effect, PlacingEnded, Tell
from services.scheduler.outbox import Event, Outbox
from services.scheduler.placement import HANDED_OFF, NO_WORKER
from services.scheduler.queue import FairQueue
from services.scheduler.record import PLACING, Record, State
from services.scheduler.tombstones import Tombstones
from shared.contracts import messages as m
from shared.contracts.attempt import Attempt
from shared.contracts.errors import ErrorInfo, from_wire
from shared.contracts.ids import IngressId, RequestId, Term, WorkerId
from shared.telemetry import attributes as a


class Book:
    """Every method keeps: a record is in the queue exactly when its state is QUEUED."""

    def __init__(self, term: Term, *, remember_s: float, event_resend_s: float) -> None:
        self.term = term
        self.records: dict[RequestId, Record] = {}
        self.queue = FairQueue()
        self.outbox = Outbox(term, event_resend_s)
        self.ended = Tombstones(remember_s)
        self.effects: list[Effect] = []
        self.refusals: Counter[str] = Counter()
        """Requests turned away or given up, by reason."""

    def drain(self, now: float) -> list[Effect]:
        """Effects since the last drain, events that are due among them."""
        effects = [*self.effects, *(Tell(ingress, event) for ingress, event in self.outbox.due(now))]
        self.effects.clear()
        return effects

    def current(self, attempt: Attempt, state: State) -> Record | None:
        """The record an answer is for, if it still waits for it."""
        record = self.records.get(attempt.request_id)
        return record if record is not None and record.attempt == attempt and record.state == state else None

    def placing(self) -> int:
        return sum(record.state in PLACING for record in self.records.values())

    def add(self, record: Record) -> None:
        self.records[record.request_id] = record
        self._push(record)

    def _push(self, record: Record) -> None:
        record.state = State.QUEUED
        self.queue.push(record.request_id, record.grant.klass, record.arrival_s, record.order)

    def requeue(self, record: Record, reason: str) -> None:
        """Back to where it stood."""
        if record.state in PLACING:
            self.effects.append(PlacingEnded(record.request_id, "requeued", {a.REASON: reason}))
        self._push(record)

    def take(self, record: Record, state: State) -> None:
        """Out of the queue, into a placing or placed state."""
        self.queue.remove(record.request_id)
        record.state = state

    def end(self, now: float, record: Record, *, dropped: bool, outcome: str = "dropped") -> None:
        """Forget a request. `dropped`: nobody may run it on; what is under way for it is cancelled."""
        if record.state in PLACING:
            if dropped:
                self.cancel_at(record, outcome)
            self.effects.append(PlacingEnded(record.request_id, outcome))
        self.queue.remove(record.request_id)
        del self.records[record.request_id]
        self.ended.add(record.request_id, record.submit.attempt.epoch, dropped=dropped, now=now)

    def refuse(self, now: float, record: Record, error: ErrorInfo) -> None:
        """End a request with an error event to its ingress."""
        self.refusals[from_wire(error).code] += 1
        attempt, ingress = record.attempt, record.submit.ingress_id
        self.outbox.add(ingress, lambda number: m.PlacementRefused(number=number, attempt=attempt, error=error))
        self.end(now, record, dropped=True, outcome="refused")

    def cancel_at(self, record: Record, reason: str, *, roles: tuple[str, ...] = ("decode", "prefill")) -> None:
        """Cancel the record's attempt wherever it may be held."""
        choice = record.choice
        if choice is None or record.state == State.MATCHING:
            return
        message = m.Cancel(attempt=record.attempt, reason=reason)
        if "decode" in roles:
            self.effects.append(CancelAt(choice.decode_worker, "decode", message))
        if "prefill" in roles and choice.path == HANDED_OFF and record.state != State.RESERVING:
            self.effects.append(CancelAt(choice.prefill_worker, "prefill", message))

    def cancel_listed(self, worker: WorkerId, role: str, attempt: Attempt, reason: str) -> None:
        self.effects.append(CancelAt(worker, role, m.Cancel(attempt=attempt, reason=reason)))

    def tell_placed(self, record: Record) -> None:
        choice = record.choice
        assert choice is not None

        def build(number: int) -> Event:
            return m.Placed(
                number=number,
                attempt=record.attempt,
                term=self.term,
                decode_worker=choice.decode_worker,
                prefill_worker=choice.prefill_worker if choice.path == HANDED_OFF else NO_WORKER,
                path=choice.path,
                reason=choice.reason,
                local_s=choice.local_s,
                handed_off_s=choice.handed_off_s,
                queue_s=record.queue_s,
                numerics=choice.numerics,
            )

        self.outbox.add(record.submit.ingress_id, build)
        attributes: dict[str, str | int | float] = {
            a.PATH: choice.path,
            a.REASON: choice.reason,
            a.CLASS: record.grant.klass,
            a.LOCAL_S: choice.local_s,
            a.HANDED_OFF_S: choice.handed_off_s,
            a.QUEUE_S: record.queue_s,
            a.MATCHED_TOKENS: choice.matched_tokens,
            a.CANDIDATES: choice.candidates,
            a.DECODE_WORKER: choice.decode_worker,
            a.EPOCH: record.submit.attempt.epoch,
            a.DISPATCH: record.dispatch,
            a.TERM: self.term,
        }
        if choice.path == HANDED_OFF:
            attributes[a.PREFILL_WORKER] = choice.prefill_worker
        self.effects.append(PlacingEnded(record.request_id, "placed", attributes))

    def tell_each(self, ingresses: list[IngressId], build: Callable[[int], Event]) -> None:
        for ingress in ingresses:
            self.outbox.add(ingress, build)
