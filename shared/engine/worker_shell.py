"""What both worker roles share: beats, peers, deaths, leader's terms, tags, and the hop from the engine's threads.

A role (`services/decode`, `services/prefill`) plugs in as a `Role`. Everything here runs on the event loop, except
where it says otherwise.

Stopping, in this order:
1. the role takes no new work, and the beat says so: nothing more may arrive that would have to be thrown away;
2. what runs may end within the drain limit, then it is ended with an error: every accepted request gets an end;
3. finals are flushed: an ingress must not have to find out by a time-out;
4. the bus drains, by its owner's exit: after the flush, since it carries it;
5. the engine stops, then the pool is unlinked: last, since a peer may still pull from it until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, TypeVar

from opentelemetry.trace import Tracer, get_tracer

from shared.bus.bus import Bus, Delivery, Subscription
from shared.contracts import subjects
from shared.contracts.attempt import Attempt
from shared.contracts.errors import BatonError, Unavailable
from shared.contracts.ids import Incarnation, WorkerId
from shared.contracts.messages import Replay, SchedulerBeat, WorkerBeat
from shared.contracts.parts import AttemptOutput, AttemptProgress, KvEnd, KvLink
from shared.engine.batcher import Batcher
from shared.engine.batcher_gauges import Gauges
from shared.engine.sequence_update import SequenceUpdate
from shared.engine.stall import StallClock
from shared.engine.worker_engine import WorkerEngine, boot_id, host_name
from shared.engine.worker_fences import Fences
from shared.engine.worker_metrics import expose_engine
from shared.engine.worker_publisher import Publisher
from shared.engine.worker_tagger import Tagger
from shared.kv.place import network_of, place_of
from shared.kv.transfer import owner_lives
from shared.lifecycle.tasks import end_tasks
from shared.telemetry import metric_names as names
from shared.telemetry.metrics import Metrics

log = logging.getLogger("baton.worker")
T = TypeVar("T")

BEAT_S = 1.0
BEAT_ON_CHANGE_S = 0.05
"""Beats sent because something changed are at least this far apart."""
TICK_S = 0.25
PROBE_S = 1.0
PEER_FORGET_S = 60.0


class Role(Protocol):
    """What a worker does with its engine."""

    name: str  # prefill | decode

    def attempts(self) -> Mapping[Attempt, int]:
        """Every attempt held, queued ones too, with its computed tokens."""

    def outputs(self) -> tuple[AttemptOutput, ...]:
        """Tokens made for attempts that are held, or ended lately."""

    def take_updates(self, updates: list[SequenceUpdate]) -> None:
        """What one step changed. On the planner thread: hands over and returns."""

    def peer_beat(self, beat: WorkerBeat, progress: Mapping[Attempt, AttemptProgress], now: float) -> None:
        """Another worker's beat."""

    def revoked(self) -> tuple[Attempt, ...]:
        """Attempts held that have not begun and lack blocks: they may run elsewhere."""

    def awaited_peers(self) -> frozenset[WorkerId]:
        """Peers whose death must be seen at once."""

    def peer_died(self, worker: WorkerId) -> None:
        """An awaited peer's process is gone."""

    def tick(self, now: float) -> None:
        """Four times a second."""


@dataclass(slots=True)
class Peer:
    """Another worker, as its last beat told."""

    beat: WorkerBeat
    seen_at: float


