"""A tenant's retention ends what it stored, as far as that was to be kept longer."""

from __future__ import annotations

import pytest

from shared.contracts.parts import SpanRecord
from shared.security.keeping import kept_s
from shared.telemetry import attributes as a
from shared.telemetry.trace_buffer import ROOT, TraceBuffer


@pytest.mark.parametrize(
    ("seconds", "retention_s", "kept"),
    [
        (86400, -1, 86400),
        (0, -1, 0),  # until it is deleted
        (86400, 3600, 3600),
        (600, 3600, 600),
        (0, 3600, 3600),
        (86400, 0, 60),  # it must be there long enough to be fetched
        (30, 0, 30),
    ],
)
def test_the_shorter_holds(seconds: int, retention_s: int, kept: int) -> None:
    assert kept_s(seconds, retention_s) == kept


def root(trace_id: str, tenant: str, end_s: int, **granted: str | int) -> SpanRecord:
    attributes = {a.TENANT: tenant, a.REQUEST_ID: f"req-{trace_id}"}
    attributes |= {a.CLASS: "batch", **{f"baton.{name}": value for name, value in granted.items()}} if granted else {}
    return SpanRecord(
        trace_id=trace_id,
        span_id=f"s-{trace_id}",
        parent_id="",
        name=ROOT,
        service="gateway",
        start_ns=0,
        end_ns=end_s * 10**9,
        attributes=attributes,
    )


def test_traces_of_a_tenant_are_forgotten_by_age_or_all_of_them() -> None:
    traces = TraceBuffer()
    traces.add([root("t1", "a", 10), root("t2", "a", 20), root("t3", "b", 10)])
    assert traces.expire(10**18) == 0  # nobody has a retention
    traces.note_retention("a", 100)
    assert traces.expire(115 * 10**9) == 1
    assert [found.trace_id for found in traces.recent()] == ["t3", "t2"]
    assert traces.get("req-t1") == []
    assert traces.forget("a") == 1
    assert [found.trace_id for found in traces.recent()] == ["t3"]
    assert len(traces) == 1


def test_traces_of_a_tenant_without_http_requests_end_with_the_retention_their_roots_tell() -> None:
    """A tenant of the queue authenticates at no gateway."""
    traces = TraceBuffer()
    traces.add([root("t1", "a", 10, retention_s=300), root("t2", "b", 10, retention_s=3000), root("t3", "c", 10)])
    assert traces.expire(400 * 10**9) == 1
    traces.add([root("t4", "b", 20, retention_s=100)])  # policy has lowered it
    assert traces.expire(400 * 10**9) == 2
    traces.add([root("t5", "a", 10), root("t6", "a", 11, klass="batch")])  # refused; granted without one
    assert traces.expire(10**18) == 0
    assert {found.trace_id for found in traces.recent()} == {"t3", "t5", "t6"}
