"""OpenTelemetry for one service: a tracer whose finished spans travel to the gateways over the bus.

Lossy by design: spans wait in a bounded queue and are dropped, counted, when the bus cannot take them. Ending a span
costs one append; nothing blocks and nothing is sent from the thread that ends it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

import msgspec
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.trace import ProxyTracerProvider, Tracer

from shared.bus.bus import Bus
from shared.contracts import subjects
from shared.contracts.errors import BatonError
from shared.contracts.messages import SpanBatch
from shared.contracts.parts import SpanRecord
from shared.telemetry.span_record import to_record

log = logging.getLogger("baton.telemetry")

FLUSH_S = 0.25
MAX_QUEUED = 4096
MAX_BATCH_SPANS = 256


class SpanQueue(SpanProcessor):
    """Keeps finished spans until they are taken; the oldest go first when it is full. Safe from any thread."""

    def __init__(self, service: str, capacity: int = MAX_QUEUED) -> None:
        self._service = service
        self._spans: deque[SpanRecord] = deque(maxlen=capacity)
        self.ended = 0
        """Spans ever ended; those neither taken nor queued were dropped."""

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        return None

    def on_end(self, span: ReadableSpan) -> None:
        record = to_record(span, self._service)
        if record is not None:
            self.ended += 1
            self._spans.append(record)

    def shutdown(self) -> None:
        return None

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True

    def take(self, limit: int = MAX_BATCH_SPANS) -> tuple[SpanRecord, ...]:
        """Up to `limit` of the oldest spans, which are then gone from here."""
        taken: list[SpanRecord] = []
        with suppress(IndexError):
            while len(taken) < limit:
                taken.append(self._spans.popleft())
        return tuple(taken)


class Telemetry:
    """A service's tracer and the task that ships its spans; an async context manager while there is a bus.

    Attributes:
        tracer: use this one, so that several services in one process keep their names apart.
    """

    def __init__(self, service: str, bus: Bus | None) -> None:
        self.service = service
        self.queue = SpanQueue(service)
        self._bus = bus
        self._task: asyncio.Task[None] | None = None
        provider = TracerProvider(resource=Resource({SERVICE_NAME: service}), shutdown_on_exit=False)
        provider.add_span_processor(self.queue)
        self.provider = provider
        self.tracer: Tracer = provider.get_tracer("baton")

    async def __aenter__(self) -> Telemetry:
        if self._bus is not None:
            self._task = asyncio.create_task(self._ship())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        await self.flush()

    async def flush(self) -> None:
        """Send what is queued now; what cannot be sent is dropped."""
        while self._bus is not None and (spans := self.queue.take()):
            await self._send(self._bus, spans)

    async def _ship(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()

    async def _send(self, bus: Bus, spans: Sequence[SpanRecord]) -> None:
        batch: msgspec.Struct = SpanBatch(service=self.service, spans=tuple(spans))
        try:
            await bus.publish(subjects.trace(self.service), batch)
        except BatonError as exc:
            log.debug("%d spans dropped: %s", len(spans), exc.message)


def setup_telemetry(service: str, bus: Bus | None = None) -> Telemetry:
    """Telemetry of `service` (its name in `subjects.SERVICES`). Enter it to ship spans over `bus`.

    The first call in a process also becomes the global provider, for code that asks OpenTelemetry for a tracer.
    """
    telemetry = Telemetry(service, bus)
    if isinstance(trace.get_tracer_provider(), ProxyTracerProvider):
        trace.set_tracer_provider(telemetry.provider)
    return telemetry
