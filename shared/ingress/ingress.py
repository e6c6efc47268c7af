"""The bus side of a service that holds requests: admission, sessions, the news that drive them, and their clockwork."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

import msgspec
from opentelemetry import context as otel_context
from opentelemetry.trace import Span

from shared.bus.bus import NO_RESPONDERS, Bus, Delivery, Subscription
from shared.contracts import subjects
from shared.contracts.attempt import Attempt
from shared.contracts.errors import BatonError, ProtocolError, Unavailable, from_wire
from shared.contracts.grants import Grant
from shared.contracts.idempotency_messages import IngressAsked, IngressHere
from shared.contracts.ids import Epoch, RequestId, Term, WorkerId
from shared.contracts.message import decode
from shared.contracts.messages import (
    Admit,
    AdmitTenant,
    Cancel,
    Cancelled,
    EventsSeen,
    FinalAck,
    FinalAcked,
    GatewayBeat,
    Granted,
    Identity,
    Placed,
    PlacementRefused,
    PurgeOrder,
    Refusal,
    SchedulerBeat,
    StreamFrame,
    WorkerBeat,
    WorkerLost,
)
from shared.ingress.config import IngressConfig
from shared.ingress.liveness import Liveness, scheduler_of
from shared.ingress.quotas import Quotas
from shared.ingress.request_metrics import read_in_flight
from shared.ingress.request_plan import RequestPlan
from shared.ingress.served_models import ServedModels
from shared.ingress.session import Session, SessionHooks
from shared.lifecycle.tasks import end_tasks
from shared.security.generations import purged
from shared.security.purge_orders import PurgeOrders
from shared.telemetry import attributes as a
from shared.telemetry.metrics import Metrics
from shared.telemetry.setup import Telemetry

log = logging.getLogger("baton.ingress")

WORKER_REPLY_S = 1.0
SETTLING_S = 5.0
"""What is still open after a drain may take so long to be settled."""
QUIET_S = 1.5
"""A worker with running requests speaks once a second; one silent for longer is asked whether it is there."""
FIRST_EPOCH = Epoch(1)
SHUTTING_DOWN = "shutting_down"
"""Code of what an ingress that drains answers."""

OnBeat = Callable[[SchedulerBeat | WorkerBeat, float], None]
"""Hears every beat of the pools served, and when it came (monotonic seconds)."""
OnPurge = Callable[[PurgeOrder], Mapping[str, int]]
"""Forgets what an ingress keeps in memory of a tenant beside its requests; how much that was, by kind."""


class Ingress:
    """Requests in flight and everything that keeps them going; an async context manager.

    Attributes:
        sessions: requests in flight, by id.
        draining: no new requests.
        quotas: what policy last told of tenants' limits.
    """

    def __init__(
        self,
        bus: Bus,
        config: IngressConfig,
        telemetry: Telemetry,
        models: ServedModels,
        *,
        on_beat: OnBeat | None = None,
        on_purge: OnPurge | None = None,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.telemetry = telemetry
        self.models = models
        self.metrics = metrics or Metrics(config.service)
        self.metrics.serve_models(models.names)
        self.metrics.before_scrape(self._read_metrics)
        self.sessions: dict[RequestId, Session] = {}
        self.liveness = Liveness(config.alive_s, models.pools)
        self.quotas = Quotas()
        self.draining = False
        self._drained = False
        self._bus = bus
        self._on_beat = on_beat
        self._on_purge = on_purge
        self._clock = clock
        self._terms = dict.fromkeys(models.pools, Term(0))
        self._beats = 0
        self._asked: set[WorkerId] = set()
        self._opening = 0  # requests that may hold a reservation but have no session yet
        self._settled = asyncio.Event()
        self.purges = PurgeOrders(bus, config.service, config.ingress_id, self._purge)
        self._subscriptions: list[Subscription] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Ingress:
        bus, ingress = self._bus, self.config.ingress_id
        events = Placed | PlacementRefused | WorkerLost
        self._subscriptions = [
            await bus.subscribe(subjects.stream(ingress), StreamFrame, self._on_frame),
            await bus.serve(subjects.gateway_event(ingress), events, self._on_event),
            await bus.serve(subjects.gateway_ask(ingress), IngressAsked, _here),
            await bus.subscribe(subjects.ANY_WORKER_BEAT, WorkerBeat, self._on_worker_beat),
        ]
        for pool in self.models.pools:
            beat = subjects.sched_beat(pool)
            self._subscriptions.append(await bus.subscribe(beat, SchedulerBeat, self._on_scheduler_beat))
        await self.purges.start()
        self._run(self._every(self.config.tick_s, self._tick))
        self._run(self._every(self.config.beat_s, self._beat))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # running requests first: their frames must still arrive
        await self.drain()
        for subscription in self._subscriptions:
            await subscription.stop()
        await self.purges.stop()
        await end_tasks(self._tasks)

    async def drain(self) -> None:
        """Refuse what is new, let requests finish for `drain_s`, end the rest with an error, wait for settlements.

        Once: a settlement that nobody takes is not waited for again.
        """
        self.draining = True
        if self._drained:
            return
        await self._idle(self.config.drain_s)
        for session in list(self.sessions.values()):
            session.fail(self.shutting_down())
        await self._idle(SETTLING_S)
        self._drained = True

    def shutting_down(self) -> Unavailable:
        """What an ingress that drains answers."""
        return Unavailable(f"the {self.config.service} is shutting down", retry_after_s=1.0, code=SHUTTING_DOWN)

    # ------------------------------------------------------------------------------------------ requests

    def require_open(self) -> None:
        """Raises Unavailable while the ingress drains."""
        if self.draining:
            raise self.shutting_down()

    async def open(
        self,
        plan: RequestPlan,
        subject: str,
        ask: Admit | AdmitTenant,
        *,
        span: Span,
        arrived: float,
        epoch: Epoch = FIRST_EPOCH,
        hooks: SessionHooks | None = None,
        news: asyncio.Event | None = None,
        committed: Sequence[int] = (),
    ) -> Session:
        """Admit a request by asking policy on `subject`, and submit it.

        Raises what policy's refusal says, or Unavailable when it does not answer or the ingress drains. From the return
        on the session owns `span` and the reservation. `epoch` is the first one of this session;
        `news` is shared with the sessions that it is answered together with; `committed`: see Session.
        """
        self.require_open()
        self._opening += 1
        try:
            session = await self._admit(plan, subject, ask, span, arrived, epoch, hooks, news, committed)
        finally:
            self._opening -= 1
            self._settled.set()
        session.start()
        if self.draining:  # since; it holds a reservation now, and ends like any other
            session.fail(self.shutting_down())
        try:
            await asyncio.sleep(0)  # it goes to the scheduler now, and not behind what its answer needs
        except asyncio.CancelledError:
            session.cancel("client_gone")
            raise
        return session

    async def _admit(
        self,
        plan: RequestPlan,
        subject: str,
        ask: Admit | AdmitTenant,
        span: Span,
        arrived: float,
        epoch: Epoch,
        hooks: SessionHooks | None,
        news: asyncio.Event | None,
        committed: Sequence[int],
    ) -> Session:
        model = self.models.get(plan.model)
        span.set_attribute(a.REQUEST_ID, ask.request_id)
        granted: Granted = await self.ask_policy(subject, ask, Granted | Refusal)
        grant: Grant = decode(granted.grant.payload, Grant)
        if grant.request_id != ask.request_id:
            raise ProtocolError("policy granted another request")
        span.set_attribute(a.CLASS, grant.klass)
        if grant.retention_s >= 0:
            span.set_attribute(a.RETENTION_S, grant.retention_s)
        self.purges.generations.require_live(grant.scope)
        session = Session(
            plan,
            granted.grant,
            grant,
            model=model,
            bus=self._bus,
            config=self.config,
            tracer=self.telemetry.tracer,
            span=span,
            arrived=arrived,
            term=self._terms[model.pool],
            epoch=epoch,
            on_settled=self._forget,
            hooks=hooks,
            metrics=self.metrics,
            news=news,
            committed=committed,
            clock=self._clock,
        )
        self.sessions[session.request_id] = session
        return session

    async def ask_policy(self, subject: str, message: msgspec.Struct, reply_type: Any) -> Any:
        """policy's answer. Raises what its refusal says, or Unavailable when it does not answer."""
        reply = await self._bus.request(subject, message, reply_type, timeout_s=self.config.hop_timeout_s)
        now = self._clock()
        self.liveness.heard_service("policy", now)
        if isinstance(reply, Identity | Granted | Refusal) and reply.quota is not None:
            self.quotas.tell(reply.quota, now)
        if isinstance(reply, Refusal):
            raise from_wire(reply.error)
        return reply

    async def _purge(self, order: PurgeOrder) -> Mapping[str, int]:
        """End every request of a scope that is over with an error, and forget what else is kept of the tenant."""
        over = [session for session in self.sessions.values() if self.purges.generations.is_over(session.scope)]
        for session in over:
            session.fail(purged())
        more = self._on_purge(order) if self._on_purge is not None else {}
        return {"requests": len(over), **more}

    # ------------------------------------------------------------------------------------------ news

    def _on_frame(self, delivery: Delivery) -> None:
        frame: StreamFrame = delivery.message
        now = self._clock()
        self.liveness.heard_worker(frame.worker, now)
        for record in frame.records:
            session = self.sessions.get(record.attempt.request_id)
            if session is not None:
                session.apply(session.stream.on_record(frame.worker, record, now))
                self.liveness.token_seen |= bool(record.token_ids)
            elif record.finish:
                self._run(self._acknowledge(frame.worker, record.attempt))
        if frame.listing:
            self._on_listing(frame, now)

    def _on_listing(self, frame: StreamFrame, now: float) -> None:
        held = {entry.attempt.request_id: entry for entry in frame.held}
        for request_id, session in list(self.sessions.items()):
            if session.stream.worker == frame.worker or request_id in held:
                session.apply(session.stream.on_listing(frame.worker, held.get(request_id), now))

    async def _on_event(self, delivery: Delivery) -> EventsSeen:
        event: Placed | PlacementRefused | WorkerLost = delivery.message
        now = self._clock()
        if isinstance(event, WorkerLost):
            for session in list(self.sessions.values()):
                session.apply(session.stream.on_worker_lost(event.worker, now))
        elif (owner := self.sessions.get(event.attempt.request_id)) is None:
            if isinstance(event, Placed):  # its client left while it was queued
                self._run(self._cancel(event.decode_worker, event.attempt))
        elif isinstance(event, Placed):
            owner.apply(owner.stream.on_placed(event, now))
        else:
            owner.apply(owner.stream.on_placement_refused(event.attempt, event.error, now))
        return EventsSeen(number=event.number)

    def _on_scheduler_beat(self, delivery: Delivery) -> None:
        beat: SchedulerBeat = delivery.message
        if delivery.subject != subjects.sched_beat(beat.pool):
            log.warning("beat of pool %s on %s dropped", beat.pool, delivery.subject)
            return
        now = self._clock()
        self.liveness.heard_service(scheduler_of(beat.pool), now)
        if self._on_beat is not None:
            self._on_beat(beat, now)
        if beat.term <= self._terms[beat.pool]:
            return
        self._terms[beat.pool] = beat.term
        for session in list(self.sessions.values()):
            if session.model.pool == beat.pool:
                session.apply(session.stream.on_scheduler_term(beat.term, now))

    def _on_worker_beat(self, delivery: Delivery) -> None:
        beat: WorkerBeat = delivery.message
        now = self._clock()
        self.liveness.heard_worker(beat.worker, now)
        if beat.pool in self._terms:
            if beat.role == "decode":
                serves = not (beat.draining or beat.stalled)
                self.liveness.decoder_beat(beat.worker, beat.pool, serves=serves, now=now)
            if self._on_beat is not None:
                self._on_beat(beat, now)

    # ------------------------------------------------------------------------------------------ clockwork

    async def _tick(self) -> None:
        now = self._clock()
        self.liveness.forget_old(now)
        for session in list(self.sessions.values()):
            worker = session.stream.worker
            seen = self.liveness.worker_seen(worker)
            session.tick(now, seen)
            if worker and seen is not None and now - seen > QUIET_S and worker not in self._asked:
                self._asked.add(worker)
                self._run(self._ask_quiet(worker))

    async def _beat(self) -> None:
        self._beats += 1
        beat = GatewayBeat(ingress_id=self.config.ingress_id, number=self._beats, requests=tuple(self.sessions))
        with suppress(BatonError):
            await self._bus.publish(subjects.gateway_beat(self.config.ingress_id), beat)

    async def _every(self, period_s: float, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await work()
            except Exception:
                log.exception("periodic work failed")
            await asyncio.sleep(period_s)

    async def _idle(self, limit_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self.sessions or self._opening:
                    self._settled.clear()
                    await self._settled.wait()

    def _read_metrics(self) -> None:
        read_in_flight(self.metrics, self.models.names, (s.model.name for s in self.sessions.values()))

    def _forget(self, session: Session) -> None:
        self.sessions.pop(session.request_id, None)
        self._settled.set()

    async def _ask_quiet(self, worker: WorkerId) -> None:
        """A dead process has no subscription, which the bus tells at once: no need to wait for the lease to end.

        An answer proves nothing, as the engine is another thread; then silence is judged by time.
        """
        try:
            await self._bus.request(
                subjects.decode(worker, "ack"), FinalAck(attempts=()), FinalAcked, timeout_s=WORKER_REPLY_S
            )
        except Unavailable as exc:
            if exc.code == NO_RESPONDERS:
                log.warning("worker %s is gone", worker)
                for session in list(self.sessions.values()):
                    session.apply(session.stream.on_worker_lost(worker, self._clock()))
        finally:
            self._asked.discard(worker)

    async def _acknowledge(self, worker: WorkerId, attempt: Attempt) -> None:
        message = FinalAck(attempts=(attempt,))
        await self._bus.request(subjects.decode(worker, "ack"), message, FinalAcked, timeout_s=WORKER_REPLY_S)

    async def _cancel(self, worker: WorkerId, attempt: Attempt) -> None:
        message = Cancel(attempt=attempt, reason="over")
        await self._bus.request(subjects.decode(worker, "cancel"), message, Cancelled, timeout_s=WORKER_REPLY_S)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            otel_context.attach(otel_context.Context())  # not a part of the request that happened to start it
            with suppress(BatonError):
                await work

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _here(delivery: Delivery) -> IngressHere:
    return IngressHere()
