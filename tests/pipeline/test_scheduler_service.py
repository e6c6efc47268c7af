"""The scheduler's shell on the memory bus, with workers, an index and an ingress made of a few handlers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.scheduler import place_spans, service, worker_registry
from services.scheduler.placer import TableLimits
from services.scheduler.service import SchedulerService
from services.scheduler.settings import SchedulerConfig
from shared.bus.bus import NO_RESPONDERS, Delivery
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.contracts import messages as m
from shared.contracts import subjects
from shared.contracts.attempt import Attempt
from shared.contracts.errors import Unavailable
from shared.contracts.grants import SignedGrant
from shared.contracts.ids import Incarnation, ScopeGeneration, WorkerId
from shared.contracts.message import encode
from shared.contracts.parts import AttemptProgress
from shared.telemetry import attributes as a
from tests.unit.scheduler_support import INGRESS, attempt, beat, grant, no_room, reserved, submit


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        await asyncio.sleep(0.005)


def signed(message: m.Submit, budget_s: float = 30.0) -> m.Submit:
    payload = encode(grant(message.attempt.request_id, budget_s=budget_s))
    return msgspec.structs.replace(message, grant=SignedGrant(payload, b""))


class World:
    """Everything around the scheduler. Each handler answers what the test put there."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.bus = MemoryBus(self.broker)
        self.reserves: list[m.Reserve] = []
        self.runs: list[m.PrefillRun] = []
        self.cancels: list[Attempt] = []
        self.events: list[Any] = []
        self.beats: list[m.SchedulerBeat] = []
        self.held: dict[str, list[Attempt]] = {"d1": [], "p1": []}
        self.match_delay_s = 0.0
        self.deaf_events = 0
        self.refuse: list[m.Refusal] = []
        self.beating = True
        self._number = 0

    async def start(self) -> None:
        bus = self.bus
        await bus.serve(subjects.INDEX_MATCH, m.Match, self._match)
        self.d1 = [
            await bus.serve(subjects.decode(WorkerId("d1"), "reserve"), m.Reserve, self._reserve),
            await bus.serve(subjects.decode(WorkerId("d1"), "cancel"), m.Cancel, self._cancel),
        ]
        await bus.serve(subjects.prefill(WorkerId("p1"), "run"), m.PrefillRun, self._run)
        await bus.serve(subjects.prefill(WorkerId("p1"), "cancel"), m.Cancel, self._cancel)
        await bus.serve(subjects.gateway_event(INGRESS), m.Placed | m.PlacementRefused | m.WorkerLost, self._event)
        await bus.subscribe(subjects.sched_beat("default"), m.SchedulerBeat, lambda d: self.beats.append(d.message))
        self._loop = asyncio.create_task(self._beats())

    async def stop(self) -> None:
        self._loop.cancel()
        await asyncio.gather(self._loop, return_exceptions=True)
        await self.bus.close()

    async def _beats(self) -> None:
        while True:
            self._number += 1
            for worker, role in (("d1", "decode"), ("p1", "prefill")):
                if self.beating:
                    listed = tuple(AttemptProgress(a, self._number) for a in self.held[worker])
                    message = beat(worker, role, self._number, attempts=listed)
                    await self.bus.publish(subjects.worker_beat(WorkerId(worker)), message)
            await asyncio.sleep(0.05)

    async def _match(self, delivery: Delivery) -> m.Matched:
        await asyncio.sleep(self.match_delay_s)
        return m.Matched(scope_generation=ScopeGeneration(1))

    async def _reserve(self, delivery: Delivery) -> m.Reserved | m.Refusal:
        self.reserves.append(delivery.message)
        if self.refuse:
            return self.refuse.pop()
        self.held["d1"].append(delivery.message.attempt)
        return reserved()

    async def _run(self, delivery: Delivery) -> m.PrefillAccepted:
        self.runs.append(delivery.message)
        return m.PrefillAccepted(incarnation=Incarnation(1))

    async def _cancel(self, delivery: Delivery) -> m.Cancelled:
        self.cancels.append(delivery.message.attempt)
        return m.Cancelled(held=True)

    async def _event(self, delivery: Delivery) -> m.EventsSeen:
        if self.deaf_events:
            self.deaf_events -= 1
            raise Unavailable("deaf")
        self.events.append(delivery.message)
        return m.EventsSeen(number=delivery.message.number)

    async def submit(self, message: m.Submit, **grant_changes: Any) -> m.Queued | m.Refusal:
        reply: m.Queued | m.Refusal = await self.bus.request(
            subjects.sched_submit("default"),
            signed(message, **grant_changes),
            m.Queued | m.Refusal,
            timeout_s=2.0,
        )
        return reply


