"""Spans: redaction, the lossy queue, the trace buffer, token timings."""

from __future__ import annotations

import asyncio

from opentelemetry import trace

from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.contracts import subjects
from shared.contracts.message import encode
from shared.contracts.messages import SpanBatch
from shared.contracts.parts import SpanRecord
from shared.telemetry import attributes as a
from shared.telemetry.setup import SpanQueue, Telemetry, setup_telemetry
from shared.telemetry.token_timings import TokenTimings
from shared.telemetry.trace_buffer import ROOT, TraceBuffer

SECRET = "my prompt about whales"


def span(trace_id: str, name: str = ROOT, span_id: str = "1", **attributes: str | int | float | bool) -> SpanRecord:
    return SpanRecord(trace_id, span_id, "", name, "gateway", 1_000_000_000, 2_000_000_000, "", attributes)


def test_no_prompt_text_can_get_in() -> None:
    telemetry = Telemetry("gateway", None)
    try:
        with telemetry.tracer.start_as_current_span(f"gateway {SECRET}") as current:
            current.set_attribute("prompt", SECRET)
            current.set_attribute("gen_ai.prompt", [SECRET])
            current.set_attribute(a.PROMPT_TOKENS, 5)
            current.add_event(SECRET, {"text": SECRET})
            raise ValueError(SECRET)
    except ValueError:
        pass
    (record,) = telemetry.queue.take()
    assert SECRET.encode() not in encode(record)
    assert record.attributes == {a.PROMPT_TOKENS: 5}
    assert record.status == "error"
    assert record.name == "other"


def test_long_values_of_allowed_attributes_are_cut() -> None:
    telemetry = Telemetry("gateway", None)
    with telemetry.tracer.start_as_current_span("gateway.request") as current:
        current.set_attribute(a.REASON, "x" * 10_000)
    assert len(str(telemetry.queue.take()[0].attributes[a.REASON])) == 120


def test_the_queue_is_bounded_and_counts() -> None:
    telemetry = Telemetry("decode", None)
    telemetry.queue = queue = SpanQueue("decode", capacity=3)
    telemetry.provider.add_span_processor(queue)
    for _ in range(5):
        telemetry.tracer.start_span("decode.run").end()
    assert queue.ended == 5
    assert len(queue.take()) == 3


async def test_spans_travel_over_the_bus_with_their_parents() -> None:
    broker = MemoryBroker()
    taken: list[SpanRecord] = []
    bus = MemoryBus(broker, "gateway")
    await bus.subscribe(subjects.ANY_TRACE, SpanBatch, lambda delivery: taken.extend(delivery.message.spans))
    async with Telemetry("scheduler", bus) as telemetry:
        with (
            telemetry.tracer.start_as_current_span("scheduler.submit") as parent,
            telemetry.tracer.start_as_current_span("scheduler.place"),
        ):
            pass
    await asyncio.sleep(0.01)
    assert [record.name for record in taken] == ["scheduler.place", "scheduler.submit"]
    assert taken[0].parent_id == f"{parent.get_span_context().span_id:016x}"
    await bus.close()


async def test_spans_of_any_thread_are_sent_while_the_service_goes_on() -> None:
    broker = MemoryBroker()
    taken: list[SpanRecord] = []
    bus = MemoryBus(broker, "gateway")
    await bus.subscribe(subjects.ANY_TRACE, SpanBatch, lambda delivery: taken.extend(delivery.message.spans))

    async def until(count: int) -> None:
        async with asyncio.timeout(30):
            while len(taken) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async with Telemetry("scheduler", bus) as telemetry:

        def end_some() -> None:
            for _ in range(20):
                telemetry.tracer.start_span("scheduler.place").end()

        end_some()
        await until(20)
        await asyncio.gather(*(asyncio.to_thread(end_some) for _ in range(4)))
        await until(100)
        assert telemetry.queue.ended == 100
    await bus.close()


def test_setup_makes_the_first_provider_global() -> None:
    setup_telemetry("gateway")
    assert isinstance(trace.get_tracer_provider(), object)
    assert setup_telemetry("policy").tracer is not None


