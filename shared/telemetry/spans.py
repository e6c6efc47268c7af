"""Spans behind OpenTelemetry's interface that cost little while a request waits: what is told of one is kept as it is.

The library's own are checked, copied and locked at each attribute, some twenty times a request in every service. What
ours lack is not used here, and what asks for it changes nothing: samplers, kinds, limits of each span, attributes of
events, a description of its status, and an exception's text, which may quote a prompt.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    TracerProvider,
)

EXCEPTION = "exception"
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET, _ERROR = Status(StatusCode.UNSET), Status(StatusCode.ERROR)


class SpanEvent(NamedTuple):
    """Something that happened at a time (unix nanoseconds) while a span ran."""

    name: str
    timestamp: int


class Ended(Protocol):
    """Hears of every span that ends, on the thread that ends it."""

    def on_end(self, span: OwnSpan) -> None: ...


class OwnSpan(Span):
    """One span; it has the attributes of the library's `ReadableSpan` that exporters read. Times: unix nanoseconds."""

    kind = SpanKind.INTERNAL
    instrumentation_scope = InstrumentationScope("baton")

    def __init__(
        self,
        source: SpanSource,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        attributes: dict[str, Any],
        links: Sequence[Link],
        start_time: int,
    ) -> None:
        self._source = source
        self._context = context
        self.name = name
        self.parent = parent
        self.attributes = attributes
        self.links = links
        self.events: list[SpanEvent] = []
        self.status = _UNSET
        self.start_time = start_time
        self.end_time: int | None = None

    @property
    def resource(self) -> Resource:
        return self._source.resource

    def get_span_context(self) -> SpanContext:
        return self._context

    def is_recording(self) -> bool:
        return self.end_time is None

    def set_attribute(self, key: str, value: Any) -> None:
        if self.end_time is None:
            self.attributes[key] = value

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        if self.end_time is None:
            self.attributes.update(attributes)

    def add_event(self, name: str, attributes: Any = None, timestamp: int | None = None) -> None:
        """Note that something happened; its attributes are not kept."""
        if self.end_time is None:
            self.events.append(SpanEvent(name, time.time_ns() if timestamp is None else timestamp))

    def update_name(self, name: str) -> None:
        if self.end_time is None:
            self.name = name

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """Error, ok or unset; the description is not kept, and ok is final."""
        if self.end_time is None and self.status.status_code is not StatusCode.OK:
            self.status = Status(status if isinstance(status, StatusCode) else status.status_code)

    def record_exception(
        self, exception: BaseException, attributes: Any = None, timestamp: int | None = None, escaped: bool = False
    ) -> None:
        """Note that there was one; not what it says."""
        self.add_event(EXCEPTION, timestamp=timestamp)

    def end(self, end_time: int | None = None) -> None:
        if self.end_time is None:
            self.end_time = time.time_ns() if end_time is None else end_time
            self._source.on_end(self)


class _Current:
    """Makes a span the current one while a block runs."""

    def __init__(self, span: Span, record_exception: bool, set_status: bool, end: bool) -> None:
        self._span = span
        self._record = record_exception
        self._set_status = set_status
        self._end = end

    def __enter__(self) -> Span:
        self._token = otel_context.attach(trace.set_span_in_context(self._span))
        return self._span

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        otel_context.detach(self._token)
        if isinstance(error, Exception):
            if self._record:
                self._span.record_exception(error)
            if self._set_status:
                self._span.set_status(_ERROR)
        if self._end:
            self._span.end()


class SpanSource(Tracer, TracerProvider):
    """Makes spans. A child of one that its maker does not record is not recorded either."""

    def __init__(self, resource: Resource) -> None:
        self.resource = resource
        self._ended: tuple[Ended, ...] = ()

    def add_span_processor(self, processor: Ended) -> None:
        """Let it hear of ended spans too."""
        self._ended = (*self._ended, processor)

    def on_end(self, span: OwnSpan) -> None:
        """Tell of a span that has ended."""
        for processor in self._ended:
            processor.on_end(span)

    def get_tracer(self, instrumenting_module_name: str, *args: Any, **kwargs: Any) -> Tracer:
        """Itself: there is one scope."""
        return self

    def start_span(
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Any = None,
        links: Sequence[Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
    ) -> Span:
        """A span that runs, below the context's (the current one's when none is given)."""
        above = trace.get_current_span(context).get_span_context()
        parent = above if above.is_valid else None
        trace_id = parent.trace_id if parent is not None else random.getrandbits(128) or 1
        own = SpanContext(trace_id, random.getrandbits(64) or 1, is_remote=False, trace_flags=_SAMPLED)
        if parent is not None and not parent.trace_flags & TraceFlags.SAMPLED:
            return NonRecordingSpan(SpanContext(trace_id, own.span_id, is_remote=False))
        kept = dict(attributes) if attributes else {}
        return OwnSpan(self, name, own, parent, kept, links or (), start_time or time.time_ns())

    def start_as_current_span(  # type: ignore[override]  # no decorator
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Any = None,
        links: Sequence[Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
        end_on_exit: bool = True,
    ) -> _Current:
        """A span that is the current one in a `with` block."""
        span = self.start_span(name, context, kind, attributes, links, start_time)
        return _Current(span, record_exception, set_status_on_exception, end_on_exit)
