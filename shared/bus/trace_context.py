"""The one header in which a span's identity crosses the bus: W3C's `traceparent`. Pure.

What OpenTelemetry's propagators do with the header alone, without their baggage, of which we send none, and without
their regular expressions: every message passes here twice.
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

HEADER = "traceparent"
_EMPTY = Context()
_LENGTH = len("00-") + 32 + 1 + 16 + 1 + 2
_HEX = frozenset("0123456789abcdef")


def inject(headers: dict[str, str]) -> None:
    """Add the current span's header, if there is a span."""
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        headers[HEADER] = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 0xFF:02x}"


def extract(headers: Mapping[str, str]) -> Context:
    """A context whose span is the sender's; an empty one when the header is absent or not of version 00."""
    text = headers.get(HEADER, "")
    if len(text) != _LENGTH:
        return _EMPTY
    version, trace_id, span_id, flags = text[:3], text[3:35], text[36:52], text[53:]
    if version != "00-" or text[35] != "-" or text[52] != "-" or not _HEX.issuperset(trace_id + span_id + flags):
        return _EMPTY
    context = SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))
    return trace.set_span_in_context(NonRecordingSpan(context), _EMPTY) if context.is_valid else _EMPTY
