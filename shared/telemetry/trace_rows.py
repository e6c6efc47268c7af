"""A trace as rows: spans in tree order on one time axis, each with its reasons and facts. Pure.

The one core of the console's waterfall (`GET /baton/traces/{id}`) and of `./baton trace`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from shared.contracts.parts import SpanRecord
from shared.telemetry import attributes as a
from shared.telemetry.reasons import failed, why
from shared.telemetry.units import seconds, size

SHOWN_ABOVE = frozenset({a.REQUEST_ID, a.TENANT, a.MODEL, a.STATUS, a.KIND, a.STREAM})
"""Attributes of the request as a whole, which no row repeats."""


class Fact(msgspec.Struct, frozen=True):
    """One attribute: its short name, and its value as people read it."""

    name: str
    text: str


class TraceRow(msgspec.Struct, frozen=True):
    """One span. Times in seconds since the trace began."""

    span_id: str
    parent_id: str
    depth: int
    name: str
    service: str
    start_s: float
    duration_s: float
    failed: bool
    why: tuple[str, ...]
    facts: tuple[Fact, ...]


def trace_rows(spans: Sequence[SpanRecord]) -> list[TraceRow]:
    """Rows of one trace, parents before their children."""
    start = min((span.start_ns for span in spans), default=0)
    return [
        TraceRow(
            span_id=span.span_id,
            parent_id=span.parent_id,
            depth=depth,
            name=span.name,
            service=span.service,
            start_s=(span.start_ns - start) / 1e9,
            duration_s=(span.end_ns - span.start_ns) / 1e9,
            failed=failed(span),
            why=why(span),
            facts=facts(span),
        )
        for span, depth in in_tree_order(spans)
    ]


def length_s(rows: Sequence[TraceRow]) -> float:
    """Seconds from the first start to the last end."""
    return max((row.start_s + row.duration_s for row in rows), default=0.0)


def in_tree_order(spans: Sequence[SpanRecord]) -> list[tuple[SpanRecord, int]]:
    """Spans with their depths: children after their parent in order of start; one whose parent is lost is a root."""
    known = {span.span_id for span in spans}
    children: dict[str, list[SpanRecord]] = {}
    for span in sorted(spans, key=lambda s: (s.start_ns, -s.end_ns, s.span_id)):
        children.setdefault(span.parent_id if span.parent_id in known else "", []).append(span)
    ordered: list[tuple[SpanRecord, int]] = []
    stack = [(span, 0) for span in reversed(children.get("", []))]
    while stack:
        span, depth = stack.pop()
        ordered.append((span, depth))
        stack += [(child, depth + 1) for child in reversed(children.get(span.span_id, []))]
    return ordered


def facts(span: SpanRecord) -> tuple[Fact, ...]:
    """The span's attributes for reading, in the order they were set; empty ones and the request's own left out."""
    return tuple(
        _fact(name, value)
        for name, value in span.attributes.items()
        if name not in SHOWN_ABOVE and value != "" and value is not False
    )


def _fact(name: str, value: Any) -> Fact:
    short = name.removeprefix("baton.")
    if isinstance(value, int | float) and not isinstance(value, bool):
        if short.endswith("_s"):
            return Fact(short.removesuffix("_s"), seconds(float(value)))
        if short == "bytes" or short.endswith("_bytes"):
            return Fact(short, size(int(value)))
    return Fact(
        short, f"{value:.3g}" if isinstance(value, float) else str(value).lower() if value is True else str(value)
    )