def test_the_buffer_is_bounded_by_bytes_and_drops_the_oldest() -> None:
    buffer = TraceBuffer(max_bytes=5_000)
    for number in range(20):
        buffer.add([span(f"{number:032x}", **{a.REQUEST_ID: f"req-{number:04d}abcd"})])
    assert len(buffer) < 10
    assert buffer.get(f"{0:032x}") == []
    assert buffer.get("req-0019abcd")[0].trace_id == f"{19:032x}"
    assert buffer.get("0019ab")[0].trace_id == f"{19:032x}"
    assert [s.request_id for s in buffer.recent(2)] == ["req-0019abcd", "req-0018abcd"]


def test_a_tenant_finds_its_own_traces_only() -> None:
    # Given traces of two tenants whose ids begin alike, and one whose root has not come
    buffer = TraceBuffer()
    ours, theirs, unknown = "ab" + "1" * 30, "ab" + "2" * 30, "ab" + "3" * 30
    buffer.add([span(ours, **{a.TENANT: "a", a.REQUEST_ID: "req-cc01"})])
    buffer.add([span(theirs, **{a.TENANT: "b", a.REQUEST_ID: "req-cc02"})])
    buffer.add([span(unknown, "policy.admit", **{a.TENANT: "a"})])
    # Then each tenant sees its own, and the others' do not even make a beginning ambiguous
    assert [s.trace_id for s in buffer.recent(tenant="a")] == [ours]
    assert [s.trace_id for s in buffer.recent(tenant="b")] == [theirs]
    assert buffer.recent(tenant="c") == []
    for name in (theirs, unknown, "req-cc02", "ab22", "cc02", "ab33"):
        assert buffer.get(name, "a") == [], name
    for name in (ours, "req-cc01", "cc01", "ab11", "req-cc"):
        assert [s.trace_id for s in buffer.get(name, "a")] == [ours], name
    assert buffer.get("req-cc") == []
    assert len(buffer.recent()) == 2
    # And an admin finds all
    assert buffer.get(unknown)[0].name == "policy.admit"


def test_only_who_took_a_request_says_whose_its_trace_is() -> None:
    # Given another service's span that calls itself the root
    buffer = TraceBuffer()
    forged = SpanRecord("f" * 32, "1", "", ROOT, "decode", 1, 2, "", {a.TENANT: "b", a.REQUEST_ID: "req-ff"})
    buffer.add([forged])
    # Then nobody owns the trace, and it is no request
    assert buffer.recent() == []
    assert buffer.get("f" * 32, "b") == []
    assert buffer.get("req-ff") == []
    # But an item of a batch is a request, by the batch service's word
    item = SpanRecord("e" * 32, "1", "", "batch.item", "batch", 1, 2, "", {a.TENANT: "b", a.REQUEST_ID: "req-ee"})
    buffer.add([item])
    assert [s.request_id for s in buffer.recent(tenant="b")] == ["req-ee"]


def test_a_summary_takes_the_path_from_whoever_knows_it() -> None:
    buffer = TraceBuffer()
    buffer.add([span("t" * 32, "scheduler.place", "2", **{a.PATH: "handed_off"})])
    assert buffer.recent() == []
    buffer.add([span("t" * 32, **{a.MODEL: "m", a.TTFT_S: 0.5})])
    (summary,) = buffer.recent()
    assert (summary.path, summary.model, summary.ttft_s, summary.total_s) == ("handed_off", "m", 0.5, 1.0)


def test_token_timings() -> None:
    timings = TokenTimings(10.0)
    assert timings.summary() == {}
    timings.add(10.5, 1)
    timings.add(10.7, 2)
    timings.add(11.7, 1)
    summary = timings.summary()
    assert timings.count == 4
    assert round(summary[a.TTFT_S], 6) == 0.5
    assert round(summary[a.ITL_P50_S], 6) == 0.1
    assert round(summary[a.ITL_MAX_S], 6) == 1.0
