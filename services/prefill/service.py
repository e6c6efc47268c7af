"""A prefill worker: computes the KV of prompts without their last token and hands the blocks over as they finish.

`source_table` decides which attempts live and when blocks may go, the batcher what is computed; this file carries news
between them and the bus.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from services.prefill.admission import as_refusal, require_sane
from services.prefill.run import Run
from services.prefill.source_table import SourceTable
from shared.bus.bus import Delivery, Subscription
from shared.contracts import messages as m
from shared.contracts import subjects
from shared.contracts.attempt import Attempt
from shared.contracts.errors import (
    PURGED,
    WORKER_STOPPING,
    BatonError,
    Conflict,
    Internal,
    Overloaded,
    to_wire,
)
from shared.contracts.grants import Grant, Scope, SignedGrant
from shared.contracts.ids import BlockGeneration, RequestId, WorkerId
from shared.contracts.parts import AttemptOutput, AttemptProgress, BlockRef
from shared.contracts.sampling import SamplingParams
from shared.contracts.tokens import unpack_tokens
from shared.engine.batcher import Reservation
from shared.engine.block_room import NeverFits
from shared.engine.sequence_spec import SequenceSpec
from shared.engine.sequence_update import ERROR, SequenceUpdate
from shared.engine.worker_fences import Fences
from shared.engine.worker_metrics import count_refusal
from shared.engine.worker_purges import carry_out
from shared.engine.worker_shell import WorkerShell
from shared.kv.handoff import Free, SendCommit, Source, SourceEffect, SourceIdentity
from shared.kv.transfer_server import TransferServer
from shared.security.generations import purged
from shared.security.purge_orders import PurgeOrders
from shared.telemetry import attributes as a
from shared.telemetry import metric_names as names

log = logging.getLogger("baton.prefill")

NO_SAMPLING = SamplingParams(max_tokens=1)
LEASE_ENDS = ("lease", "decode_died", "decode_restarted")
"""Why a source is freed when its decode worker no longer renews it."""
VerifyGrant = Callable[[SignedGrant], Grant]


class PrefillWorker:
    """One prefill worker on the bus. Use as `await start()` … `await stop(limit_s)`."""

    name = "prefill"

    def __init__(
        self, shell: WorkerShell, fences: Fences, verify_grant: VerifyGrant, server: TransferServer | None = None
    ) -> None:
        """`fences` is the shell's. `verify_grant` raises Forbidden for what policy did not sign. `server` lets decode
        workers read blocks over TCP; it is stopped with the worker."""
        facts = shell.core.facts
        self.shell = shell
        self.table = SourceTable(fences)
        self._verify = verify_grant
        self.purges = PurgeOrders(shell.bus, self.name, shell.worker, self._purge)
        self._server = server
        self._identity = SourceIdentity(
            shell.worker,
            shell.incarnation,
            facts.fingerprint,
            shell.core.pool.path.name,
            tuple(group.block_size for group in facts.layout.groups),
            shell.kv,
        )
        self._runs: dict[RequestId, Run] = {}
        self._by_seq: dict[str, Run] = {}
        self._numbers = itertools.count(1)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-digest")
        self._tasks: set[asyncio.Task[None]] = set()
        self._subscriptions: list[Subscription] = []

    # ------------------------------------------------------------------------------------------ life

    async def start(self) -> None:
        """Serve; acks and beats are subscribed before the first run can be accepted."""
        bus, worker = self.shell.bus, self.shell.worker
        self._subscriptions = [
            await bus.subscribe(subjects.handoff(worker, "ack"), m.HandoffAck, self._on_ack),
            await bus.subscribe(subjects.handoff(worker, "release"), m.HandoffRelease, self._on_release),
            await bus.serve(subjects.prefill(worker, "run"), m.PrefillRun, self._on_run),
            await bus.serve(subjects.prefill(worker, "cancel"), m.Cancel, self._on_cancel),
        ]
        await self.purges.start()
        await self.shell.start(self)

    async def stop(self, limit_s: float) -> None:
        """Stop in the order `worker_shell` gives reasons for. Decode workers go on alone from what they pulled."""
        if not await self.shell.drain(lambda: len(self.table) == 0, limit_s):
            error = Overloaded("the prefill worker was stopped", code=WORKER_STOPPING)
            for run in list(self._runs.values()):
                self._apply([run.fail(error, self.shell.clock())])
                self._apply(self.table.cancel(run.source.attempt, "stopping"))
        for subscription in self._subscriptions:
            await subscription.stop()
        await self.purges.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._thread.shutdown, True)
        if self._server is not None:  # before the pool goes, which its threads read
            await asyncio.to_thread(self._server.stop)
        await self.shell.stop()

    # ------------------------------------------------------------------------------------------ requests

    async def _on_run(self, delivery: Delivery) -> m.PrefillAccepted | m.Refusal:
        answer = await self._answer(delivery)
        if isinstance(answer, m.Refusal):
            count_refusal(self.shell.metrics, answer)
        return answer

    async def _answer(self, delivery: Delivery) -> m.PrefillAccepted | m.Refusal:
        message: m.PrefillRun = delivery.message
        token_ids = tuple(unpack_tokens(message.token_ids))
        try:
            grant = self._verify(message.grant)
            self.purges.generations.require_live(grant.scope)
            require_sane(message, grant, token_ids, self.shell.core.facts.max_positions)
        except BatonError as exc:
            return m.Refusal(error=to_wire(exc), never=True)
        if self.shell.draining:
            return m.Refusal(error=to_wire(Overloaded("the worker is stopping", retry_after_s=1.0)))
        known = self._runs.get(message.attempt.request_id)
        if known is not None and known.source.attempt == message.attempt and known.reservation is not None:
            return self._accepted(known)
        reason = self.table.refuses(message.attempt, message.term)
        if reason or (known is not None and known.source.attempt == message.attempt):
            error = Conflict("a newer attempt or leader was seen", code=reason or "already_starting")
            return m.Refusal(error=to_wire(error))
        return await self._open(message, grant, token_ids, delivery)

    async def _open(
        self, message: m.PrefillRun, grant: Grant, token_ids: tuple[int, ...], delivery: Delivery
    ) -> m.PrefillAccepted | m.Refusal:
        run = self._register(message, grant.scope, len(token_ids), delivery)
        tags = tuple(g.tags for g in sorted(message.tags, key=lambda g: g.group))
        if grant.retention_s != 0:
            self.shell.tagger.chains.open(run.seq_id, message.attempt, message.grant, message.tags, token_ids)
        try:
            spec = SequenceSpec(
                seq_id=run.seq_id,
                token_ids=token_ids,
                num_prompt_tokens=len(token_ids),
                sampling=NO_SAMPLING,
                tags=tags,
                tenant=grant.tenant,
                weight=grant.weight,
                klass=grant.klass,
                retention_s=grant.retention_s,
                scope_generation=grant.scope.generation,
                compute_only=True,
            )
            run.reservation = await self.shell.call(lambda batcher: batcher.reserve(spec))
        except Exception as exc:
            self.table.withdraw(message.attempt)
            self._drop(run, "refused")
            return m.Refusal(error=to_wire(as_refusal(exc)), never=isinstance(exc, NeverFits))
        self.shell.changed()
        self.shell.metrics.inc(names.PREFIX_QUERIES, len(token_ids))
        self.shell.metrics.inc(names.PREFIX_HITS, run.reservation.num_cached_tokens)
        if run.source.freed:
            return m.Refusal(error=to_wire(Conflict("cancelled while being started", code="cancelled")))
        run.computed = max(run.computed, run.reservation.num_cached_tokens)
        self._name_what_is_due(run)
        if run.ended:  # all of it was cached, so the end was told before the reservation
            self._end_span(run)
        return self._accepted(run)

    def _register(self, message: m.PrefillRun, scope: Scope, num_tokens: int, delivery: Delivery) -> Run:
        """Known from here on, so that news that overtakes the planner's answer finds it."""
        now = self.shell.clock()
        source = Source(
            self._identity,
            message.attempt,
            message.decode_worker,
            message.decode_incarnation,
            message.lease_token,
            message.first_token,
            num_tokens,
            message.lease_s,
            now,
        )
        run = Run(
            seq_id=f"{message.attempt.request_id}/p{next(self._numbers)}",
            source=source,
            scope=scope,
            context=delivery.context,
            span=self.shell.tracer.start_span(
                "prefill.run", context=delivery.context, attributes={a.REQUEST_ID: message.attempt.request_id}
            ),
            started_at=now,
        )
        self._apply(self.table.open(source))
        self._runs[message.attempt.request_id] = run
        self._by_seq[run.seq_id] = run
        return run

    def _accepted(self, run: Run) -> m.PrefillAccepted:
        assert run.reservation is not None
        return m.PrefillAccepted(
            incarnation=self.shell.incarnation,
            num_cached_tokens=run.reservation.num_cached_tokens,
            fingerprint=self.shell.core.facts.fingerprint,
        )

    async def _on_cancel(self, delivery: Delivery) -> m.Cancelled:
        message: m.Cancel = delivery.message
        effects = self.table.cancel(message.attempt, message.reason or "cancelled")
        self._apply(effects)
        return m.Cancelled(held=bool(effects))

    async def _purge(self, order: m.PurgeOrder) -> Mapping[str, int]:
        return await carry_out(self.shell, order, self._end_purged)

    async def _end_purged(self, order: m.PurgeOrder) -> int:
        """End what the order names; the decode workers are told, and end it themselves."""
        named = [run for run in self._runs.values() if self.purges.generations.is_over(run.scope)]
        for run in named:
            self.shell.tagger.chains.forget(run.seq_id)
            self._apply([run.fail(purged(), self.shell.clock())])
            self._apply(self.table.cancel(run.source.attempt, PURGED))
        return len(named)

    # ------------------------------------------------------------------------------------------ news

    def _on_ack(self, delivery: Delivery) -> None:
        message: m.HandoffAck = delivery.message
        self._apply(self.table.ack(message, self.shell.clock()))

    def _on_release(self, delivery: Delivery) -> None:
        message: m.HandoffRelease = delivery.message
        self._apply(self.table.release(message))

    def attempts(self) -> Mapping[Attempt, int]:
        """See `Role.attempts`."""
        return {run.source.attempt: run.computed for run in self._runs.values()}

    def outputs(self) -> tuple[AttemptOutput, ...]:
        """See `Role.outputs`: tokens are made by decode workers."""
        return ()

    def revoked(self) -> tuple[Attempt, ...]:
        """See `Role.revoked`: blocks that peers know are never taken."""
        return ()

    def awaited_peers(self) -> frozenset[WorkerId]:
        """See `Role.awaited_peers`."""
        return self.table.decode_workers

    def peer_beat(self, beat: m.WorkerBeat, progress: Mapping[Attempt, AttemptProgress], now: float) -> None:
        """See `Role.peer_beat`: a decode worker's beat renews the leases of what it lists."""
        if beat.role == "decode":
            counters = {attempt: p.progress for attempt, p in progress.items()}
            self._apply(self.table.decode_beat(beat.worker, beat.incarnation, counters, now))

    def peer_died(self, worker: WorkerId) -> None:
        """See `Role.peer_died`."""
        self._apply(self.table.decode_died(worker))

    def tick(self, now: float) -> None:
        """See `Role.tick`: resends and leases."""
        self._apply(self.table.tick(now))

    def take_updates(self, updates: list[SequenceUpdate]) -> None:
        """See `Role.take_updates`."""
        self.shell.hop(self._take_updates, updates)

    def _take_updates(self, updates: list[SequenceUpdate]) -> None:
        """Finished blocks are named, full ones tagged."""
        for update in updates:
            run = self._by_seq.get(update.seq_id)
            if run is None or run.source.freed:
                continue
            if update.finish == ERROR:
                log.error("%s failed: %s", run.source.attempt.request_id, update.detail, extra={"span": run.span})
                self._apply([run.fail(Internal("prefill failed", code="engine_error"), self.shell.clock())])
                continue
            run.computed = update.num_computed_tokens
            run.chunks += 1
            if any(update.completed):
                self.shell.tagger.completed(update.seq_id, update.completed, ask=False)
            self._name_what_is_due(run)
            if update.finish:
                run.ended = True
                if run.reservation is not None:
                    self._end_span(run)
                self.shell.changed()

    # ------------------------------------------------------------------------------------------ commits

    def _name_what_is_due(self, run: Run) -> None:
        """Digest and name the blocks that became final, in chunks as they come."""
        if run.naming or run.source.freed or run.reservation is None or not any(run.source.due(run.computed)):
            return
        run.naming = True
        task = asyncio.get_running_loop().create_task(self._name(run, run.reservation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _name(self, run: Run, reservation: Reservation) -> None:
        loop, source = asyncio.get_running_loop(), run.source
        try:
            while not source.freed and not source.complete:
                computed = run.computed
                due = source.due(computed)
                if not any(due):
                    break
                blocks = [
                    (group, table.block_ids[position], int(table.generations[position]), position)
                    for group, (table, positions) in enumerate(zip(reservation.tables, due, strict=True))
                    for position in positions
                ]
                core = self.shell.core
                finite = await loop.run_in_executor(self._thread, core.are_finite, blocks)
                digests = await loop.run_in_executor(self._thread, core.digest_blocks, source.attempt, blocks)
                if self.table.get(source.attempt) is not source:
                    break
                if not finite:
                    self._distrust(run)
                    break
                named = _refs(blocks, digests, len(due))
                if self._server is not None:
                    self._server.leases.name(source.attempt, source.lease_token, [block[:3] for block in blocks])
                self._apply([source.name(computed, named, reservation.num_cached_tokens, self.shell.clock())])
        except Exception:
            log.exception("blocks of %s could not be named", source.attempt.request_id, extra={"span": run.span})
            self._apply([run.fail(Internal("digest failed"), self.shell.clock())])
        finally:
            run.naming = False

    def _distrust(self, run: Run) -> None:
        """Its KV is no good: the decode worker computes the prompt itself, and what is here is used by nobody."""
        log.error("KV of %s is not finite", run.source.attempt.request_id, extra={"span": run.span})
        self.shell.post(lambda batcher: batcher.distrust(run.seq_id))
        self._apply([run.fail(Internal("the KV is not finite", code="engine_error"), self.shell.clock())])

    def _apply(self, effects: Iterable[SourceEffect]) -> None:
        for effect in effects:
            match effect:
                case SendCommit(worker, message):
                    run = self._runs.get(message.attempt.request_id)
                    context = run.context if run is not None else None
                    self.shell.publisher.send(subjects.handoff(worker, "commit"), message, context)
                case Free(attempt, reason):
                    run = self._runs.get(attempt.request_id)
                    if run is not None and run.source.attempt == attempt:
                        self._drop(run, reason)

    def _drop(self, run: Run, reason: str) -> None:
        """The blocks may go, once no step in flight touches them. A run that is cancelled while it is being refused
        is dropped twice."""

        def free() -> None:
            self.shell.post(lambda batcher: batcher.cancel(run.seq_id))

        if self._server is None:
            free()
        else:
            self._server.leases.close(run.source.attempt, free)
        self.shell.tagger.chains.close(run.seq_id)
        if self._by_seq.get(run.seq_id) is run:
            self._count_end(reason)
        self._by_seq.pop(run.seq_id, None)
        if self._runs.get(run.source.attempt.request_id) is run:
            del self._runs[run.source.attempt.request_id]
        if run.span.is_recording():
            run.span.set_attribute(a.REASON, reason)
        self._end_span(run)
        self.shell.changed()

    def _count_end(self, reason: str) -> None:
        head, known = reason.partition(":")[0], names.HANDOFF_SOURCES_ENDED.labels["reason"]
        # Whoever cancels gives reasons of his own.
        self.shell.metrics.inc(names.HANDOFF_SOURCES_ENDED, reason=head if head in known else "cancelled")
        if reason in LEASE_ENDS:
            self.shell.metrics.inc(names.LEASE_LOSSES, holder="decode")

    def _end_span(self, run: Run) -> None:
        run.end_span(self.shell.clock(), self.shell.worker, fake=self.shell.core.facts.fake)


def _refs(
    blocks: Sequence[tuple[int, int, int, int]], digests: Sequence[bytes], num_groups: int
) -> list[list[BlockRef]]:
    """Blocks and their digests as named in a commit, per group."""
    named: list[list[BlockRef]] = [[] for _ in range(num_groups)]
    for (group, block_id, generation, _), digest in zip(blocks, digests, strict=True):
        named[group].append(BlockRef(block_id, BlockGeneration(generation), digest))
    return named
