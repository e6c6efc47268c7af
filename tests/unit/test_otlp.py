"""Spans to a collector: redacted, bounded, and no trouble to anybody when the collector is in trouble."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable

import pytest
from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags

from shared.telemetry import attributes as a
from shared.telemetry import otlp
from shared.telemetry.otlp import OtlpExport, traces_url
from shared.telemetry.setup import Telemetry
from tests.collector import attributes, collector

SECRET = "my prompt about whales"
LINKED = SpanContext(0xABC, 0xDEF, is_remote=True, trace_flags=TraceFlags(1))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "FLUSH_S", 0.05)
    monkeypatch.setattr(otlp, "EXPORT_S", 0.5)


def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/base", "https://c/base/v1/traces"),
        ("https://c/base/v1/traces", "https://c/base/v1/traces"),
    ],
)
def test_the_address(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


async def test_spans_arrive_with_their_parents_and_nothing_else() -> None:
    with collector() as found:
        async with Telemetry("decode", None, found.url) as telemetry:
            with telemetry.tracer.start_as_current_span("decode.run", Context(), links=[Link(LINKED)]) as parent:
                parent.set_attributes({a.PROMPT_TOKENS: 5, a.PATH: "local", "prompt": SECRET, "llm.input": [SECRET]})
                with telemetry.tracer.start_as_current_span(f"say {SECRET}") as child:
                    child.add_event("first_token", {"text": SECRET})
                    child.set_status(Status(StatusCode.ERROR, SECRET))
        # leaving has sent what was there
        assert found.paths == ["/v1/traces"]
        assert SECRET.encode() not in b"".join(found.bodies)
        (child_service, sent_child), (_, sent) = found.spans
    assert child_service == "decode"
    assert (sent.name, sent_child.name) == ("decode.run", "other")
    assert attributes(sent) == {a.PROMPT_TOKENS: 5, a.PATH: "local"}
    assert sent_child.parent_span_id == sent.span_id
    assert sent_child.trace_id == sent.trace_id
    assert sent.end_time_unix_nano >= sent.start_time_unix_nano > 0
    assert (sent_child.status.code, sent_child.status.message) == (2, "")
    assert [event.name for event in sent_child.events] == ["first_token"]
    assert not sent_child.events[0].attributes
    assert [int.from_bytes(link.trace_id, "big") for link in sent.links] == [0xABC]


async def test_a_dead_collector_costs_nothing_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    # Given an address where nobody listens
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    caplog.set_level(logging.INFO)
    async with Telemetry("gateway", None, f"http://user:secret@127.0.0.1:{port}") as telemetry:
        assert telemetry.otlp is not None
        started = time.monotonic()
        for _ in range(2000):
            telemetry.tracer.start_span("gateway.request").end()
        spent = time.monotonic() - started
        until(lambda: telemetry.otlp is not None and telemetry.otlp.dropped >= 2000)
        for _ in range(3):
            telemetry.tracer.start_span("gateway.request").end()
        until(lambda: telemetry.otlp is not None and telemetry.otlp.dropped >= 2003)
        stopping = time.monotonic()
    # Then ending a span stayed cheap, the log has one line without the password, and leaving is quick
    assert spent / 2000 < 0.002
    lines = [r.getMessage() for r in caplog.records]
    assert [line for line in lines if "collector" in line] == lines
    assert len(lines) == 1
    assert "secret" not in lines[0]
    assert time.monotonic() - stopping < otlp.STOP_S


async def test_a_collector_that_is_back_is_told_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with collector() as found:
        found.status = 400
        async with Telemetry("gateway", None, found.url) as telemetry:
            assert telemetry.otlp is not None
            telemetry.tracer.start_span("gateway.request").end()
            until(lambda: telemetry.otlp is not None and telemetry.otlp.dropped == 1)
            found.status = 200
            telemetry.tracer.start_span("gateway.request").end()
            until(lambda: found.spans)
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]
    assert len(found.spans) == 1


def test_the_queue_is_bounded_and_counts() -> None:
    # Given a collector that takes connections and never answers
    with socket.create_server(("127.0.0.1", 0)) as silent:
        telemetry = Telemetry("decode", None)
        export = OtlpExport(f"http://127.0.0.1:{silent.getsockname()[1]}", capacity=10)
        telemetry.provider.add_span_processor(export)
        telemetry.tracer.start_span("decode.run").end()
        until(lambda: not export._waiting)  # the thread waits for its answer
        for _ in range(25):
            telemetry.tracer.start_span("decode.run").end()
        assert len(export._waiting) == 10
        assert export.dropped >= 15
        started = time.monotonic()
        export.stop(0.3)
        assert time.monotonic() - started < 2
