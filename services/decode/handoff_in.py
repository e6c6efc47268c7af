"""The shell around hand-off sinks: runs their pulls in one transfer thread and carries their effects out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from services.decode.held import Held
from shared.contracts import subjects
from shared.engine.batcher import Batcher
from shared.engine.worker_shell import WorkerShell
from shared.kv.handoff import Closed, Pull, Received, SendAck, SendRelease, SinkEffect, TurnLocal
from shared.kv.transfer import PullResult, Transport
from shared.telemetry import attributes as a
from shared.telemetry import metric_names as names

log = logging.getLogger("baton.decode")


class HandoffIn:
    """Fills reservations. Runs on the event loop.

    Args:
        settled: called with a request whose KV is no longer awaited: all of it came, or it goes on locally.
    """

    def __init__(self, shell: WorkerShell, transport: Transport, settled: Callable[[Held], None]) -> None:
        self._shell = shell
        self._transport = transport
        self._settled = settled
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-transfer")
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
        if not self._closed:
            self._thread.submit(self._transport.drop_dead).add_done_callback(_log_fault)

    async def close(self) -> None:
        """Wait for the pull in flight, then let go of every peer."""
        self._closed = True
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._thread.shutdown, True)
        self._transport.close()

    async def _pull(self, held: Held, pull: Pull) -> None:
        stats = held.pulls
        if stats.span is None:
            stats.span = self._shell.tracer.start_span("handoff.pull", context=held.context)
        tables = tuple(table.block_ids for table in held.tables)
        started = self._shell.clock()
        blocks = self._shell.source_blocks(pull.source, pull.source_incarnation)
        try:
            result = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._transport.pull, pull, tables, blocks
            )
        except Exception as exc:
            # A sink waits for every pull's answer before it lets go of its blocks.
            log.exception("a pull for %s failed", held.attempt.request_id, extra={"span": held.span})
            result = PullResult(error=f"pull_failed: {type(exc).__name__}")
        stats.seconds += self._shell.clock() - started
        stats.num_bytes += result.num_bytes
        self._shell.metrics.inc(names.HANDOFF_BYTES, result.num_bytes)
        stats.blocks += len(pull.items) - len(result.bad) if not result.error else 0
        stats.mismatches += len(result.bad)
        if held.sink is not None:
            self.apply(held, held.sink.pulled(pull.ticket, result.bad, result.error))

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
        stats = held.pulls
        if stats.span is None:
            return
        stats.span.set_attributes(
            {
                a.BYTES: stats.num_bytes,
                a.BLOCKS: stats.blocks,
                a.COPY_S: stats.seconds,
                a.PREFILL_WORKER: str(held.reserve.prefill_worker),
                a.REASON: reason,
                a.MISMATCHES: stats.mismatches,
                a.TRANSPORT: self._transport.path,
            }
        )
        stats.span.end()
        stats.span = None


def _log_fault(future: Future[None]) -> None:
    error = None if future.cancelled() else future.exception()
    if error is not None:
        log.error("peers that are gone could not be let go of: %s", error, exc_info=error)
