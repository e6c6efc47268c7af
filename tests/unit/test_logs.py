"""Log lines: both formats, and whose they are."""

from __future__ import annotations

import json
import logging
import sys

from opentelemetry.context import Context

from shared.lifecycle.logs import JsonFormatter, PlainFormatter
from shared.telemetry import attributes as a
from shared.telemetry.setup import Telemetry

TELEMETRY = Telemetry("gateway", None)


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("baton.x", logging.WARNING, __file__, 1, message, (), None)
    made.created, made.msecs = 1_769_860_984.25, 250.0
    for name, value in extra.items():
        setattr(made, name, value)
    return made


def test_outside_a_span_a_line_is_just_a_line() -> None:
    assert PlainFormatter("policy").format(record("hello")) == (
        "2026-01-31T12:03:04.250Z WARNING policy baton.x: hello"
    )
    assert json.loads(JsonFormatter("policy").format(record("hello"))) == {
        "time": 1_769_860_984.25,
        "level": "warning",
        "service": "policy",
        "logger": "baton.x",
        "message": "hello",
    }


def test_inside_a_span_a_line_names_trace_span_and_request() -> None:
    with TELEMETRY.tracer.start_as_current_span("gateway.request", Context()) as span:
        context = span.get_span_context()
        trace_id = f"{context.trace_id:032x}"
        assert PlainFormatter("x").format(record("a")).endswith(f"baton.x: a  trace={trace_id}")
        span.set_attribute(a.REQUEST_ID, "req-1")
        assert PlainFormatter("x").format(record("a")).endswith(f"baton.x: a  request=req-1 trace={trace_id}")
        line = json.loads(JsonFormatter("x").format(record("a")))
    assert line["trace_id"] == trace_id
    assert line["span_id"] == f"{context.span_id:016x}"
    assert line["request_id"] == "req-1"


def test_a_line_may_be_of_another_span_than_the_current_one() -> None:
    other = TELEMETRY.tracer.start_span("decode.run", Context(), attributes={a.REQUEST_ID: "req-2"})
    other.end()
    with TELEMETRY.tracer.start_as_current_span("decode.reserve", Context()):
        line = json.loads(JsonFormatter("x").format(record("a", span=other)))
    assert line["request_id"] == "req-2"
    assert line["trace_id"] == f"{other.get_span_context().trace_id:032x}"


def test_an_error_comes_with_its_traceback() -> None:
    made = record("failed")
    try:
        raise ValueError("odd")
    except ValueError:
        made.exc_info = sys.exc_info()
    plain = PlainFormatter("x").format(made).splitlines()
    assert plain[0].endswith("baton.x: failed")
    assert plain[-1] == "ValueError: odd"
    assert json.loads(JsonFormatter("x").format(made))["error"].endswith("ValueError: odd")
