"""The last traces a gateway has seen, bounded by bytes. Pure: knows no bus."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import msgspec

from shared.contracts.parts import SpanRecord
from shared.security.keeping import kept_s
from shared.telemetry import attributes as a

ROOT = "gateway.request"
ROOTS = {ROOT: "gateway", "batch.item": "batch"}
"""Names of root spans, and the service that makes each: what a request was and whose is believed of nobody else."""
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
    klass: str = ""
    finish: str = ""


class TraceBuffer:
    """Traces in order of their first span; the oldest are dropped when `max_bytes` (estimated) are passed."""

    def __init__(self, max_bytes: int = 16 * 1024 * 1024) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._traces: OrderedDict[str, dict[str, SpanRecord]] = OrderedDict()
        self._by_request: dict[str, str] = {}
        self._tenants: dict[str, str] = {}
        self._retentions: dict[str, int] = {}
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
            if _is_root(span):
                self._note_root(span)
        while self._bytes > self._max_bytes and len(self._traces) > 1:
            self._drop_oldest()

    def forget(self, tenant: str) -> int:
        """Drop a tenant's traces; how many. Whose one is whose root has not come yet, nobody knows."""
        return self._drop_all([trace_id for trace_id, whose in self._tenants.items() if whose == tenant])

    def note_retention(self, tenant: str, retention_s: int) -> None:
        """How long a tenant's traces are kept, as in `Grant`; root spans tell it too."""
        if retention_s < 0:
            self._retentions.pop(tenant, None)
        else:
            self._retentions[tenant] = retention_s

    def expire(self, now_ns: int) -> int:
        """Drop what ended longer ago than its tenant's retention (unix nanoseconds); how many."""
        ends = {tenant: now_ns - kept_s(0, kept) * 1_000_000_000 for tenant, kept in self._retentions.items()}
        if not ends:
            return 0
        return self._drop_all(
            [
                trace_id
                for trace_id, tenant in self._tenants.items()
                if tenant in ends and max(span.end_ns for span in self._traces[trace_id].values()) < ends[tenant]
            ]
        )

    def get(self, wanted: str, tenant: str | None = None) -> list[SpanRecord]:
        """Spans of a trace, by trace id, request id, or an unambiguous beginning of either; in order of their start.

        With `tenant`, other tenants' traces do not exist: they are not found, and make no beginning ambiguous.
        """
        trace_id = self._find(wanted, tenant)
        return sorted(self._traces.get(trace_id, {}).values(), key=lambda span: (span.start_ns, -span.end_ns))

    def recent(self, limit: int = 20, tenant: str | None = None) -> list[TraceSummary]:
        """The newest traces that have their root span, newest first; with `tenant`, that tenant's only."""
        found: list[TraceSummary] = []
        for trace_id in reversed(self._traces):
            if not self._is_of(trace_id, tenant):
                continue
            if (summary := summarize(self._traces[trace_id].values())) is not None:
                found.append(summary)
            if len(found) == limit:
                break
        return found

    def _is_of(self, trace_id: str, tenant: str | None) -> bool:
        """Whose a trace is only its root tells; before it has come, it is nobody's."""
        return tenant is None or self._tenants.get(trace_id) == tenant

    def _note_root(self, root: SpanRecord) -> None:
        request_id, tenant = root.attributes.get(a.REQUEST_ID), root.attributes.get(a.TENANT)
        if isinstance(request_id, str):
            self._by_request[request_id] = root.trace_id
        if isinstance(tenant, str):
            self._tenants[root.trace_id] = tenant
            kept = root.attributes.get(a.RETENTION_S)
            if isinstance(kept, int):
                self.note_retention(tenant, kept)
            elif a.CLASS in root.attributes:  # it was granted, to a tenant without one
                self.note_retention(tenant, -1)

    def _find(self, wanted: str, tenant: str | None) -> str:
        exact = wanted if wanted in self._traces else self._by_request.get(wanted, "")
        if exact:
            return exact if self._is_of(exact, tenant) else ""
        if len(wanted) < 4:
            return ""
        starts = {t for t in self._traces if t.startswith(wanted)}
        starts |= {t for r, t in self._by_request.items() if r.startswith((wanted, f"req-{wanted}"))}
        starts = {t for t in starts if self._is_of(t, tenant)}
        return starts.pop() if len(starts) == 1 else ""

    def _drop_oldest(self) -> None:
        self._drop(next(iter(self._traces)))

    def _drop_all(self, trace_ids: list[str]) -> int:
        for trace_id in trace_ids:
            self._drop(trace_id)
        return len(trace_ids)

    def _drop(self, trace_id: str) -> None:
        spans = self._traces.pop(trace_id)
        self._bytes -= self._sizes.pop(trace_id)
        self._tenants.pop(trace_id, None)
        for span in spans.values():
            self._by_request.pop(str(span.attributes.get(a.REQUEST_ID, "")), None)


def root_of(spans: Iterable[SpanRecord]) -> SpanRecord | None:
    """The span of the whole request; None while it runs, or when it was lost."""
    return next((span for span in spans if _is_root(span)), None)


def _is_root(span: SpanRecord) -> bool:
    return span.name in ROOTS and span.service == ROOTS[span.name]


def summarize(spans: Iterable[SpanRecord]) -> TraceSummary | None:
    """One line about a trace; None without its root span."""
    known = list(spans)
    root = root_of(known)
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
        klass=first(a.CLASS, ""),
        finish=first(a.FINISH, ""),
    )
