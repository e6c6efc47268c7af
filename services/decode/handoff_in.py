"""The shell around hand-off sinks: runs their pulls in transfer threads and carries their effects out.

Pulls through mapped memory share one thread, as they share the memory's bandwidth. Pulls over TCP have one a peer, so
that a peer that is slow or gone holds up nobody else's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from opentelemetry.trace import Status, StatusCode

from services.decode.held import Held
from shared.contracts import subjects
from shared.contracts.ids import Incarnation, WorkerId
from shared.engine.batcher import Batcher
from shared.engine.worker_shell import WorkerShell
from shared.kv.handoff import Closed, Pull, Received, SendAck, SendRelease, Sink, SinkEffect, TurnLocal
from shared.kv.pull_rates import PullRates
from shared.kv.transfer import UNREADABLE, PullResult, Transport
from shared.kv.transfer_path import TCP, transfer_path
from shared.kv.transfer_wire import TIMED_OUT, UNREACHABLE
from shared.telemetry import attributes as a
from shared.telemetry import metric_names as names

log = logging.getLogger("baton.decode")

MAPPED = ""
"""The lane of pulls through mapped memory; others are named after their source."""
OUT_OF_REACH = (UNREADABLE, UNREACHABLE, TIMED_OUT)
"""Heads of errors of the way to a peer. One that closes a connection it served before may only have ended a lease."""

NO_FAULTS = ("", "closed", "placed_locally", "prefill_failed")
"""Heads of reasons that are no fault of the hand-off's own; of a prefill that failed, its own span tells."""


@dataclass(frozen=True, slots=True)
class _Lost:
    """A peer's pull that failed for want of a way to it."""

    incarnation: Incarnation
    at: float  # on the monotonic clock
    result: PullResult


