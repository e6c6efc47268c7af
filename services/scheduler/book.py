"""The scheduler's records with their queue, outbox and tombstones, kept consistent; and the effects gathered so far.

Knows how a request enters, goes back, ends and is spoken of. Does not decide where anything runs: see `placer.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from services.scheduler.costs import OutputGuess
from services.scheduler.effects import CancelAt, Effect, PlacingEnded, Tell
from services.scheduler.leavers import Leaver, Leavers
from services.scheduler.outbox import Event, Outbox
from services.scheduler.placement import HANDED_OFF, NO_WORKER
from services.scheduler.queue import FairQueue
from services.scheduler.record import PLACING, Record, State
from services.scheduler.shares import Charge
from services.scheduler.tombstones import Tombstones
from shared.contracts import messages as m
from shared.contracts.attempt import Attempt
from shared.contracts.errors import ErrorInfo, from_wire
from shared.contracts.ids import IngressId, RequestId, Term, WorkerId
from shared.telemetry import attributes as a


class Book:
    """Every method keeps: a record is in the queue exactly when its state is QUEUED."""

    def __init__(
        self, term: Term, *, remember_s: float, event_resend_s: float, max_wait_s: Mapping[str, float] | None = None
    ) -> None:
        self.term = term
        self.records: dict[RequestId, Record] = {}
        self.queue = FairQueue(max_wait_s=max_wait_s)
        self.outputs = OutputGuess()
        self.leavers = Leavers()
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
        grant = record.grant
        guess = self.outputs.guess(grant.tenant, grant.klass, record.max_new_tokens)
        record.guessed_output = guess * record.choices
        self.records[record.request_id] = record
        self._push(record, again=False)

    def _push(self, record: Record, *, again: bool) -> None:
        record.state = State.QUEUED
        grant = record.grant
        self.queue.push(
            record.request_id,
            grant.klass,
            record.arrival_s,
            record.order,
            tenant=grant.tenant,
            weight=grant.weight,
            cost=record.cost,
            again=again,
            resumed=record.submit.attempt.epoch > 1,
        )

    def requeue(self, record: Record, reason: str) -> None:
        """Back to where it stood."""
        if record.state in PLACING:
            self.effects.append(PlacingEnded(record.request_id, "requeued", {a.REASON: reason}))
        self._push(record, again=True)
        self._give_back(record)

    def take(self, record: Record, state: State) -> None:
        """Out of the queue, into a placing or placed state; its tenant is charged as it leaves the queue."""
        self.queue.remove(record.request_id)
        record.state = state
        if record.charge is None:
            grant = record.grant
            cost = 0.0 if record.paid_before else record.cost
            record.charge = self.queue.charge(grant.klass, grant.tenant, grant.weight, cost)
            if record.late:
                record.late_cost = record.cost
                self.queue.began_late(record.late_cost)

    def correct(self, record: Record) -> None:
        """More is known of what the request comes to."""
        if record.charge is not None and not record.paid_before:
            self.queue.correct(record.grant.klass, record.charge, record.cost)

    def output_counted(self, record: Record, num_tokens: int, *, ended: bool = False, cut: bool = False) -> None:
        """Its worker has made so many tokens for it: in all, when it has `ended` by itself or was `cut` short."""
        if record.output_ended:
            return
        record.num_output, record.output_ended = num_tokens, ended
        record.guessed_output = num_tokens if ended or cut else max(record.guessed_output, float(num_tokens))
        self.correct(record)
        if ended:
            self.outputs.learn(record.grant.tenant, record.grant.klass, num_tokens / record.choices)

    def _give_back(self, record: Record) -> None:
        """Nothing was done for it: its tenant is charged nothing."""
        if record.charge is None:
            return
        if record.late:
            self.queue.began_late(-record.late_cost)
            record.late = False
        self.queue.correct(record.grant.klass, record.charge, 0.0)
        self.queue.close(record.grant.klass, record.charge)
        record.charge = None

    def _close(self, record: Record, *, dropped: bool) -> None:
        """It ends. What was never placed costs nothing, and what is cut short as much as its worker made of it: it says
        that in one of its next beats, unless it is lost."""
        if record.state in (State.PLACED, State.LOST) and record.charge is not None:
            open_ended = dropped and not record.output_ended and not record.paid_before
            if open_ended and record.state == State.PLACED:
                self._leaves(record, record.charge)
                return
            if dropped:
                self.output_counted(record, record.num_output, ended=False, cut=True)
            self.queue.close(record.grant.klass, record.charge)
            record.charge = None
        self._give_back(record)

    def _leaves(self, record: Record, charge: Charge) -> None:
        leaver = Leaver(
            attempt=record.attempt,
            worker=record.decode_worker,
            klass=record.grant.klass,
            charge=charge,
            num_tokens=record.charged_tokens,
            num_cached=record.num_cached,
            num_output=record.num_output,
        )
        self.leavers.add(leaver)
        record.charge = None

    def settle(self, leavers: list[Leaver]) -> None:
        """They pay for what was made for them."""
        for leaver in leavers:
            self.queue.correct(leaver.klass, leaver.charge, leaver.cost)
            self.queue.close(leaver.klass, leaver.charge)

    def end(self, now: float, record: Record, *, dropped: bool, outcome: str = "dropped") -> None:
        """Forget a request. `dropped`: nobody may run it on; what is under way for it is cancelled."""
        if record.state in PLACING:
            if dropped:
                self.cancel_at(record, outcome)
            self.effects.append(PlacingEnded(record.request_id, outcome))
        self.queue.remove(record.request_id)
        self._close(record, dropped=dropped)
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
