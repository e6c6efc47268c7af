"""Our spans behind OpenTelemetry's interface: what they keep, and what they never keep."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags

from shared.telemetry.spans import OwnSpan, SpanSource

SECRET = "my prompt about whales"


class Kept:
    def __init__(self) -> None:
        self.spans: list[OwnSpan] = []

    def on_end(self, span: OwnSpan) -> None:
        self.spans.append(span)


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def source(kept: Kept) -> SpanSource:
    made = SpanSource(Resource({"service.name": "gateway"}))
    made.add_span_processor(kept)
    return made


def test_a_child_is_in_its_parents_trace_and_the_current_one_is_restored(source: SpanSource, kept: Kept) -> None:
    before = trace.get_current_span()
    with source.start_as_current_span("outer") as outer:
        assert trace.get_current_span() is outer
        with source.start_as_current_span("inner"):
            pass
        assert trace.get_current_span() is outer
        root = source.start_span("root", context=Context())
        root.end()
    assert trace.get_current_span() is before
    inner, alone, above = kept.spans
    assert (above.name, above.parent, alone.parent) == ("outer", None, None)
    assert inner.parent == above.get_span_context()
    assert inner.get_span_context().trace_id == above.get_span_context().trace_id
    assert alone.get_span_context().trace_id != above.get_span_context().trace_id
    assert len({span.get_span_context().span_id for span in kept.spans}) == 3
    assert above.start_time <= inner.start_time <= (inner.end_time or 0) <= (above.end_time or 0)


def test_a_span_that_has_ended_changes_no_more_and_ends_once(source: SpanSource, kept: Kept) -> None:
    link = Link(SpanContext(5, 6, is_remote=True))
    span = source.start_span("a", attributes={"x": 1}, links=[link], start_time=7)
    span.set_attributes({"y": 2})
    span.end(9)
    for change in (
        lambda: span.set_attribute("z", 3),
        lambda: span.set_attributes({"z": 3}),
        lambda: span.add_event("late"),
        lambda: span.update_name("b"),
        lambda: span.set_status(StatusCode.ERROR),
        span.end,
    ):
        change()
    (own,) = kept.spans
    assert not own.is_recording()
    assert (own.name, own.attributes, own.events, list(own.links)) == ("a", {"x": 1, "y": 2}, [], [link])
    assert (own.start_time, own.end_time, own.status.status_code) == (7, 9, StatusCode.UNSET)


@pytest.mark.parametrize("raised", [ValueError(SECRET), KeyboardInterrupt(SECRET)])
def test_an_exception_is_an_event_and_a_status_without_its_text(
    source: SpanSource, kept: Kept, raised: BaseException
) -> None:
    with pytest.raises(type(raised)), source.start_as_current_span("a"):
        raise raised
    (span,) = kept.spans
    fault = isinstance(raised, Exception)
    assert [event.name for event in span.events] == ["exception"] * fault
    assert span.status.status_code is (StatusCode.ERROR if fault else StatusCode.UNSET)
    assert SECRET not in repr([vars(span), span.status.description, span.events])


def test_what_a_block_may_leave_to_its_caller(source: SpanSource, kept: Kept) -> None:
    options: dict[str, Any] = {"record_exception": False, "set_status_on_exception": False, "end_on_exit": False}
    with pytest.raises(ValueError), source.start_as_current_span("a", **options) as span:  # noqa: PT011
        raise ValueError
    assert kept.spans == []
    span.set_status(Status(StatusCode.OK, SECRET))
    span.set_status(StatusCode.ERROR)  # ok is final
    span.end()
    assert (kept.spans[0].status.status_code, kept.spans[0].status.description) == (StatusCode.OK, None)
    assert kept.spans[0].events == []


def test_below_a_span_that_is_not_recorded_none_is(source: SpanSource, kept: Kept) -> None:
    above = SpanContext(5, 6, is_remote=True, trace_flags=TraceFlags(0))
    span = source.start_span("a", context=trace.set_span_in_context(NonRecordingSpan(above)))
    span.set_attribute("x", 1)
    span.end()
    assert not span.is_recording()
    assert (span.get_span_context().trace_id, span.get_span_context().trace_flags) == (5, 0)
    assert kept.spans == []