class HandoffIn:
    """Fills reservations. Runs on the event loop.

    Args:
        settled: called with a request whose KV is no longer awaited: all of it came, or it goes on locally.
    """

    def __init__(self, shell: WorkerShell, transport: Transport, settled: Callable[[Held], None]) -> None:
        self._shell = shell
        self._transport = transport
        self._settled = settled
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._lost: dict[WorkerId, _Lost] = {}  # the newest of each; written by transfer threads
        self.rates = PullRates()
        shell.links = lambda: self.rates.links(shell.clock())
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def apply(self, held: Held, effects: Iterable[SinkEffect]) -> None:
        """Carry out a sink's effects, in order."""
        for effect in effects:
            match effect:
                case Pull():
                    task = asyncio.get_running_loop().create_task(self._pull(held, effect))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                case SendAck(source, message):
                    self._shell.publisher.send(subjects.handoff(source, "ack"), message, held.context)
                case SendRelease(source, release):
                    self._shell.publisher.send(subjects.handoff(source, "release"), release, held.context)
                case Received(_, num_tokens, done):
                    if done:
                        self._run_from(held, num_tokens, "")
                case TurnLocal(_, num_tokens, reason, _):
                    words = "%s goes on locally from token %d: %s"
                    log.info(words, held.attempt.request_id, num_tokens, reason, extra={"span": held.span})
                    self._run_from(held, num_tokens, reason)
                case Closed():
                    self._count(held, "closed")
                    self._end_span(held, "closed")
                    self._unpin(held)

    def drop_dead_peers(self) -> None:
        """Give the memory of pools back whose owners are gone. Call it now and then."""
        if self._closed:
            return
        self._thread(MAPPED).submit(self._transport.drop_dead).add_done_callback(_log_fault)
        for lane in [lane for lane in self._threads if lane != MAPPED and lane not in self._shell.peers]:
            self._threads.pop(lane).shutdown(wait=False)
        for peer in [peer for peer in list(self._lost) if peer not in self._shell.peers]:
            self._lost.pop(peer, None)

    async def close(self) -> None:
        """Wait for the pulls in flight, then let go of every peer."""
        self._closed = True
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for thread in self._threads.values():
            await asyncio.to_thread(thread.shutdown, True)
        self._transport.close()

    def _thread(self, lane: str) -> ThreadPoolExecutor:
        thread = self._threads.get(lane)
        if thread is None:
            thread = self._threads[lane] = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-transfer")
        return thread

    async def _pull(self, held: Held, pull: Pull) -> None:
        stats = held.pulls
        if stats.span is None:
            stats.span = self._shell.tracer.start_span("handoff.pull", context=held.context)
        tables = tuple(table.block_ids for table in held.tables)
        asked_at, copied_s = self._shell.clock(), 0.0
        blocks = self._shell.source_blocks(pull.source, pull.source_incarnation)
        lane = str(pull.source) if transfer_path(self._shell.kv, pull.kv) == TCP else MAPPED
        try:
            result, copied_s = await asyncio.get_running_loop().run_in_executor(
                self._thread(lane), self._in_turn, held.sink, pull, tables, blocks, time.monotonic()
            )
        except Exception as exc:
            # A sink waits for every pull's answer before it lets go of its blocks.
            log.exception("a pull for %s failed", held.attempt.request_id, extra={"span": held.span})
            result = PullResult(error=f"pull_failed: {type(exc).__name__}")
        self._note(pull, result, copied_s)
        stats.seconds += copied_s
        stats.queued_s += max(0.0, self._shell.clock() - asked_at - copied_s)
        stats.path = result.path or stats.path
        stats.num_bytes += result.num_bytes
        self._shell.metrics.inc(names.HANDOFF_BYTES, result.num_bytes)
        stats.blocks += len(pull.items) - len(result.bad) if not result.error else 0
        stats.mismatches += len(result.bad)
        if held.sink is not None:
            self.apply(held, held.sink.pulled(pull.ticket, result.bad, result.error))

    def _in_turn(
        self,
        sink: Sink | None,
        pull: Pull,
        tables: Sequence[Sequence[int]],
        blocks: tuple[int, ...],
        queued_at: float,
    ) -> tuple[PullResult, float]:
        """In a transfer thread: the pull's result, and the seconds it took once its turn had come.

        It is not made when nobody wants it any more, or when the peer failed one while it waited: each of those that
        wait would take a whole time-out, and holds its blocks as long.
        """
        if sink is not None and not sink.waiting:
            return PullResult(error="not_wanted"), 0.0
        lost = self._lost.get(pull.source)
        if lost is not None and lost.at >= queued_at and lost.incarnation == pull.source_incarnation:
            return lost.result, 0.0
        started = time.perf_counter()
        result = self._transport.pull(pull, tables, blocks)
        if _is_out_of_reach(result):
            self._lost[pull.source] = _Lost(pull.source_incarnation, time.monotonic(), result)
        return result, time.perf_counter() - started

    def _note(self, pull: Pull, result: PullResult, seconds: float) -> None:
        """What the pull tells of its way, for the next placements."""
        if _is_out_of_reach(result):
            self.rates.failed(pull.source, result.path, self._shell.clock())
        elif result.num_bytes:
            self.rates.came(pull.source, result.path, result.num_bytes, seconds, self._shell.clock())

    def _run_from(self, held: Held, num_tokens: int, reason: str) -> None:
        """Let the sequence run on the KV of [0, num_tokens); what is missing it computes itself."""
        seq_id = held.choices[0].seq_id

        def release(batcher: Batcher) -> None:
            batcher.kv_received(seq_id, num_tokens)
            batcher.release(seq_id)

        self._shell.post(release)
        self._count(held, "local" if reason else "done", reason)
        held.local_reason = reason
        held.kv_ready_at = self._shell.clock()
        self._end_span(held, reason)
        self._unpin(held)
        self._settled(held)

    def _count(self, held: Held, outcome: str, reason: str = "") -> None:
        """Enter a hand-off that is over; `reason` may have details behind a colon."""
        if held.pulls.counted:
            return
        held.pulls.counted = True
        metrics = self._shell.metrics
        metrics.inc(names.HANDOFFS, outcome=outcome)
        if outcome == "local":
            metrics.inc(names.HANDOFF_FAILURES, reason=reason.partition(":")[0])
        if held.pulls.num_bytes:
            metrics.observe(names.HANDOFF_SECONDS, held.pulls.seconds)

    def _unpin(self, held: Held) -> None:
        if held.pinned:
            held.pinned = False
            seq_id = held.choices[0].seq_id
            self._shell.post(lambda batcher: batcher.unpin(seq_id))

    def _end_span(self, held: Held, reason: str) -> None:
        stats, failed = held.pulls, reason.partition(":")[0] not in NO_FAULTS
        if stats.span is None:
            if not failed:
                return
            stats.span = self._shell.tracer.start_span("handoff.pull", context=held.context)
        if failed:
            stats.span.set_status(Status(StatusCode.ERROR))
        stats.span.set_attributes(
            {
                a.BYTES: stats.num_bytes,
                a.BLOCKS: stats.blocks,
                a.COPY_S: stats.seconds,
                a.PREFILL_WORKER: str(held.reserve.prefill_worker),
                a.REASON: reason,
                a.MISMATCHES: stats.mismatches,
                a.QUEUE_S: stats.queued_s,
                a.TRANSPORT: stats.path or self._transport.path,
            }
        )
        stats.span.end()
        stats.span = None


def _is_out_of_reach(result: PullResult) -> bool:
    return result.error.partition(":")[0] in OUT_OF_REACH


def _log_fault(future: Future[None]) -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None:
        log.error("peers that are gone could not be let go of: %s", error, exc_info=error)