def settings(name: str = "scheduler-1", *, worker_lease_s: float = 0.5, **limits: Any) -> SchedulerConfig:
    table = TableLimits(**({"gather_s": 0.15, "event_resend_s": 0.1, "no_worker_s": 0.0} | limits))
    return SchedulerConfig(
        scheduler_id=name, leader_ttl_s=1.5, tick_s=0.02, beat_s=0.1, worker_lease_s=worker_lease_s, limits=table
    )


@asynccontextmanager
async def running(**changes: Any) -> AsyncIterator[tuple[World, SchedulerService]]:
    world = World()
    await world.start()
    scheduler = SchedulerService(MemoryBus(world.broker, "scheduler"), settings(**changes))
    await scheduler.start()
    try:
        await until(lambda: scheduler.leading and len(scheduler._workers) == 2)
        yield world, scheduler
    finally:
        await scheduler.stop()
        await world.stop()


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    monkeypatch.setattr(place_spans, "tracer", tracer)
    monkeypatch.setattr(service, "tracer", tracer)
    return exporter


async def test_local_and_handed_off_end_to_end_on_one_trace(spans: InMemorySpanExporter) -> None:
    async with running() as (world, scheduler):
        with place_spans.tracer.start_as_current_span("client"):
            answer = await world.submit(submit("short", 60))
            await world.submit(submit("long", 600))
        assert isinstance(answer, m.Queued)
        await until(lambda: len(world.events) == 2)
        by_id = {e.attempt.request_id: e for e in world.events}
        assert (by_id["short"].path, by_id["long"].path) == ("local", "handed_off")
        assert [run.decode_worker for run in world.runs] == ["d1"]
        await until(lambda: scheduler.table is not None and scheduler.table.placed == 2)
        # what is placed may be taken back, and goes on on its trace; what is over is forgotten
        assert len(scheduler._spans) == 2
        world.held["d1"].clear()
        await until(lambda: len(scheduler._spans) == 0)
    done: list[ReadableSpan] = list(spans.get_finished_spans())
    assert sorted(s.name for s in done) == ["client", *["scheduler.place"] * 2, *["scheduler.submit"] * 2]
    assert len({s.context.trace_id for s in done if s.context is not None}) == 1
    place = next(s for s in done if s.attributes and s.attributes.get(a.PATH) == "handed_off")
    assert place.attributes is not None
    assert 0 < place.attributes[a.HANDED_OFF_S] < place.attributes[a.LOCAL_S]  # type: ignore[operator]
    assert {a.QUEUE_S, a.MATCHED_TOKENS, a.CANDIDATES, a.REASON} <= set(place.attributes)
    assert set(place.attributes) <= a.ALLOWED


async def test_a_refused_request_waits_in_place_and_a_never_is_told() -> None:
    async with running(refused_wait_s=0.05) as (world, _):
        world.refuse = [no_room()]
        await world.submit(submit("waits"))
        await until(lambda: len(world.events) == 1)
        assert [r.attempt for r in world.reserves] == [attempt("waits", 1, 1), attempt("waits", 1, 2)]
        world.refuse = [no_room("ContextExceeded/pool", never=True)]
        await world.submit(submit("never"))
        await until(lambda: len(world.events) == 2)
        assert world.events[1].error.code == "ContextExceeded/pool"


async def test_events_are_resent_until_seen() -> None:
    async with running() as (world, scheduler):
        world.deaf_events = 2
        await world.submit(submit("r"))
        await until(lambda: len(world.events) == 1)
        await until(lambda: scheduler.table is not None and scheduler.table.unseen_events == 0)


async def test_a_slow_index_counts_as_no_match() -> None:
    async with running() as (world, scheduler):
        world.match_delay_s = 0.6
        await world.submit(submit("r"))
        await until(lambda: len(world.events) == 1, timeout_s=0.5)
        assert scheduler.match_timeouts == 1


async def test_a_silent_worker_is_lost_and_queued_work_ends_with_its_budget() -> None:
    async with running() as (world, scheduler):
        await world.submit(submit("r"))
        await until(lambda: len(world.events) == 1)
        world.beating = False
        await until(lambda: len(world.events) == 2)
        assert isinstance(world.events[1], m.WorkerLost)
        refused = await world.submit(submit("new"))
        assert isinstance(refused, m.Refusal)
        resumed = msgspec.structs.replace(submit("resumed", epoch=2), num_prompt_tokens=1)  # its client has tokens
        await world.submit(resumed, budget_s=0.3)
        await until(lambda: len(world.events) == 3)
        assert world.events[2].error.code == "DeadlineExceeded/deadline_exceeded"
        assert scheduler.table is not None
        assert scheduler.table.queued == 0


