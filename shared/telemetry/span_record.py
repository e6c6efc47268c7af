"""A finished span as it crosses the bus: redacted, bounded, plain data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from opentelemetry.trace import StatusCode

from shared.contracts.parts import SpanRecord
from shared.telemetry.attributes import ALLOWED
from shared.telemetry.spans import OwnSpan

MAX_VALUE_CHARS = 120
MAX_EVENTS = 32
_NAME = re.compile(r"[a-z0-9_.\-]{1,64}")

Value = str | int | float | bool


def redact(attributes: Mapping[str, Any]) -> dict[str, Value]:
    """Only attributes of the allow-list, only plain values, texts cut at `MAX_VALUE_CHARS`."""
    kept: dict[str, Value] = {}
    for name, value in attributes.items():
        if name not in ALLOWED:
            continue
        if isinstance(value, str):
            kept[name] = value[:MAX_VALUE_CHARS]
        elif isinstance(value, (int, float)):
            kept[name] = value
    return kept


def to_record(span: OwnSpan, service: str) -> SpanRecord:
    """The record of a finished span.

    Events keep name and time only: an exception's event holds its message, which may quote a prompt.
    """
    context = span.get_span_context()
    code = span.status.status_code
    return SpanRecord(
        trace_id=f"{context.trace_id:032x}",
        span_id=f"{context.span_id:016x}",
        parent_id="" if span.parent is None else f"{span.parent.span_id:016x}",
        name=safe_name(span.name),
        service=service,
        start_ns=span.start_time,
        end_ns=span.end_time or span.start_time,
        status="" if code is StatusCode.UNSET else code.name.lower(),
        attributes=redact(span.attributes),
        events=tuple((safe_name(event.name), event.timestamp) for event in span.events[:MAX_EVENTS]),
        links=tuple(f"{link.context.trace_id:032x}" for link in span.links),
    )


def safe_name(name: str) -> str:
    """A span's or event's name, if it is one of ours by its looks; else `other`."""
    return name if _NAME.fullmatch(name) else "other"
