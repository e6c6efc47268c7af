"""The scheduler's requests under one term: a deterministic core that does no I/O.

Calls bring news and return effects; every call takes `now` (seconds, one monotonic clock). A request goes
QUEUED → MATCHING → RESERVING → (PREFILLING →) PLACED; any refusal but a final one puts it back where it stood in the
queue. From PLACED on the decode worker owns it: it finishes without the scheduler, and the record only serves
idempotency until two beats in a row of that worker no longer list it.

A table lives for one term. A new leader makes a new one: it gathers `gather_s`, adopts what beats list, places the
rest. Its dispatches start above those of every earlier term, so that two leaders never name two tries alike.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from services.scheduler.book import Book
from services.scheduler.door import Door
from services.scheduler.effects import Effect
from services.scheduler.handoff_cost import HandoffCost
from services.scheduler.ingresses import IngressRegistry
from services.scheduler.outbox import Event
from services.scheduler.placer import Placer, TableLimits
from services.scheduler.record import PLACING, Record, State, Verdict, judge
from services.scheduler.worker_registry import LostWorker, WorkerRegistry
from shared.contracts import messages as m
from shared.contracts.attempt import Attempt
from shared.contracts.errors import (
    NO_WORKER,
    BatonError,
    Cancelled,
    Conflict,
    DeadlineExceeded,
    Unavailable,
    to_wire,
)
from shared.contracts.grants import CLASSES, Grant
from shared.contracts.ids import IngressId, RequestId, TenantId, Term, WorkerId
from shared.contracts.parts import TenantLoad
from shared.security.generations import purged

LISTING_GRACE_S = 3.0
"""A beat this soon after a submit may have left before it."""


class RequestTable:
    """See the module's text. Not thread-safe; `tick` wants calling about every 0.1 s."""

    def __init__(
        self,
        *,
        term: Term,
        now: float,
        registry: WorkerRegistry,
        ingresses: IngressRegistry,
        cost: HandoffCost | None = None,
        limits: TableLimits | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.term = term
        self._registry = registry
        self._ingresses = ingresses
        self._limits = limits or TableLimits()
        self._gather_until_s = now + self._limits.gather_s
        self._book = Book(
            term,
            remember_s=self._limits.remember_s,
            event_resend_s=self._limits.event_resend_s,
            max_wait_s=self._limits.max_wait_s,
        )
        self._placer = Placer(self._book, registry, cost or HandoffCost(), self._limits)
        self._door = Door(self._book, registry, self._placer, self._limits, rng or random.Random(0))
        self._submits = 0
        self._workerless_s: dict[str, float] = {}  # since when no decode worker is up for a class
        self._gone: dict[IngressId, float] = {}  # silent ingresses, since when
        self.limited_s = float("-inf")
        """When a request was last turned away for the length of the queue or the wait."""

    @property
    def queued(self) -> int:
        return len(self._book.queue)

    @property
    def refusals(self) -> Counter[str]:
        """Requests turned away or given up, by reason. Not a copy."""
        return self._book.refusals

    @property
    def placing(self) -> int:
        return self._book.placing()

    @property
    def waiting_by_class(self) -> dict[str, int]:
        """Requests queued or being placed, of each class that has any."""
        waiting = (r.grant.klass for r in self._book.records.values() if r.state in (State.QUEUED, *PLACING))
        return dict(Counter(waiting))

    def waiting_tenants(self, most: int = 16) -> tuple[TenantLoad, ...]:
        """Tenants with requests that wait, by class; at most so many, those with most first."""
        waiting, running = Counter[tuple[TenantId, str]](), Counter[tuple[TenantId, str]]()
        weights: dict[tuple[TenantId, str], float] = {}
        for record in self._book.records.values():
            line = record.grant.tenant, record.grant.klass
            (waiting if record.state in (State.QUEUED, *PLACING) else running)[line] += 1
            weights[line] = record.grant.weight
        longest = sorted(waiting, key=lambda line: (-waiting[line], line))[:most]
        return tuple(TenantLoad(*line, weights[line], waiting[line], running[line]) for line in longest)

    @property
    def placed(self) -> int:
        return sum(record.state == State.PLACED for record in self._book.records.values())

    @property
    def is_settled(self) -> bool:
        """True when every request has its place and every event was seen."""
        return self.unseen_events == 0 and all(r.state == State.PLACED for r in self._book.records.values())

    @property
    def unseen_events(self) -> int:
        return len(self._book.outbox)

    def record(self, request_id: RequestId) -> Record | None:
        """For traces, gauges and tests; callers must not write it."""
        return self._book.records.get(request_id)

    def submit(self, now: float, submit: m.Submit, grant: Grant) -> tuple[m.Queued | m.Refusal, list[Effect]]:
        """Take a request. The same attempt again is answered alike; a higher epoch replaces the record."""
        book, attempt = self._book, submit.attempt
        self._heard(now, submit.ingress_id)
        old = book.records.get(attempt.request_id)
        if old is not None and attempt.epoch < old.submit.attempt.epoch:
            return _refusal(Conflict("a newer epoch of this request is known")), book.drain(now)
        if old is not None and attempt.epoch == old.submit.attempt.epoch:
            return self._queued(old), book.drain(now)
        ended = book.ended.epoch(attempt.request_id)
        if ended is not None and attempt.epoch <= ended:
            return m.Queued(term=self.term), book.drain(now)
        deadline_s = now + grant.budget_s - submit.age_s
        error = self._early_refusal(now, submit, grant, deadline_s)
        if error is not None:
            return _refusal(error), book.drain(now)
        if old is not None:
            emitted = len(submit.token_ids) // 4 - submit.num_prompt_tokens
            old.num_output = max(old.num_output, emitted)
            book.end(now, old, dropped=True)
        record = Record(
            submit=submit,
            grant=grant,
            arrival_s=now - submit.age_s,
            deadline_s=deadline_s,
            order=self._submits,
            submitted_s=now,
            dispatch=attempt.dispatch,
        )
        self._submits += 1
        book.add(record)
        for beat, listed in self._registry.attempts():
            if listed.attempt.request_id == attempt.request_id:
                self._on_listed(now, beat, listed.attempt)
        answer = self._queued(record)
        return answer, self._pumped(now)

    def withdraw(self, now: float, attempt: Attempt) -> list[Effect]:
        """Its ingress wants it no more. One that was never heard of is remembered: its submit may come behind this."""
        book, record = self._book, self._book.records.get(attempt.request_id)
        ended = book.ended.epoch(attempt.request_id)
        if record is not None and record.submit.attempt.epoch <= attempt.epoch:
            book.end(now, record, dropped=True, outcome="withdrawn")
        elif record is None and (ended is None or ended < attempt.epoch):
            book.ended.add(attempt.request_id, attempt.epoch, dropped=True, now=now)
        return self._pumped(now)

    def purge(self, now: float, is_over: Callable[[Grant], bool]) -> tuple[int, list[Effect]]:
        """Requests of a scope that is over are forgotten: those that wait are refused, those that run end at their
        worker. How many there were."""
        over = [record for record in self._book.records.values() if is_over(record.grant)]
        for record in over:
            if record.state in (State.PLACED, State.LOST):
                self._book.end(now, record, dropped=True)
            else:
                self._book.refuse(now, record, to_wire(purged()))
        return len(over), self._pumped(now)

    def ingress_beat(self, now: float, beat: m.GatewayBeat) -> list[Effect]:
        """Drop what the ingress has waiting here and, twice in a row, does not list.

        It is told: beats may be later than any grace, and a request dropped in error must end rather than hang.
        """
        self._heard(now, beat.ingress_id)
        waiting = {
            record.request_id: record
            for record in self._book.records.values()
            if record.submit.ingress_id == beat.ingress_id
            and record.state != State.PLACED
            and now - record.submitted_s >= LISTING_GRACE_S
        }
        for request_id in sorted(self._ingresses.unlisted(beat, waiting)):
            error = Cancelled("the ingress no longer lists the request", code="unlisted")
            self._book.refuse(now, waiting[request_id], to_wire(error))
        return self._pumped(now)

    def events_seen(self, now: float, ingress: IngressId, number: int) -> list[Effect]:
        """The ingress answered an event: it saw everything up to `number`."""
        self._book.outbox.seen(ingress, number)
        return self._book.drain(now)

    def matched(self, now: float, attempt: Attempt, reply: m.Matched | m.Refusal | None) -> list[Effect]:
        """The index's answer; None when it did not come in time."""
        record = self._book.current(attempt, State.MATCHING)
        if record is not None:
            self._placer.matched(now, record, reply)
        return self._pumped(now)

    def reserve_replied(
        self, now: float, attempt: Attempt, worker: WorkerId, reply: m.Reserved | m.Refusal | None
    ) -> list[Effect]:
        """A decode worker's answer; None when it did not come in time."""
        record = self._book.records.get(attempt.request_id)
        if record is not None and record.attempt == attempt and record.decode_worker == worker:
            if record.state == State.RESERVING:
                self._placer.reserve_answered(now, record, reply)
            elif record.state == State.QUEUED and isinstance(reply, m.Reserved):
                self._placer.accept_late(now, record, reply)
        elif isinstance(reply, m.Reserved) and (record is None or record.decode_worker != worker):
            self._book.cancel_listed(worker, "decode", attempt, "fenced")
        return self._pumped(now)

    def prefill_replied(
        self, now: float, attempt: Attempt, reply: m.PrefillAccepted | m.Refusal | None
    ) -> list[Effect]:
        """A prefill worker's answer. Without a yes the decode worker is told to compute the prompt itself."""
        record = self._book.current(attempt, State.PREFILLING)
        if record is not None:
            self._placer.prefill_answered(now, record, reply)
        return self._pumped(now)

    def worker_beat(self, now: float, beat: m.WorkerBeat) -> list[Effect]:
        """A beat the registry has taken: adopt, confirm, cancel or forget by what it lists; then place."""
        listed = {held.attempt.request_id: held.attempt for held in beat.attempts}
        self._book.settle(self._book.leavers.beat(beat))
        for output in beat.outputs:
            record = self._book.current(output.attempt, State.PLACED)
            if record is not None and record.decode_worker == beat.worker:
                self._book.output_counted(record, output.num_tokens, ended=output.ended)
        for attempt in listed.values():
            if not (attempt in beat.revoked and self._take_back(attempt, beat.worker)):
                self._on_listed(now, beat, attempt)
        for record in list(self._book.records.values()):
            record.not_before.pop(beat.worker, None)
            if beat.role != "decode" or record.state != State.PLACED or record.decode_worker != beat.worker:
                continue
            record.unlisted = 0 if record.request_id in listed else record.unlisted + 1
            if record.unlisted >= 2:
                self._book.end(now, record, dropped=False)
        return self._pumped(now)

    def worker_lost(self, now: float, lost: LostWorker) -> list[Effect]:
        """A worker the registry gave up. Every ingress is told of a decode worker: it may run what we never saw."""
        if lost.role == "decode":
            self._book.settle(self._book.leavers.lost(lost.worker))

            def build(number: int) -> Event:
                return m.WorkerLost(number=number, worker=lost.worker, incarnation=lost.incarnation, reason=lost.reason)

            self._book.tell_each(self._ingresses.known(), build)
        for record in list(self._book.records.values()):
            if lost.role == "prefill":
                if record.prefill_worker == lost.worker and record.state == State.PREFILLING:
                    self._placer.prefill_locally(now, record, "prefill_lost")
                continue
            if record.waits_at is not None and record.waits_at[0] == lost.worker:
                record.waits_at = None
            if record.decode_worker == lost.worker:
                if record.state in (State.PLACED, State.LOST):
                    record.state = State.LOST
                    continue
                if record.state in (State.RESERVING, State.PREFILLING):
                    self._book.cancel_at(record, "worker_lost", roles=("prefill",))
                    self._book.requeue(record, "worker_lost")
                record.choice = None  # a late yes of that worker is no longer wanted
        return self._pumped(now)

    def tick(self, now: float) -> list[Effect]:
        """Lost ingresses, spent budgets, unanswered hops, resends; then place."""
        book = self._book
        for ingress in self._ingresses.expire(now):
            self._ingress_lost(now, ingress)
        for ingress in [i for i, since_s in self._gone.items() if since_s + self._limits.remember_s <= now]:
            del self._gone[ingress]
            book.outbox.drop(ingress)
        for record in list(book.records.values()):
            if record.state in PLACING and record.hop_until_s <= now:
                self._placer.hop_unanswered(now, record)
            if record.deadline_s <= now:
                if record.state == State.QUEUED:
                    book.refuse(now, record, to_wire(DeadlineExceeded("not placed within the request's budget")))
                elif record.state == State.LOST:
                    book.end(now, record, dropped=True)
        self._refuse_workerless(now)
        book.ended.expire(now)
        return self._pumped(now)

    def _refuse_workerless(self, now: float) -> None:
        if workerless := [klass for klass in CLASSES if self._is_workerless(now, klass)]:
            for record in list(self._book.records.values()):
                if record.state == State.QUEUED and not record.has_begun and record.grant.klass in workerless:
                    self._book.refuse(now, record, to_wire(_no_worker(record.grant.klass)))

    def _is_workerless(self, now: float, klass: str) -> bool:
        """True once no decode worker took requests of a class for longer than one takes that is started again."""
        if any(view.role == "decode" and view.takes(klass) for view in self._registry.views()):
            self._workerless_s.pop(klass, None)
            return False
        return now - self._workerless_s.setdefault(klass, now) >= self._limits.no_worker_s

    def _ingress_lost(self, now: float, ingress: IngressId) -> None:
        """What waits is dropped. One that was only frozen hears of it when it comes back, within `remember_s`."""
        self._gone[ingress] = now
        error = to_wire(Unavailable("the ingress fell silent while the request waited", code="ingress_silent"))
        for record in [r for r in self._book.records.values() if r.submit.ingress_id == ingress]:
            if record.state in (State.PLACED, State.LOST):
                self._book.end(now, record, dropped=False)
            else:
                self._book.refuse(now, record, error)

    def _heard(self, now: float, ingress: IngressId) -> None:
        self._ingresses.heard(ingress, now)
        self._gone.pop(ingress, None)

    def _pumped(self, now: float) -> list[Effect]:
        if now >= self._gather_until_s:
            self._placer.pump(now)
        return self._book.drain(now)

    def _take_back(self, attempt: Attempt, worker: WorkerId) -> bool:
        """`worker` accepted the attempt, but has lost the blocks for it before it began: back to where it stood.

        The worker goes on holding it and begins as soon as it can, so nothing depends on us. True: so it is, for now.
        """
        record = self._book.records.get(attempt.request_id)
        if record is None:
            return False
        if record.state == State.PLACED and record.attempt == attempt and record.decode_worker == worker:
            record.waits_at = worker, attempt
            self._book.requeue(record, "revoked")
        return record.waits_at == (worker, attempt) and record.state != State.PLACED

    def _on_listed(self, now: float, beat: m.WorkerBeat, listed: Attempt) -> None:
        book, record = self._book, self._book.records.get(listed.request_id)
        if record is None:
            if book.ended.was_dropped(listed):
                book.cancel_listed(beat.worker, beat.role, listed, "dropped")
            return
        if beat.role != "decode":
            if record.attempt.fences(listed):
                book.cancel_listed(beat.worker, beat.role, listed, "fenced")
            return
        verdict = judge(record, listed, beat.worker)
        if verdict == Verdict.CANCEL:
            book.cancel_listed(beat.worker, "decode", listed, "fenced")
        elif verdict == Verdict.OBSOLETE:
            book.end(now, record, dropped=True)
        elif verdict == Verdict.ADOPT:
            self._placer.adopt(now, record, listed, beat)

    def _queued(self, record: Record) -> m.Queued:
        position, predicted_s = self._door.predict(record.submit, record.grant)
        position = position if record.state == State.QUEUED else 0
        return m.Queued(term=self.term, position=position, predicted_ttft_s=predicted_s)

    def _early_refusal(self, now: float, submit: m.Submit, grant: Grant, deadline_s: float) -> BatonError | None:
        """Why a request should not even wait. One that ran before, or that a new leader gathers, is not turned away."""
        left_s = deadline_s - now
        if left_s <= 0:
            self.refusals["deadline_exceeded"] += 1
            return DeadlineExceeded("the request's budget was spent before it reached the scheduler")
        if submit.attempt.epoch > 1 or now < self._gather_until_s:
            return None
        if self._is_workerless(now, grant.klass):
            self.refusals[NO_WORKER] += 1
            return _no_worker(grant.klass)
        turned_away = self._door.judge(now, submit, grant, left_s)
        if turned_away is None:
            return None
        self.refusals[turned_away.reason] += 1
        if turned_away.error.retry_after_s > 0:
            self.limited_s = now
        return turned_away.error


def _no_worker(klass: str) -> Unavailable:
    return Unavailable(f"no decode worker is up that takes {klass} requests", retry_after_s=2.0, code=NO_WORKER)


def _refusal(error: BatonError) -> m.Refusal:
    return m.Refusal(error=to_wire(error))