async def test_a_dead_worker_is_found_by_asking_long_before_its_lease_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_registry, "QUIET_S", 0.2)
    monkeypatch.setattr(worker_registry, "ASK_EVERY_S", 0.1)
    async with running(worker_lease_s=60.0) as (world, scheduler):
        await world.submit(submit("r"))
        await until(lambda: len(world.events) == 1)
        world.beating = False  # frozen: both still answer, and are not lost by it
        await until(lambda: len(world.cancels) >= 4)
        assert set(world.cancels) == {service.NO_ATTEMPT}
        assert len(scheduler._workers) == 2
        for subscription in world.d1:  # dead: nobody listens
            await subscription.stop()
        await until(lambda: len(world.events) == 2, timeout_s=1.0)
        assert isinstance(world.events[1], m.WorkerLost)
        assert (world.events[1].worker, world.events[1].reason) == ("d1", "gone")
        assert [view.worker for view in scheduler._workers.views()] == ["p1"]
        assert isinstance(await world.submit(submit("new")), m.Refusal)  # no decode worker is up


async def test_a_leader_that_cannot_be_reached_gives_its_term_up_and_tries_again() -> None:
    world = World()
    await world.start()
    bus = MemoryBus(world.broker, "scheduler")
    serve, failures = bus.serve, 1

    async def failing(*args: Any, **more: Any) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise Unavailable("the connection was lost just now")
        return await serve(*args, **more)

    bus.serve = failing  # type: ignore[method-assign]
    scheduler = SchedulerService(bus, settings())
    await scheduler.start()
    try:
        await until(lambda: scheduler.leading and scheduler._serving is not None)
        assert isinstance(await world.submit(submit("r")), m.Queued)
        assert world.beats[0].term > 1
    finally:
        await scheduler.stop()
        await world.stop()


async def test_a_leader_that_ends_while_it_begins_leaves_nothing_behind() -> None:
    """Stepping up waits for the bus; a higher term seen meanwhile must not leave its submits served by nobody."""
    world = World()
    await world.start()
    bus = MemoryBus(world.broker, "scheduler")
    serve, asked, go_on = bus.serve, asyncio.Event(), asyncio.Event()

    async def slow(*args: Any, **more: Any) -> Any:
        asked.set()
        await go_on.wait()
        return await serve(*args, **more)

    bus.serve = slow  # type: ignore[method-assign]
    scheduler = SchedulerService(bus, settings())
    await scheduler.start()
    try:
        await asked.wait()
        stranger = m.SchedulerBeat(pool="default", term=99, scheduler_id="x")  # type: ignore[arg-type]
        await world.bus.publish(subjects.sched_beat("default"), stranger)
        await until(lambda: scheduler._leadership.term is None)
        go_on.set()
        await until(lambda: not scheduler.leading)
        with pytest.raises(Unavailable) as caught:
            await world.submit(submit("r"))
        assert caught.value.code == NO_RESPONDERS
    finally:
        await scheduler.stop()
        await world.stop()


async def test_a_standby_takes_over_adopts_and_places_the_rest() -> None:
    async with running() as (world, first):
        second = SchedulerService(MemoryBus(world.broker, "scheduler"), settings("scheduler-2"))
        await second.start()
        try:
            await world.submit(submit("held"))
            await until(lambda: len(world.events) == 1)
            assert not second.leading
            await first.stop()
            await until(lambda: second.leading)
            await until(lambda: world.beats[-1].scheduler_id == "scheduler-2")
            assert world.beats[-1].term > world.beats[0].term
            world.refuse = []
            for name in ("held", "rest"):  # what an ingress does at a new term
                answer = await world.submit(submit(name, age_s=1.0))
                assert isinstance(answer, m.Queued)
                assert answer.term == world.beats[-1].term
            await until(lambda: len(world.events) == 3)
            by_id = {e.attempt.request_id: e for e in world.events[1:]}
            assert (by_id["held"].reason, by_id["held"].attempt) == ("adopted", attempt("held", 1, 1))
            assert by_id["rest"].attempt.dispatch == (1 << 16) + 1
            assert world.cancels == []
        finally:
            await second.stop()


async def test_a_leader_steps_down_when_it_sees_a_higher_term() -> None:
    async with running() as (world, scheduler):
        stranger = m.SchedulerBeat(pool="default", term=99, scheduler_id="x")  # type: ignore[arg-type]
        await world.bus.publish(subjects.sched_beat("default"), stranger)
        await until(lambda: not scheduler.leading)


def test_it_starts_without_torch_and_in_about_a_second() -> None:
    code = "import sys, services.scheduler.service; assert not {'torch', 'transformers'} & set(sys.modules)"
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
    assert time.monotonic() - started < 10
