"""The scheduler's shell: carries the request table's effects over the bus and brings it the answers.

Every scheduler of a pool hears the beats, so its registries are warm; only the leader has a request table and serves
`submit`. Grants are decoded here and verified by who acts on them: the index and the workers.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import trace

from services.scheduler.effects import AskMatch, AskPrefill, AskReserve, CancelAt, Effect, PlacingEnded, Tell
from services.scheduler.ingresses import IngressRegistry
from services.scheduler.leader import Change, Leadership
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.place_spans import PlaceSpans, tracer
from services.scheduler.placement import WorkerView
from services.scheduler.request_table import RequestTable
from services.scheduler.settings import SchedulerConfig
from services.scheduler.worker_registry import LostWorker, RefusedWorker, WorkerRegistry
from shared.bus.bus import NO_RESPONDERS, Bus, Delivery, Subscription
from shared.contracts import messages as m
from shared.contracts import subjects
from shared.contracts.attempt import Attempt
from shared.contracts.errors import BatonError, DeadlineExceeded, Unavailable, to_wire
from shared.contracts.grants import Grant
from shared.contracts.ids import Epoch, RequestId, Term, WorkerId
from shared.contracts.message import decode
from shared.lifecycle.tasks import end_tasks, every
from shared.security.purge_orders import PurgeOrders
from shared.telemetry import attributes as a
from shared.telemetry.metrics import Metrics

log = logging.getLogger("baton.scheduler")

SETTLED_TICKS = 5
"""How many times longer a tick is while nothing waits."""
REPLY_S = 1.0
"""How long an ingress may take to see an event, and a worker to answer a cancel."""
LEASE_CALL_S = 2.0
FINAL_STATUSES = (400, 401, 403, 404, 413)
"""Errors that would be the same at every worker."""
NO_ATTEMPT = Attempt(RequestId("probe"), Epoch(0))
"""No worker holds it: to cancel it only shows whether the worker's process is there."""
MAX_REFUSED = 256
"""Refused workers whose log line is not repeated; a restart makes a new id."""