class WorkerShell:
    """One worker on the bus. Enter it with `start`, leave it with `drain` and `stop`."""

    def __init__(
        self,
        bus: Bus,
        core: WorkerEngine,
        worker: WorkerId,
        pool: str,
        fences: Fences,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        metrics: Metrics,
        stall_s: float = 10.0,
    ) -> None:
        """`pool` is the model pool's name; the core's engine must have been started.

        `stall_s`: an engine that ended no step for so long, and for longer than its steps take, stands still.
        """
        self.metrics = metrics
        self.tracer = tracer or get_tracer("baton")
        self.bus = bus
        self.core = core
        self.worker = worker
        self.incarnation = Incarnation(time.time_ns())
        self.clock = clock
        self.draining = False
        self.stalled = False
        self._stall = StallClock(stall_s)
        self.publisher = Publisher(bus)
        self.tagger = Tagger(bus, self.publisher, core.engine, worker, self.incarnation, len(core.facts.layout.groups))
        self.peers: dict[WorkerId, Peer] = {}
        self._pool = pool
        self._fences = fences
        self._gauges: Gauges | None = None
        self._number = 0
        self._changed = asyncio.Event()
        self._host, self._boot = host_name(), boot_id()
        place, network = place_of(core.options.kv_dir, self._boot), network_of(self._boot)
        self.kv = KvEnd(place, network, transfer=core.options.transfer.transfer)  # a source adds its address
        self.links: Callable[[], tuple[KvLink, ...]] = tuple  # a sink's, for beats
        self._tasks: list[asyncio.Task[None]] = []
        self._subscriptions: list[Subscription] = []
        self._loop = asyncio.get_running_loop()

    # ------------------------------------------------------------------------------------------ life

    async def start(self, role: Role) -> None:
        """Listen, then beat: once others see the beat, they may send."""
        self._role = role
        self.core.on_updates = role.take_updates
        expose_engine(self.metrics, role.name, self.worker, self.core, lambda: self._gauges)
        self.metrics.before_scrape(self._read)
        for subject, message_type, handler in (
            (subjects.ANY_WORKER_BEAT, WorkerBeat, self._on_worker_beat),
            (subjects.sched_beat(self._pool), SchedulerBeat, self._on_scheduler_beat),
            (subjects.index_replay(self.worker), Replay, self._on_replay),
        ):
            self._subscriptions.append(await self.bus.subscribe(subject, message_type, handler))
        await self._refresh()
        self.tagger.replay()
        for loop in (self._beat_loop(), self._tick_loop(), self._probe_loop()):
            self._tasks.append(self._loop.create_task(loop))

    async def drain(self, is_idle: Callable[[], bool], limit_s: float) -> bool:
        """Refuse new work and wait for what runs, at most `limit_s`. Returns whether everything ended by itself."""
        self.draining = True
        self.changed()
        deadline = self.clock() + limit_s
        while not is_idle() and self.clock() < deadline:  # noqa: ASYNC110 - what ends is told by many places
            await asyncio.sleep(0.02)
        return is_idle()

    async def stop(self, timeout_s: float = 5.0) -> None:
        """End the shell; the caller drained it before. Blocks the event loop for no longer than a step."""
        await self.publisher.flush(timeout_s)
        await end_tasks(self._tasks)
        for subscription in self._subscriptions:
            await subscription.stop()
        await self.tagger.close()
        await self.publisher.close()
        await asyncio.to_thread(self.core.stop, timeout_s)

    # ------------------------------------------------------------------------------------------ for roles

    async def call(self, fn: Callable[[Batcher], T], *, at_once: bool = True) -> T:
        """Run `fn` on the planner thread; `at_once` as of `Engine.call`.

        Raises what it raises, and Unavailable when the engine has stopped.
        """
        return await asyncio.wrap_future(self.core.engine.call(fn, at_once=at_once))

    def post(self, fn: Callable[[Batcher], object]) -> None:
        """Like `call`, for what needs no answer. A fault is logged; nobody waits for it."""
        self.core.engine.call(fn).add_done_callback(_log_fault)

    def changed(self) -> None:
        """Blocks or attempts changed: the scheduler wants to know before the next second."""
        self._changed.set()

    def source_blocks(self, worker: WorkerId, incarnation: Incarnation) -> tuple[int, ...]:
        """Blocks per group of a peer's pool; () when its beat was not seen."""
        peer = self.peers.get(worker)
        return peer.beat.total_blocks if peer is not None and peer.beat.incarnation == incarnation else ()

    def fault(self) -> str:
        """That the engine stands still, in words; empty while it moves."""
        return f"the engine has ended no step for {self._stall.still_s:.0f} s" if self.stalled else ""

    # ------------------------------------------------------------------------------------------ inside

    def hop(self, fn: Callable[..., object], *arguments: object) -> None:
        """On any thread: call on the event loop, in the order of the calls here."""
        try:
            self._loop.call_soon_threadsafe(fn, *arguments)
        except RuntimeError:
            log.debug("the loop is closed: the process is ending")

    def _on_worker_beat(self, delivery: Delivery) -> None:
        beat: WorkerBeat = delivery.message
        if beat.worker == self.worker:
            return
        now = self.clock()
        known = self.peers.get(beat.worker)
        if known is not None and (beat.incarnation, beat.number) <= (known.beat.incarnation, known.beat.number):
            return
        self.peers[beat.worker] = Peer(beat, now)
        self._role.peer_beat(beat, {p.attempt: p for p in beat.attempts}, now)

    def _on_scheduler_beat(self, delivery: Delivery) -> None:
        beat: SchedulerBeat = delivery.message
        self._fences.see_term(beat.term)

    def _on_replay(self, delivery: Delivery) -> None:
        self.tagger.replay()

    def _read(self) -> None:
        self.metrics.set(names.RESERVATIONS, len(self._role.attempts()))
        self.metrics.total(names.BUS_DROPPED, self.publisher.lost, reason="unsent")

    async def _refresh(self, at_once: bool = True) -> None:
        with contextlib.suppress(BatonError):
            self._gauges = await self.call(lambda batcher: batcher.gauges(), at_once=at_once)
            if self._gauges.leaving:
                self.changed()  # soon; nothing else would tell of it before the next second

    async def _beat_loop(self) -> None:
        refresh: asyncio.Task[None] | None = None
        while True:
            with _Guarded("beat"):
                self.publisher.send(subjects.worker_beat(self.worker), self.beat())
            await asyncio.sleep(BEAT_ON_CHANGE_S)
            # Not wait_for: in Python 3.11 it loses a cancellation that comes with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S - BEAT_ON_CHANGE_S):
                    await self._changed.wait()
            changed = self._changed.is_set()
            self._changed.clear()
            self.tagger.pool_changed()
            # An engine that hangs must not stop the beat: its counter standing still is the news.
            if refresh is None or refresh.done():
                refresh = self._loop.create_task(self._refresh(at_once=changed))
                await asyncio.wait({refresh}, timeout=BEAT_ON_CHANGE_S)

    async def _tick_loop(self) -> None:
        look_at = 0.0
        while True:
            await asyncio.sleep(TICK_S)
            now = self.clock()
            self._look(now)
            with _Guarded("tick"):
                self._role.tick(now)
            if now >= look_at:
                look_at = now + BEAT_S
                for worker in [w for w, p in self.peers.items() if now - p.seen_at > PEER_FORGET_S]:
                    del self.peers[worker]

    def _look(self, now: float) -> None:
        stalled = self._stall.look(self.core.engine.progress, self.core.longest_step_s, now)
        if stalled != self.stalled:
            self.stalled = stalled
            log.error("%s", self.fault()) if stalled else log.warning("the engine goes on")
            self.changed()

    async def _probe_loop(self) -> None:
        """A process that dies lets go of the lock on its pool file: seen here long before its beats are missed."""
        while True:
            await asyncio.sleep(PROBE_S)
            for worker in self._role.awaited_peers():
                peer = self.peers.get(worker)
                if peer is None or peer.beat.kv.place != self.kv.place or not peer.beat.kv_pool:
                    continue
                with _Guarded("probe"):
                    if not owner_lives(self.core.options.kv_dir, peer.beat.kv_pool):
                        log.warning("worker %s is gone: its pool file has no owner", worker)
                        self._role.peer_died(worker)

    def beat(self) -> WorkerBeat:
        """The next beat."""
        self._number += 1
        progress, facts, options = self.core.engine.progress, self.core.facts, self.core.options
        gauges = self._gauges
        blocks = gauges.blocks if gauges is not None else ()
        return WorkerBeat(
            worker=self.worker,
            role=self._role.name,
            pool=self._pool,
            incarnation=self.incarnation,
            boot_id=self._boot,
            host=self._host,
            number=self._number,
            term=self._fences.term,
            free_blocks=tuple(b.available for b in blocks),
            total_blocks=facts.layout.num_blocks,
            block_sizes=tuple(g.block_size for g in facts.layout.groups),
            token_budget=options.token_budget,
            running=gauges.running if gauges is not None else 0,
            waiting=gauges.waiting if gauges is not None else 0,
            max_sequences=options.max_num_seqs,
            queue_tokens=gauges.queue_tokens if gauges is not None else 0,
            attempts=tuple(AttemptProgress(a, progress, computed) for a, computed in self._role.attempts().items()),
            step_model=self.core.step_model,
            numerics=facts.numerics,
            fingerprint=facts.fingerprint,
            model_digest=facts.model_digest,
            kv_pool=self.core.pool.path.name,
            draining=self.draining,
            fake=facts.fake,
            token_bytes=tuple(g.token_bytes for g in facts.layout.groups),
            held_back=gauges.held_back if gauges is not None else (),
            revoked=self._role.revoked(),
            outputs=self._role.outputs(),
            preemptions=gauges.preemptions if gauges is not None else 0,
            itl_target=options.itl_target,
            kv=self.kv,
            links=self.links(),
            stalled=self.stalled,
            rooms=gauges.rooms if gauges is not None else (),
            classes=options.classes,
            class_tokens=gauges.class_tokens if gauges is not None else (),
        )


class _Guarded:
    """A fault in one turn of a loop must not end the loop: the worker would fall silent."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        log.error("%s failed", self._what, exc_info=error)
        return True


def _log_fault(future: Future[object]) -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None and not isinstance(error, Unavailable):
        log.error("the batcher refused an order: %s", error, exc_info=error)
