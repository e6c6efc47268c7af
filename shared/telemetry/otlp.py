"""Finished spans to an OpenTelemetry collector (OTLP over HTTP), redacted like those on the bus.

Lossy like them too: a bounded queue, a thread of its own, and a count of what never arrived. A collector that is slow,
full or dead costs a request nothing, and the log one line when it fails and one when it is back.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import Link, Status

from shared.telemetry.span_record import MAX_EVENTS, redact, safe_name
from shared.telemetry.spans import OwnSpan

log = logging.getLogger("baton.telemetry")

TRACES_PATH = "/v1/traces"
FLUSH_S = 1.0
EXPORT_S = 5.0
"""Time one batch may take, its repetitions included; then it is dropped."""
STOP_S = 2.0
"""Time for the last spans when the process stops."""
MAX_QUEUED = 4096
MAX_BATCH_SPANS = 512


def traces_url(endpoint: str) -> str:
    """The address spans are sent to: `endpoint` with the path of traces, unless it has one."""
    return endpoint if urlsplit(endpoint).path.endswith(TRACES_PATH) else endpoint.rstrip("/") + TRACES_PATH


class OtlpExport:
    """Keeps finished spans and sends them in batches from a thread. Safe from any thread; end it with `stop`.

    Args:
        endpoint: as in `[telemetry] otlp_endpoint`; headers and certificates come from OpenTelemetry's own variables.
    """

    def __init__(self, endpoint: str, capacity: int = MAX_QUEUED) -> None:
        self.dropped = 0
        """Spans that never arrived, so far."""
        url = traces_url(endpoint)
        self._shown = urlsplit(url).netloc.rpartition("@")[2]  # an address may hold a password
        # It would log every batch that fails; once is enough, and this module does.
        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)
        self._exporter = OTLPSpanExporter(url, timeout=EXPORT_S)
        self._capacity = capacity
        self._waiting: deque[OwnSpan] = deque()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="otlp-export", daemon=True)
        self._thread.start()

    def on_end(self, span: OwnSpan) -> None:
        """Keep a span that has ended until it is sent."""
        with self._lock:
            if len(self._waiting) >= self._capacity:
                self._waiting.popleft()
                self.dropped += 1
            self._waiting.append(span)
            many = len(self._waiting) >= MAX_BATCH_SPANS
        if many:
            self._wake.set()

    def stop(self, timeout_s: float = STOP_S) -> None:
        """Send what waits, if the collector takes it, and end the thread. Blocks for `timeout_s` at most."""
        self._stopping = True
        self._wake.set()
        if not self._failing:
            self._thread.join(timeout_s)
        self._exporter.shutdown()  # type: ignore[no-untyped-call]  # ends a pause between repetitions
        self._thread.join(0.1)

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(FLUSH_S)
            self._wake.clear()
            while (batch := self._take()) and self._export(batch):
                pass

    def _take(self) -> list[OwnSpan]:
        with self._lock:
            return [self._waiting.popleft() for _ in range(min(MAX_BATCH_SPANS, len(self._waiting)))]

    def _export(self, batch: list[OwnSpan]) -> bool:
        sent = False
        try:
            sent = self._exporter.export([redacted(span) for span in batch]) is SpanExportResult.SUCCESS
        except Exception:
            if not self._failing:
                log.exception("spans could not be sent to %s", self._shown)
        if not sent:
            with self._lock:
                self.dropped += len(batch)
        if not self._stopping and sent == self._failing:
            log.log(
                logging.INFO if sent else logging.WARNING,
                "the trace collector at %s %s",
                self._shown,
                "takes spans again" if sent else "takes no spans; they are dropped until it does",
            )
        self._failing = not sent
        return sent


def redacted(span: OwnSpan) -> ReadableSpan:
    """The same span with names and attributes of the allow-list only; see `span_record`."""
    links = [Link(link.context) for link in span.links]
    events = [Event(safe_name(event.name), {}, event.timestamp) for event in span.events[:MAX_EVENTS]]
    return ReadableSpan(
        name=safe_name(span.name),
        context=span.get_span_context(),
        parent=span.parent,
        resource=span.resource,
        attributes=redact(span.attributes),
        events=events,
        links=links,
        kind=span.kind,
        status=Status(span.status.status_code),
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )
