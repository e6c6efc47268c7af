"""OpenTelemetry for one service: a tracer whose finished spans travel to the gateways over the bus, and, if one is
set, to a collector.

Lossy by design: spans wait in a bounded queue and are dropped, counted, when the bus cannot take them. Ending a span
costs one append; nothing blocks and nothing is sent from the thread that ends it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec
from opentelemetry import trace
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.trace import ProxyTracerProvider, Tracer

from shared.bus.bus import Bus
from shared.contracts import subjects
from shared.contracts.errors import BatonError
from shared.contracts.messages import SpanBatch
from shared.contracts.parts import SpanRecord
from shared.lifecycle.tasks import end_tasks
from shared.telemetry.span_record import to_record
from shared.telemetry.spans import OwnSpan, SpanSource

if TYPE_CHECKING:
    from shared.telemetry.otlp import OtlpExport

log = logging.getLogger("baton.telemetry")

FLUSH_S = 0.25
MAX_QUEUED = 4096
MAX_BATCH_SPANS = 16
"""In one message: to write them down, and in gateways to read them, holds up requests for some hundred microseconds."""
PAUSE_S = 0.002
"""Between messages, so that no request is held up by several."""
MANY_SPANS = 256
"""From so many waiting on there are no pauses."""


class SpanQueue:
    """Keeps finished spans until they are taken; the oldest go first when it is full. Safe from any thread."""

    def __init__(self, service: str, capacity: int = MAX_QUEUED) -> None:
        self._service = service
        self._spans: deque[OwnSpan] = deque(maxlen=capacity)
        self.ended = 0
        """Spans ever ended."""
        self.dropped = 0
        """Spans that were pushed out by newer ones."""
        self.on_first: Callable[[], None] = lambda: None
        """Called with the first span after each `take`, on the thread that ended it."""
        self._told = False

    def __len__(self) -> int:
        return len(self._spans)

    def on_end(self, span: OwnSpan) -> None:
        """Keep a span that has ended; its record is made when it is taken."""
        self.ended += 1
        self.dropped += len(self._spans) == self._spans.maxlen
        self._spans.append(span)
        if not self._told:
            self._told = True
            self.on_first()

    def take(self, limit: int = MAX_BATCH_SPANS) -> tuple[SpanRecord, ...]:
        """Up to `limit` of the oldest spans, which are then gone from here."""
        self._told = False  # before any is taken: what comes from now on is told of anew
        taken: list[SpanRecord] = []
        with suppress(IndexError):
            while len(taken) < limit:
                taken.append(to_record(self._spans.popleft(), self._service))
        return tuple(taken)


class Telemetry:
    """A service's tracer and the task that ships its spans; an async context manager while there is a bus.

    Args:
        otlp_endpoint: a trace collector that gets the spans too; empty: none.

    Attributes:
        tracer: use this one, so that several services in one process keep their names apart.
        unsent: spans the bus did not take.
        otlp: the way to the collector, if there is one.
    """

    def __init__(self, service: str, bus: Bus | None, otlp_endpoint: str = "") -> None:
        self.service = service
        self.queue = SpanQueue(service)
        self.unsent = 0
        self._bus = bus
        self._task: asyncio.Task[None] | None = None
        provider = SpanSource(Resource({SERVICE_NAME: service}))
        provider.add_span_processor(self.queue)
        self.otlp = _open_otlp(otlp_endpoint) if otlp_endpoint else None
        if self.otlp is not None:
            provider.add_span_processor(self.otlp)
        self.provider = provider
        self.tracer: Tracer = provider

    async def __aenter__(self) -> Telemetry:
        if self._bus is not None:
            self._task = asyncio.create_task(self._ship())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._task is not None:
            await end_tasks([self._task])
            self._task = None
        await self.flush()
        if self.otlp is not None:
            await asyncio.to_thread(self.otlp.stop)

    async def flush(self, pause_s: float = 0.0) -> None:
        """Send what is queued now; what cannot be sent is dropped. `pause_s`: after each message, unless many wait."""
        while self._bus is not None and (spans := self.queue.take()):
            await self._send(self._bus, spans)
            await asyncio.sleep(pause_s if len(self.queue) < MANY_SPANS else 0)  # others' turn

    async def _ship(self) -> None:
        """Sleeps until there is a span: most processes have none most of the time."""
        loop, come = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed: the process is ending
                loop.call_soon_threadsafe(come.set)

        self.queue.on_first = wake
        wake()  # for those that came before
        while True:
            await come.wait()
            await asyncio.sleep(FLUSH_S)
            come.clear()
            await self.flush(PAUSE_S)

    async def _send(self, bus: Bus, spans: Sequence[SpanRecord]) -> None:
        batch: msgspec.Struct = SpanBatch(service=self.service, spans=tuple(spans))
        try:
            await bus.publish(subjects.trace(self.service), batch)
        except BatonError as exc:
            self.unsent += len(spans)
            log.debug("%d spans dropped: %s", len(spans), exc.message)


def _open_otlp(endpoint: str) -> OtlpExport:
    # Imported only where it is used: it takes a tenth of a second, and most stacks have no collector.
    from shared.telemetry.otlp import OtlpExport

    return OtlpExport(endpoint)


def setup_telemetry(service: str, bus: Bus | None = None, otlp_endpoint: str = "") -> Telemetry:
    """Telemetry of `service` (its name in `subjects.SERVICES`). Enter it to ship spans over `bus`.

    The first call in a process also becomes the global provider, for code that asks OpenTelemetry for a tracer.
    """
    telemetry = Telemetry(service, bus, otlp_endpoint)
    if isinstance(trace.get_tracer_provider(), ProxyTracerProvider):
        trace.set_tracer_provider(telemetry.provider)
    return telemetry
