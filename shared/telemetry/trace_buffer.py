"""The last traces a gateway has seen, bounded by bytes. Pure: knows no bus."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import msgspec

from shared.contracts.parts import SpanRecord
from shared.telemetry import attributes as a

ROOT = "gateway.request"
MAX_SPANS = 256
"""Spans kept of one trace; a request makes about ten."""
_SPAN_BYTES = 600
_ATTRIBUTE_BYTES = 120


class TraceSummary(msgspec.Struct, frozen=True):
    """One line of the list of traces. Durations in seconds, `start_s` in unix seconds; None: not known."""

    trace_id: str
    request_id: str
    start_s: float
    model: str
    tenant: str
    path: str
    status: str
    total_s: float
    ttft_s: float | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    num_spans: int
    services: tuple[str, ...]


class TraceBuffer:
    """Traces in order of their first span; the oldest are dropped when `max_bytes` (estimated) are passed."""

    def __init__(self, max_bytes: int = 16 * 1024 * 1024) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._traces: OrderedDict[str, dict[str, SpanRecord]] = OrderedDict()
        self._by_request: dict[str, str] = {}
        self._sizes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._traces)

    def add(self, spans: Iterable[SpanRecord]) -> None:
        """Take finished spans; one that is here already is ignored."""
        for span in spans:
            known = self._traces.setdefault(span.trace_id, {})
            if span.span_id in known or len(known) >= MAX_SPANS:
                continue
            known[span.span_id] = span
            size = _SPAN_BYTES + _ATTRIBUTE_BYTES * (len(span.attributes) + len(span.events))
            self._sizes[span.trace_id] = self._sizes.get(span.trace_id, 0) + size
            self._bytes += size
            request_id = span.attributes.get(a.REQUEST_ID)
            if span.name == ROOT and isinstance(request_id, str):
                self._by_request[request_id] = span.trace_id
        while self._bytes > self._max_bytes and len(self._traces) > 1:
            self._drop_oldest()

    def get(self, wanted: str) -> list[SpanRecord]:
        """Spans of a trace, by trace id, request id, or an unambiguous beginning of either; in order of their start."""
        trace_id = self._find(wanted)
        return sorted(self._traces.get(trace_id, {}).values(), key=lambda span: (span.start_ns, -span.end_ns))

    def recent(self, limit: int = 20) -> list[TraceSummary]:
        """The newest traces that have their root span, newest first."""
        found: list[TraceSummary] = []
        for trace_id in reversed(self._traces):
            if (summary := summarize(self._traces[trace_id].values())) is not None:
                found.append(summary)
            if len(found) == limit:
                break
        return found

    def _find(self, wanted: str) -> str:
        if wanted in self._traces:
            return wanted
        if wanted in self._by_request:
            return self._by_request[wanted]
        if len(wanted) < 4:
            return ""
        starts = {t for t in self._traces if t.startswith(wanted)}
        starts |= {t for r, t in self._by_request.items() if r.startswith((wanted, f"req-{wanted}"))}
        return starts.pop() if len(starts) == 1 else ""

    def _drop_oldest(self) -> None:
        trace_id, spans = self._traces.popitem(last=False)
        self._bytes -= self._sizes.pop(trace_id)
        for span in spans.values():
            self._by_request.pop(str(span.attributes.get(a.REQUEST_ID, "")), None)


def summarize(spans: Iterable[SpanRecord]) -> TraceSummary | None:
    """One line about a trace; None without its root span."""
    known = list(spans)
    root = next((span for span in known if span.name == ROOT), None)
    if root is None:
        return None

    def first(name: str, default: Any) -> Any:
        for span in (root, *known):
            if name in span.attributes:
                return span.attributes[name]
        return default

    return TraceSummary(
        trace_id=root.trace_id,
        request_id=first(a.REQUEST_ID, ""),
        start_s=root.start_ns / 1e9,
        model=first(a.MODEL, ""),
        tenant=first(a.TENANT, ""),
        path=first(a.PATH, ""),
        status=first(a.STATUS, root.status or "ok"),
        total_s=(root.end_ns - root.start_ns) / 1e9,
        ttft_s=root.attributes.get(a.TTFT_S),  # type: ignore[arg-type]
        prompt_tokens=first(a.PROMPT_TOKENS, 0),
        cached_tokens=first(a.CACHED_TOKENS, 0),
        completion_tokens=first(a.COMPLETION_TOKENS, 0),
        num_spans=len(known),
        services=tuple(sorted({span.service for span in known})),
    )