class SchedulerService:
    """One scheduler process of one model pool. `start`, then `stop`."""

    def __init__(
        self,
        bus: Bus,
        settings: SchedulerConfig,
        clock: Callable[[], float] = time.monotonic,
        metrics: Metrics | None = None,
    ) -> None:
        self.match_timeouts = 0
        self._metrics = SchedulerMetrics(metrics or Metrics("scheduler"), self, clock)
        self._bus = bus
        self._settings = settings
        self._clock = clock
        self._purges = PurgeOrders(bus, "scheduler", settings.scheduler_id, self._purge)
        self._workers = WorkerRegistry(settings.pool, settings.worker_lease_s)
        self._ingresses = IngressRegistry(settings.ingress_lease_s)
        self._leadership = Leadership(settings.leader_ttl_s, margin_s=min(1.0, settings.leader_ttl_s / 4))
        self._table: RequestTable | None = None
        self._spans = PlaceSpans()
        self._refused: dict[WorkerId, RefusedWorker] = {}
        self._serving: Subscription | None = None
        self._subscriptions: list[Subscription] = []
        self._loops: list[asyncio.Task[None]] = []
        self._hops: set[asyncio.Task[None]] = set()
        self._changing = asyncio.Lock()
        self._deaf_s = float("-inf")  # when the bus last had no connection

    @property
    def leading(self) -> bool:
        return self._table is not None

    @property
    def workers(self) -> WorkerRegistry:
        """The workers heard lately."""
        return self._workers

    @property
    def table(self) -> RequestTable | None:
        """The request table while leading; for gauges and tests."""
        return self._table

    async def start(self) -> None:
        """Hear beats, then compete for the lease."""
        for subject, kind, handler in (
            (subjects.ANY_WORKER_BEAT, m.WorkerBeat, self._on_worker_beat),
            (subjects.ANY_GATEWAY_BEAT, m.GatewayBeat, self._on_gateway_beat),
            (subjects.sched_withdraw(self._settings.pool), m.Withdraw, self._on_withdraw),
            (subjects.sched_beat(self._settings.pool), m.SchedulerBeat, self._on_scheduler_beat),
        ):
            self._subscriptions.append(await self._bus.subscribe(subject, kind, handler))
        await self._purges.start()
        for step, pause in (
            (self._renew, self._leadership.renew_every_s),
            (self._tick, self._pause_s),
            (self._beat, self._settings.beat_s),
        ):
            self._loops.append(asyncio.create_task(every(pause, step, log)))

    async def stop(self) -> None:
        """Take no more submits, give the lease up so that a standby leads at once, drop what is queued: the ingresses
        send it to the next leader."""
        await self._purges.stop()
        await end_tasks(self._loops)
        await end_tasks(self._hops)
        led = self._leadership.term is not None
        await self._step_down()
        if led:
            await self._release()
        for subscription in self._subscriptions:
            await subscription.stop()

    # ------------------------------------------------------------------------------------------ leading

    @property
    def _lease_name(self) -> str:
        return f"scheduler-{self._settings.pool}"

    async def _renew(self) -> None:
        asked_s = self._clock()
        try:
            # not wait_for: in Python 3.11 it may swallow the cancellation that stops this loop
            async with asyncio.timeout(LEASE_CALL_S):
                term = await self._bus.acquire_lease(
                    self._lease_name, self._settings.scheduler_id, self._settings.leader_ttl_s
                )
        except (BatonError, TimeoutError) as exc:
            log.warning("lease %s: %s", self._lease_name, exc)
            return
        await self._change(self._leadership.answered(asked_s, term))

    async def _change(self, changes: list[Change]) -> None:
        """Bring table and service in line with the leadership. Both wait for the bus, so one change at a time."""
        if not changes:
            return
        async with self._changing:
            if Change.RELEASE in changes:
                await self._release()
            term = self._leadership.term
            if self._table is not None and self._table.term != term:
                await self._step_down()
            if self._table is None and term is not None:
                await self._step_up(term)

    async def _step_up(self, term: Term) -> None:
        log.info("leading pool %s in term %d", self._settings.pool, term)
        self._table = RequestTable(
            term=term,
            now=self._clock(),
            registry=self._workers,
            ingresses=self._ingresses,
            cost=self._settings.cost,
            limits=self._settings.limits,
            rng=random.SystemRandom(),
        )
        try:
            self._serving = await self._bus.serve(subjects.sched_submit(self._settings.pool), m.Submit, self._on_submit)
        except BatonError as exc:
            # a leader nobody can reach is worse than none: the next ask gives the lease up
            log.warning("cannot serve submits, term %d is given up: %s", term, exc)
            self._table = None
            self._leadership.give_up()
            return
        await self._beat()

    async def _step_down(self) -> None:
        if self._table is None:
            return
        log.info("no longer leading pool %s", self._settings.pool)
        self._metrics.read()
        self._table = None
        self._spans.sweep(lambda _: False)
        serving, self._serving = self._serving, None
        if serving is not None:
            await serving.stop()

    async def _release(self) -> None:
        try:
            async with asyncio.timeout(REPLY_S):
                await self._bus.release_lease(self._lease_name, self._settings.scheduler_id)
        except (BatonError, TimeoutError) as exc:
            log.warning("lease not released, it runs out by itself: %s", exc)

    async def _beat(self) -> None:
        table = self._table
        if table is None:
            return
        beat = m.SchedulerBeat(
            pool=self._settings.pool,
            term=table.term,
            scheduler_id=self._settings.scheduler_id,
            queued=table.queued + table.placing,
            running=table.placed,
            queued_by_class=table.waiting_by_class,
            tenants=table.waiting_tenants(),
        )
        await self._bus.publish(subjects.sched_beat(self._settings.pool), beat)

    def _pause_s(self) -> float:
        """Until the next tick: what has its place needs fewer."""
        tick_s, table = self._settings.tick_s, self._table
        if table is None or not table.is_settled:
            return tick_s
        return min(SETTLED_TICKS * tick_s, self._leadership.margin_s / 2)

    async def _tick(self) -> None:
        now = self._clock()
        if not self._bus.connected:
            self._deaf_s = now
        await self._change(self._leadership.tick(now))
        for lost in self._workers.expire(now):
            self._worker_lost(lost)
        for view in self._workers.quiet(now, self._deaf_s):
            self._spawn(self._ask_quiet(view))
        table = self._table
        if table is None:
            self._ingresses.expire(now)
            return
        self._run(table.tick(now))
        self._spans.sweep(lambda r: table.record(r) is not None)

    # ------------------------------------------------------------------------------------------ messages

    async def _on_submit(self, delivery: Delivery) -> m.Queued | m.Refusal:
        with tracer.start_as_current_span("scheduler.submit", context=delivery.context) as span:
            table, submit = self._table, delivery.message
            if table is None:
                raise Unavailable("this scheduler no longer leads its pool", retry_after_s=1.0)
            if delivery.remaining_s(self._clock) <= 0:
                raise DeadlineExceeded("the submit's budget was spent before it was read")
            grant = decode(submit.grant.payload, Grant)
            self._purges.generations.require_live(grant.scope)
            self._spans.queued(submit.attempt.request_id, delivery.context)
            answer, effects = table.submit(self._clock(), submit, grant)
            self._run(effects)
            span.set_attribute(a.PROMPT_TOKENS, len(submit.token_ids) // 4)
            span.set_attribute(a.EPOCH, submit.attempt.epoch)
            span.set_attribute(a.CLASS, grant.klass)
            if isinstance(answer, m.Queued):
                span.set_attribute(a.QUEUE_POSITION, answer.position)
                span.set_attribute(a.PREDICTED_TTFT_S, answer.predicted_ttft_s)
            else:
                span.set_attribute(a.STATUS, answer.error.code)
            return answer

    async def _purge(self, order: m.PurgeOrder) -> Mapping[str, int]:
        if self._table is None:
            return {"requests": 0}
        count, effects = self._table.purge(self._clock(), lambda grant: self._purges.generations.is_over(grant.scope))
        self._run(effects)
        return {"requests": count}

    def _on_worker_beat(self, delivery: Delivery) -> None:
        beat, now = delivery.message, self._clock()
        outcome = self._workers.on_beat(now, beat)
        if outcome.refused is not None and self._refused.get(beat.worker) != outcome.refused:
            if len(self._refused) >= MAX_REFUSED:
                self._refused.clear()
            self._refused[beat.worker] = outcome.refused
            log.error(
                "worker %s refused: its %s is %s, the pool's is %s",
                beat.worker,
                outcome.refused.field,
                outcome.refused.value,
                outcome.refused.expected,
            )
        if outcome.joined:
            self._refused.pop(beat.worker, None)
            log.info("worker %s joined as %s%s", beat.worker, beat.role, " (fake)" if beat.fake else "")
        if outcome.replaced is not None:
            self._worker_lost(outcome.replaced)
        if outcome.taken and self._table is not None:
            self._run(self._table.worker_beat(now, beat))

    def _worker_lost(self, lost: LostWorker) -> None:
        log.warning("worker %s lost: %s", lost.worker, lost.reason)
        self._metrics.worker_lost(lost)
        if self._table is not None:
            self._run(self._table.worker_lost(self._clock(), lost))

    def _on_gateway_beat(self, delivery: Delivery) -> None:
        if self._table is None:
            self._ingresses.heard(delivery.message.ingress_id, self._clock())
        else:
            self._run(self._table.ingress_beat(self._clock(), delivery.message))

    def _on_withdraw(self, delivery: Delivery) -> None:
        if self._table is not None:
            self._run(self._table.withdraw(self._clock(), delivery.message.attempt))

    def _on_scheduler_beat(self, delivery: Delivery) -> None:
        if changes := self._leadership.seen(delivery.message.term):
            self._spawn(self._change(changes))

    # ------------------------------------------------------------------------------------------ effects

    def _run(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, PlacingEnded):
                self._spans.ended(effect)
                self._metrics.placing_ended(effect)
            elif isinstance(effect, AskMatch):
                self._spawn(self._ask_match(effect))
            elif isinstance(effect, AskReserve):
                self._spawn(self._ask_reserve(effect))
            elif isinstance(effect, AskPrefill):
                self._spawn(self._ask_prefill(effect))
            elif isinstance(effect, Tell):
                self._spawn(self._tell(effect))
            else:
                self._spawn(self._cancel_at(effect))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except Exception:
                log.exception("a hop failed")

        task = asyncio.create_task(guarded())
        self._hops.add(task)
        task.add_done_callback(self._hops.discard)

    async def _ask_match(self, ask: AskMatch) -> None:
        table = self._table
        reply = await self._hop(
            ask.attempt.request_id, subjects.INDEX_MATCH, ask.message, m.Matched | m.Refusal, ask.timeout_s
        )
        self.match_timeouts += reply is None
        if table is not None and table is self._table:
            self._run(table.matched(self._clock(), ask.attempt, reply))

    async def _ask_reserve(self, ask: AskReserve) -> None:
        table, attempt = self._table, ask.message.attempt
        subject = subjects.decode(ask.worker, "reserve")
        reply = await self._hop(attempt.request_id, subject, ask.message, m.Reserved | m.Refusal, ask.timeout_s)
        if table is not None and table is self._table:
            self._run(table.reserve_replied(self._clock(), attempt, ask.worker, reply))

    async def _ask_prefill(self, ask: AskPrefill) -> None:
        table, attempt = self._table, ask.message.attempt
        subject = subjects.prefill(ask.worker, "run")
        reply = await self._hop(attempt.request_id, subject, ask.message, m.PrefillAccepted | m.Refusal, ask.timeout_s)
        if table is not None and table is self._table:
            self._run(table.prefill_replied(self._clock(), attempt, reply))

    async def _hop(
        self, request_id: RequestId, subject: str, message: Any, reply_type: Any, timeout_s: float
    ) -> Any | None:
        """Ask under the place span. None: no answer. An error of the other side's is a refusal like another."""
        span = self._spans.placing(request_id)
        with trace.use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
            try:
                return await self._bus.request(subject, message, reply_type, timeout_s=timeout_s)
            except Unavailable as exc:
                log.info("%s", exc)
                return None
            except BatonError as exc:
                log.warning("%s: %s", subject, exc)
                return m.Refusal(error=to_wire(exc), never=exc.status in FINAL_STATUSES)

    async def _tell(self, tell: Tell) -> None:
        table, event = self._table, tell.event
        known = None if isinstance(event, m.WorkerLost) else self._spans.context(event.attempt.request_id)
        token = otel_context.attach(known) if known is not None else None
        try:
            seen = await self._bus.request(subjects.gateway_event(tell.ingress), event, m.EventsSeen, timeout_s=REPLY_S)
        except BatonError as exc:
            # one that nobody takes is sent again; one that cannot be sent is a fault of ours
            level = logging.INFO if isinstance(exc, Unavailable) else logging.ERROR
            log.log(level, "event %d to %s not seen: %s", event.number, tell.ingress, exc)
            return
        finally:
            if token is not None:
                otel_context.detach(token)
        if table is not None and table is self._table:
            self._run(table.events_seen(self._clock(), tell.ingress, seen.number))

    async def _cancel_at(self, effect: CancelAt) -> None:
        build = subjects.decode if effect.role == "decode" else subjects.prefill
        try:
            await self._bus.request(build(effect.worker, "cancel"), effect.message, m.Cancelled, timeout_s=REPLY_S)
        except BatonError as exc:
            log.info("cancel at %s: %s", effect.worker, exc)

    async def _ask_quiet(self, view: WorkerView) -> None:
        """A dead process has no subscription, which the bus tells at once: no need to wait for its lease to end.

        An answer proves nothing, as the engine is another thread; that is judged by its progress.
        """
        asked_s = self._clock()
        build = subjects.decode if view.role == "decode" else subjects.prefill
        cancel = m.Cancel(attempt=NO_ATTEMPT, reason="probe")
        try:
            await self._bus.request(build(view.worker, "cancel"), cancel, m.Cancelled, timeout_s=REPLY_S)
        except BatonError as exc:
            log.info("quiet worker %s: %s", view.worker, exc)
            if exc.code != NO_RESPONDERS:
                self._workers.no_answer(view.worker, asked_s, self._clock())
                return
            lost = self._workers.nobody_listens(view.worker, asked_s, self._clock())
            if lost is not None:
                self._worker_lost(lost)
