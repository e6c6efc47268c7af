"""What a gateway does on the bus beside being an ingress: authentication, traces, the state of the cluster."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import msgspec
from opentelemetry.trace import Span

from services.gateway.auth import KEY_NEEDED, IdentityCache
from services.gateway.cluster import Cluster
from services.gateway.guesses import Guesses
from services.gateway.settings import GatewayConfig
from shared.bus.bus import Bus, Delivery, Subscription
from shared.contracts import subjects
from shared.contracts.errors import BatonError, QuotaExceeded, Unauthenticated
from shared.contracts.ids import Epoch, RequestId, new_request_id
from shared.contracts.messages import (
    Admit,
    Authenticate,
    GatewayBeat,
    Granted,
    Identity,
    PolicyEvent,
    PurgeOrder,
    Refusal,
    SchedulerBeat,
    SpanBatch,
    WorkerBeat,
)
from shared.ingress.ingress import FIRST_EPOCH, Ingress
from shared.ingress.request_plan import RequestPlan
from shared.ingress.served_models import ServedModels
from shared.ingress.session import Session, SessionHooks
from shared.telemetry.metrics import Metrics
from shared.telemetry.setup import Telemetry
from shared.telemetry.trace_buffer import TraceBuffer

log = logging.getLogger("baton.gateway")

CHECK_S = 1.0
"""Who asks whether we are ready waits no longer for policy."""
PROBE_KEY_HASH = bytes(32)
"""No key has this hash; asking about it only shows that policy answers."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a request has behind it that is not new: a retry under an Idempotency-Key. `committed`: output tokens."""

    request_id: RequestId
    epoch: Epoch = FIRST_EPOCH
    hooks: SessionHooks | None = None
    committed: tuple[int, ...] = ()


