"""Our `traceparent` against OpenTelemetry's own propagator."""

from __future__ import annotations

import pytest
from nats.aio.client import Client
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared.bus import trace_context
from shared.bus.nats_client import DirectClient

REFERENCE = TraceContextTextMapPropagator()
GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_what_is_sent_is_what_the_library_sends() -> None:
    span = TracerProvider(shutdown_on_exit=False).get_tracer("t").start_span("s")
    token = otel_context.attach(trace.set_span_in_context(span))
    try:
        ours: dict[str, str] = {}
        theirs: dict[str, str] = {}
        trace_context.inject(ours)
        REFERENCE.inject(theirs)
    finally:
        otel_context.detach(token)
    assert ours == {"traceparent": theirs["traceparent"]}


def test_without_a_span_nothing_is_sent() -> None:
    token = otel_context.attach(Context())
    try:
        headers: dict[str, str] = {}
        trace_context.inject(headers)
    finally:
        otel_context.detach(token)
    assert headers == {}


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        GOOD[:-1] + "0",
        GOOD.replace("0af7", "0AF7"),
        GOOD.replace("00-", "ff-"),
        GOOD.replace("b7ad6b7169203331", "0" * 16),
        GOOD.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32),
        GOOD[:-1],
        GOOD + "-more",
        GOOD.replace("-b7", "+b7"),
        GOOD.replace("b7ad", " 7ad"),
        GOOD.replace("b7ad", "b_ad"),
        "",
        "nonsense",
    ],
)
def test_what_is_read_is_what_the_library_reads(text: str) -> None:
    ours = trace.get_current_span(trace_context.extract({"traceparent": text})).get_span_context()
    theirs = trace.get_current_span(REFERENCE.extract({"traceparent": text}, context=Context())).get_span_context()
    assert ours == theirs
    assert ours.is_remote == theirs.is_remote


@pytest.mark.parametrize(
    "raw",
    [
        b"traceparent: x\r\nBaton-Budget-Ms: 5000\r\n\r\n",
        b"a:b\r\n:x\r\nno colon\r\n two words: x\r\n  padded : \ty \r\n",
        "n\u00e4me: x\r\nvalue: \u00fc\r\n".encode(),
        b"bad: \xff\xfe\r\n",
        b"a: 1\r\na: 2",
        b"",
    ],
)
def test_headers_are_read_as_nats_py_reads_them(raw: bytes) -> None:
    assert DirectClient._parse_header_lines(raw) == Client._parse_header_lines(raw)