class GatewayService:
    """Everything behind the HTTP door; an async context manager.

    Attributes:
        ingress: the requests in flight.
        traces: spans of all services, lately.
    """

    def __init__(
        self,
        bus: Bus,
        config: GatewayConfig,
        telemetry: Telemetry,
        models: ServedModels,
        clock: Callable[[], float] = time.monotonic,
        metrics: Metrics | None = None,
    ) -> None:
        self.config = config
        self.telemetry = telemetry
        self.models = models
        self.ingress = Ingress(
            bus,
            config.ingress,
            telemetry,
            models,
            on_beat=self._on_beat,
            on_purge=self._on_purge,
            metrics=metrics,
            clock=clock,
        )
        self.traces = TraceBuffer()
        self.cluster = Cluster()
        self._bus = bus
        self._clock = clock
        self._identities = IdentityCache()
        self._guesses = Guesses()
        self._subscriptions: list[Subscription] = []

    async def __aenter__(self) -> GatewayService:
        await self.ingress.__aenter__()
        self._subscriptions = [
            await self._bus.subscribe(subjects.POLICY_EVENTS, PolicyEvent, self._on_policy_event),
            await self._bus.subscribe(subjects.ANY_TRACE, SpanBatch, self._on_spans),
            await self._bus.subscribe(subjects.ANY_GATEWAY_BEAT, GatewayBeat, self._on_ingress_beat),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.ingress.__aexit__(kind, error, traceback)
        for subscription in self._subscriptions:
            await subscription.stop()

    async def drain(self) -> None:
        """Refuse what is new and end what runs; see `Ingress.drain`."""
        await self.ingress.drain()

    # ------------------------------------------------------------------------------------------ requests

    async def authenticate(self, key_hash: bytes, address: str = "") -> Identity:
        """Whose key it is.

        Args:
            address: the client's, for whose guesses there is a limit; empty: none is kept.

        Raises:
            Unauthenticated: policy does not know it.
            QuotaExceeded: from this address came too many such keys.
            Unavailable: policy does not answer.
        """
        asked, changes = self._clock(), self._identities.changes
        if (known := self._identities.get(key_hash, asked)) is not None:
            return known
        if self._guesses.refused(key_hash, asked):
            raise Unauthenticated(KEY_NEEDED)
        if address and (wait_s := self._guesses.wait_s(key_hash, address, asked)) > 0:
            message = "too many unknown API keys came from this address"
            raise QuotaExceeded(message, retry_after_s=wait_s, code="too_many_keys")
        try:
            identity: Identity = await self._ask_identity(key_hash)
        except Unauthenticated:
            if changes == self._identities.changes:
                self._guesses.on_refused(key_hash, address, asked)
            raise
        self.traces.note_retention(identity.tenant, identity.retention_s)
        self._identities.put(key_hash, identity, asked, changes)
        self._guesses.on_good(key_hash, asked)
        return identity

    async def rate_limits(self, identity: Identity, key_hash: bytes) -> dict[str, str]:
        """Headers that tell what is left of the limits of tenant and key; none where there are none.

        Policy is asked if it did not just say so, and if it does not answer, its last word is told.
        """
        if not identity.has_rates:
            return {}
        quotas, whose = self.ingress.quotas, (identity.tenant, identity.key_id)
        told = quotas.headers(*whose, self._clock())
        if told is None:
            with suppress(BatonError):
                await self._ask_identity(key_hash)
            told = quotas.headers(*whose, self._clock(), math.inf)
        return told or {}

    async def count(self, identity: Identity, key_hash: bytes, model: str) -> None:
        """One more of the requests a minute of who asks for what is no generation; nothing where there is no limit.

        Raises QuotaExceeded, or Unavailable when policy does not answer.
        """
        if identity.limits.requests_per_minute:
            admit = Admit(
                request_id=new_request_id(),
                key_hash=key_hash,
                model=model,
                num_prompt_tokens=1,
                max_tokens=1,
                counts_only=True,
            )
            await self.ingress.ask_policy(subjects.POLICY_ADMIT, admit, Granted | Refusal)

    async def open(
        self,
        plan: RequestPlan,
        key_hash: bytes,
        *,
        span: Span,
        arrived: float,
        news: asyncio.Event | None = None,
        origin: Origin | None = None,
    ) -> Session:
        """Admit a client's request and submit it; raises and gives away as `Ingress.open` does."""
        origin = origin or Origin(new_request_id())
        admit = Admit(
            request_id=origin.request_id,
            key_hash=key_hash,
            model=plan.model,
            num_prompt_tokens=len(plan.prompt),
            max_tokens=plan.sampling.max_tokens,
            choices=plan.n,
            klass=plan.klass,
            ingress_id=self.config.ingress.ingress_id,
            salt=plan.salt,
        )
        return await self.ingress.open(
            plan,
            subjects.POLICY_ADMIT,
            admit,
            span=span,
            arrived=arrived,
            epoch=origin.epoch,
            hooks=origin.hooks,
            news=news,
            committed=origin.committed,
        )

    async def ask(self, subject: str, message: msgspec.Struct, reply_type: Any) -> Any:
        """Ask another service. Raises what it raises, or Unavailable when it does not answer."""
        return await self._bus.request(subject, message, reply_type, timeout_s=self.config.ingress.hop_timeout_s)

    async def _ask_identity(self, key_hash: bytes) -> Any:
        ask = Authenticate(key_hash=key_hash)
        return await self.ingress.ask_policy(subjects.POLICY_AUTHENTICATE, ask, Identity | Refusal)

    async def check_policy(self) -> None:
        """Ask policy something, if it was not heard lately, so that `liveness` knows."""
        if self.ingress.liveness.alive("policy", self._clock()):
            return
        with suppress(BatonError, TimeoutError):
            async with asyncio.timeout(CHECK_S):
                await self._ask_identity(PROBE_KEY_HASH)

    def checks(self) -> dict[str, bool]:
        """What `/ready` depends on."""
        wanted = self.ingress.liveness.checks(self._clock(), token_wanted=bool(self.config.probe_key))
        return {**wanted, "bus": self._bus.connected, "accepting": not self.ingress.draining}

    def load(self) -> dict[str, Any]:
        """What runs where and what is ready, for `./baton status`, `./baton top` and the console."""
        ingress = self.ingress
        own = {"id": ingress.config.ingress_id, "requests": len(ingress.sessions), "draining": ingress.draining}
        body = self.cluster.body(self._clock())
        for pool in body["pools"]:
            pool["models"] = [model.name for model in self.models if model.pool == pool["pool"]]
        return {"gateway": own, "checks": self.checks(), **body}

    # ------------------------------------------------------------------------------------------ news

    def _on_beat(self, beat: SchedulerBeat | WorkerBeat, now: float) -> None:
        if isinstance(beat, WorkerBeat):
            self.cluster.on_worker_beat(beat, now)
        else:
            self.cluster.on_scheduler_beat(beat, now)
        self.cluster.forget_old(now)

    def _on_purge(self, order: PurgeOrder) -> Mapping[str, int]:
        return {"traces": self.traces.forget(order.tenant)}

    def _on_policy_event(self, delivery: Delivery) -> None:
        self._identities.on_event(delivery.message)
        self._guesses.forget_refused()

    def _on_spans(self, delivery: Delivery) -> None:
        batch: SpanBatch = delivery.message
        if delivery.subject != subjects.trace(batch.service):
            log.warning("spans of %s on %s dropped", batch.service, delivery.subject)
            return
        self.ingress.liveness.heard_service(batch.service, self._clock())
        # roots tell whose a request was, so nobody may pass a span off as another service's
        self.traces.add(span for span in batch.spans if span.service == batch.service)

    def _on_ingress_beat(self, delivery: Delivery) -> None:
        self.cluster.on_ingress_beat(delivery.message, self._clock())
        if delivery.message.ingress_id == self.config.ingress.ingress_id:  # once a second
            self.traces.expire(time.time_ns())
