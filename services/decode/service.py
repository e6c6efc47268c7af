"""A decode worker: reserves, pulls, decodes, streams. The shell around its pure cores.

What is decided where: `reservation` says which attempts live, `stream_outbox` what is owed to ingresses, the hand-off
`Sink` what to pull, the batcher what to compute. This file only carries news between them and the bus.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping

from services.decode import reserving
from services.decode.book import Book
from services.decode.held import Held, cut_totals, goes_on
from services.decode.reservation import INGRESS_SILENT, Drop, Effect, GoLocal, Kind
from shared.bus.bus import Delivery, RequestHandler, Subscription
from shared.contracts import messages as m
from shared.contracts import subjects
from shared.contracts.attempt import Attempt
from shared.contracts.errors import (
    WORKER_STOPPING,
    BatonError,
    Cancelled,
    Conflict,
    ContextExceeded,
    Internal,
    InvalidInput,
    Overloaded,
    ProtocolError,
    Unavailable,
    to_wire,
)
from shared.contracts.grants import Grant, SignedGrant
from shared.contracts.ids import WorkerId
from shared.contracts.message import Message
from shared.contracts.parts import AttemptOutput, AttemptProgress
from shared.engine.block_room import NeverFits, ReservationRefused
from shared.engine.sequence_spec import SequenceSpec
from shared.engine.sequence_update import SequenceUpdate
from shared.engine.worker_fences import Fences
from shared.engine.worker_metrics import count_refusal
from shared.engine.worker_purges import carry_out
from shared.engine.worker_shell import WorkerShell
from shared.kv.transfer import Transport
from shared.security.generations import purged
from shared.security.purge_orders import PurgeOrders
from shared.telemetry import attributes as a
from shared.telemetry import metric_names as names

log = logging.getLogger("baton.decode")

LISTING_S = 1.0
ARRIVAL_S = 1.0
"""How long a hand-off waits for blocks that others give up. A scheduler asks for 2 s."""
FINALS_LIMIT_S = 1.0
VerifyGrant = Callable[[SignedGrant], Grant]


class DecodeWorker:
    """One decode worker on the bus. Use as `await start()` … `await stop(limit_s)`."""

    name = "decode"

    def __init__(self, shell: WorkerShell, fences: Fences, transport: Transport, verify_grant: VerifyGrant) -> None:
        """`fences` is the shell's. `verify_grant` raises Forbidden for what policy did not sign."""
        self.shell = shell
        self.book = Book(shell, fences, transport)
        self.purges = PurgeOrders(shell.bus, self.name, shell.worker, self._purge)
        self._verify = verify_grant
        self._listed_at = 0.0
        self._subscriptions: list[Subscription] = []
        self._tasks: set[asyncio.Task[object]] = set()

    # ------------------------------------------------------------------------------------------ life

    async def start(self) -> None:
        """Serve. Commits and beats are subscribed before the first reservation can be answered."""
        bus, worker = self.shell.bus, self.shell.worker
        self._subscriptions = [
            await bus.subscribe(subjects.handoff(worker, "commit"), m.HandoffCommit, self._on_commit),
            await bus.subscribe(subjects.ANY_GATEWAY_BEAT, m.GatewayBeat, self._on_gateway_beat),
        ]
        await self.purges.start()
        handlers: dict[str, tuple[type[Message], RequestHandler]] = {
            "reserve": (m.Reserve, self._on_reserve),
            "cancel": (m.Cancel, self._on_cancel),
            "finish": (m.Finish, self._on_finish),
            "replay": (m.StreamReplay, self._on_replay),
            "ack": (m.FinalAck, self._on_ack),
            "migrate": (m.Migrate, self._on_migrate),
        }
        for verb, (message_type, handler) in handlers.items():
            self._subscriptions.append(await bus.serve(subjects.decode(worker, verb), message_type, handler))
        await self.shell.start(self)
        engine, news = self.shell.core.engine, self.book.news
        engine.on_drawn, engine.quiet_until = news.drawn, news.quiet_until

    async def stop(self, limit_s: float) -> None:
        """Stop in the order `worker_shell` gives reasons for."""
        if not await self.shell.drain(lambda: len(self.book.table) == 0, limit_s):
            error = Unavailable("the worker was stopped", code=WORKER_STOPPING, retry_after_s=1.0)
            for held in [h for h in self.book.held.values() if not h.ended]:
                await self.book.fail(held, error)
        for _ in range(int(FINALS_LIMIT_S / 0.05)):
            if len(self.book.outbox) == 0:
                break
            await asyncio.sleep(0.05)
        for subscription in self._subscriptions:
            await subscription.stop()
        await self.purges.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.book.handoff.close()
        await self.shell.stop()

    # ------------------------------------------------------------------------------------------ requests

    async def _on_reserve(self, delivery: Delivery) -> m.Reserved | m.Refusal:
        message: m.Reserve = delivery.message
        with self.shell.tracer.start_as_current_span("decode.reserve", context=delivery.context) as span:
            answer = await self._reserve(message, delivery)
            if isinstance(answer, m.Reserved):
                span.set_attribute(a.PROMPT_TOKENS, len(message.token_ids) // 4)
                span.set_attribute(a.CACHED_TOKENS, answer.num_cached_tokens)
                span.set_attribute(a.REASON, "already_running" if answer.already_running else "")
            else:
                span.set_attribute(a.ERROR_CODE, answer.error.code)
                count_refusal(self.shell.metrics, answer)
            span.set_attribute(a.WORKER, str(self.shell.worker))
            span.set_attribute(a.FAKE, self.shell.core.facts.fake)
            return answer

    async def _reserve(self, message: m.Reserve, delivery: Delivery) -> m.Reserved | m.Refusal:
        try:
            grant = self._verify(message.grant)
            self.purges.generations.require_live(grant.scope)
            message = reserving.within_pool(message, self.shell.core.facts.layout)
            reserving.require_sane(message, grant, self.shell.core.facts)
            # before anything is held: whoever cancels meanwhile must find all of it or nothing
            for grammar in {choice.grammar for choice in message.sampling if choice.grammar}:
                await asyncio.to_thread(self.shell.core.require_grammar, grammar)
        except BatonError as exc:
            return m.Refusal(error=to_wire(exc), never=True)
        known = self.book.held.get(message.attempt.request_id)
        if self.shell.draining and known is None:
            return _refused(Overloaded("the worker is stopping", retry_after_s=1.0))
        verdict = self.book.table.reserve(
            message.attempt,
            message.term,
            message.ingress_id,
            message.prefill_worker,
            message.lease_s,
            self.shell.clock(),
        )
        if verdict.kind is Kind.REFUSED:
            return _refused(Conflict("a newer attempt or leader was seen", code=verdict.reason))
        if known is not None and not known.answer.done():
            await asyncio.wait({known.answer})
        if known is not None and known.attempt == message.attempt:
            return known.answer.result()
        if verdict.kind is Kind.REPEATED:
            return _refused(Conflict("this attempt is being reserved", code="already_starting"))
        known = self.book.held.get(message.attempt.request_id)
        if known is not None and self._is_live(message):
            self.book.send_news()
            if self._goes_on(known, message):
                return self._restamp(known, message, delivery)
            await self.book.end(known, "replaced")
        if not self._is_live(message):
            if known is not None and not known.ended and self.book.table.live_attempt(known.attempt.request_id) is None:
                await self.book.end(known, "fenced")
            return _refused(Cancelled("cancelled while being reserved"))
        return await self._open(message, grant, delivery)

    def _is_live(self, message: m.Reserve) -> bool:
        """False when the attempt was cancelled, dropped or fenced while its reservation waited."""
        return self.book.table.get(message.attempt) is not None

    def _goes_on(self, held: Held, message: m.Reserve) -> bool:
        """Re-stamp what is owed to the ingress, if the newer attempt can go on with it."""
        outbox, from_seq = self.book.outbox, len(message.token_ids) // 4 - message.num_prompt_tokens
        return goes_on(held, message, outbox.generated(held.attempt, 0)) and outbox.restamp(
            message.attempt, message.ingress_id, from_seq
        )

    async def _open(self, message: m.Reserve, grant: Grant, delivery: Delivery) -> m.Reserved | m.Refusal:
        if self.purges.generations.is_over(grant.scope):
            self.book.table.withdraw(message.attempt)
            return _refused(purged(), never=True)
        held = self.book.register(message, grant, delivery)
        eos_token_ids = self.shell.core.facts.eos_token_ids
        answer: m.Reserved | m.Refusal
        if finish := reserving.finish_of_resumed(held, eos_token_ids):
            answer = reserving.reserved(held, self.shell, already_running=True)
            held.answer.set_result(answer)
            self.book.finish_resumed(held, finish)
            return answer
        try:
            specs = reserving.specs_of(held, eos_token_ids)
            accepted = await self.shell.call(lambda batcher: reserving.accept(batcher, specs))
            if accepted.arriving:
                accepted = await self._arrived(held, specs[0])
        except Exception as exc:
            # Whatever it is: others may wait for this answer, and nobody may find the request held.
            self.book.forget(held)
            self.book.table.withdraw(message.attempt)
            never = isinstance(exc, NeverFits | InvalidInput)
            answer = _refused(_as_refusal(exc), never=never)
            held.answer.set_result(answer)
            held.span.end()
            return answer
        held.num_cached_tokens, held.tables = accepted.num_cached_tokens, accepted.tables
        self.shell.metrics.inc(names.PREFIX_QUERIES, len(held.token_ids))
        self.shell.metrics.inc(names.PREFIX_HITS, accepted.num_cached_tokens)
        held.pinned = accepted.awaiting
        if self.book.held.get(held.attempt.request_id) is not held:
            # Cancelled while the planner was asked; its blocks went with the cancel, but for the pin.
            if held.pinned:
                self.shell.post(lambda batcher: batcher.unpin(specs[0].seq_id))
            answer = _refused(Cancelled("cancelled while being reserved"))
        else:
            if accepted.awaiting:
                held.sink = reserving.sink_of(held, self.shell)
            else:
                held.kv_ready_at = self.shell.clock()
                self.book.table.kv_settled(held.attempt)
            computes = bool(message.prefill_worker) and not accepted.awaiting
            answer = reserving.reserved(held, self.shell, already_running=computes)
        held.answer.set_result(answer)
        self.shell.changed()
        return answer

    async def _arrived(self, held: Held, spec: SequenceSpec) -> reserving.Accepted:
        """Blocks that lower classes give up come within a step or two: KV can only be pulled into them."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ARRIVAL_S):
                await held.arrived.wait()
        return await self.shell.call(lambda batcher: reserving.settle(batcher, spec))

    def _restamp(self, held: Held, message: m.Reserve, delivery: Delivery) -> m.Reserved:
        """The newer attempt goes on with blocks, pulled KV and tokens that are here; its frames are re-stamped."""
        held.attempt, held.reserve, held.context = message.attempt, message, delivery.context
        sink, awaiting = held.sink, False
        if held.ended:
            self.book.end_reservation(held)
        elif sink is not None and sink.waiting and message.prefill_worker:
            held.lease_token, awaiting = secrets.token_bytes(16), True
            effects = sink.restamp(message.attempt, message.prefill_worker, held.lease_token)
            self.book.handoff.apply(held, effects)
        else:
            self.book.table.kv_settled(held.attempt)
            if sink is not None and sink.waiting:
                self.book.handoff.apply(held, sink.go_local("placed_locally"))
        answer = reserving.reserved(held, self.shell, already_running=not awaiting)
        held.answer = asyncio.get_running_loop().create_future()
        held.answer.set_result(answer)
        self.book.send_news()
        self.shell.changed()
        return answer

    async def _purge(self, order: m.PurgeOrder) -> Mapping[str, int]:
        return await carry_out(self.shell, order, self._end_purged)

    async def _end_purged(self, order: m.PurgeOrder) -> int:
        """End what the order names with an error, and forget what has ended and waits for its acknowledgement."""
        named = [held for held in self.book.held.values() if self.purges.generations.is_over(held.grant.scope)]
        running = [held for held in named if not held.ended]
        for held in named:
            for choice in held.choices:
                self.shell.tagger.chains.forget(choice.seq_id)
            if held.ended:
                self.book.forget(held)
            else:
                await self.book.fail(held, purged())
        return len(running)

    async def _on_cancel(self, delivery: Delivery) -> m.Cancelled:
        message: m.Cancel = delivery.message
        self.book.table.cancel(message.attempt)
        held = self.book.held.get(message.attempt.request_id)
        if held is None or held.attempt > message.attempt:
            return m.Cancelled(held=False)
        return m.Cancelled(held=True, totals=await self.book.end(held, message.reason or "cancelled"))

    async def _on_finish(self, delivery: Delivery) -> m.Finished:
        message: m.Finish = delivery.message
        held = self.book.held.get(message.attempt.request_id)
        if held is None or held.attempt != message.attempt:
            return m.Finished(held=False)
        if not 0 <= message.choice < len(held.choices) or message.num_tokens < 0:
            raise ProtocolError(f"choice {message.choice} cannot be cut at {message.num_tokens} tokens")
        choice = held.choices[message.choice]
        totals = None
        if not choice.ended:
            totals = await self.shell.call(lambda batcher: batcher.finish(choice.seq_id, message.num_tokens))
            self.book.take_news()
        if totals is not None:
            totals = held.account(choice, totals)
        elif (ended := self.book.outbox.finished(held.attempt, message.choice)) is not None:
            # It ended by itself before the stop was found: the same account, cut afterwards.
            completion = (*held.committed, *self.book.outbox.generated(held.attempt, message.choice))
            totals = cut_totals(ended, completion, message.num_tokens)
        else:
            return m.Finished(held=False)
        self.book.close_choice(held, message.choice, choice.ended or "stop")
        self.book.outbox.settle(held.attempt, message.choice, "stop", totals)
        if not self.book.outbox.holds(held.attempt):
            self.book.forget(held)
        self.book.send_news()
        self.shell.changed()
        return m.Finished(held=True, totals=totals)

    async def _on_replay(self, delivery: Delivery) -> m.StreamReplayed:
        message: m.StreamReplay = delivery.message
        return self.book.outbox.replay(message.attempt, message.choice, message.from_seq)

    async def _on_ack(self, delivery: Delivery) -> m.FinalAcked:
        message: m.FinalAck = delivery.message
        for attempt in self.book.outbox.acked(message.attempts):
            held = self.book.held.get(attempt.request_id)
            if held is not None:
                self.book.forget(held)
        return m.FinalAcked()

    async def _on_migrate(self, delivery: Delivery) -> m.Migrated:
        """Moving a running request is not built yet; it stays where it is."""
        return m.Migrated(moved=False)

    # ------------------------------------------------------------------------------------------ news

    def _on_commit(self, delivery: Delivery) -> None:
        message: m.HandoffCommit = delivery.message
        held = self.book.held.get(message.attempt.request_id)
        if held is None or held.attempt != message.attempt or held.sink is None or held.ended:
            # Late: let the source go, or it would keep its blocks until its lease ends.
            release = m.HandoffRelease(attempt=message.attempt, worker=self.shell.worker, reason="fenced")
            self.shell.publisher.send(subjects.handoff(message.source, "release"), release)
            return
        if message.lease_token == held.lease_token:
            self.book.table.source_progress(message.attempt, message.source_incarnation, self.shell.clock())
        self.book.handoff.apply(held, held.sink.commit(message))

    def _on_gateway_beat(self, delivery: Delivery) -> None:
        beat: m.GatewayBeat = delivery.message
        self._apply(self.book.table.ingress_beat(beat.ingress_id, beat.number, beat.requests, self.shell.clock()))

    def attempts(self) -> Mapping[Attempt, int]:
        """See `Role.attempts`."""
        computed: dict[Attempt, int] = {}
        for attempt in self.book.table.attempts:
            held = self.book.held.get(attempt.request_id)
            sink = held.sink if held is not None else None
            computed[attempt] = sink.contiguous if sink is not None else 0
        return computed

    def outputs(self) -> tuple[AttemptOutput, ...]:
        """See `Role.outputs`."""
        held = (self.book.held.get(attempt.request_id) for attempt in self.book.table.attempts)
        running = ((one.attempt, one.num_generated) for one in held if one is not None)
        return self.book.ended.told(running, self.shell.clock())

    def revoked(self) -> tuple[Attempt, ...]:
        """See `Role.revoked`."""
        return tuple(held.attempt for held in self.book.held.values() if held.revoked)

    def awaited_peers(self) -> frozenset[WorkerId]:
        """See `Role.awaited_peers`."""
        return frozenset(self.book.table.sources)

    def peer_beat(self, beat: m.WorkerBeat, progress: Mapping[Attempt, AttemptProgress], now: float) -> None:
        """See `Role.peer_beat`: renews leases, and asks for commits that were lost."""
        if beat.role != "prefill":
            return
        counters = {attempt: p.progress for attempt, p in progress.items()}
        self._apply(self.book.table.source_beat(beat.worker, beat.incarnation, counters, now))
        for attempt, entry in progress.items():
            held = self.book.held.get(attempt.request_id)
            if held is not None and held.attempt == attempt and held.sink is not None:
                self.book.handoff.apply(held, held.sink.beat(entry.computed_tokens, now))

    def peer_died(self, worker: WorkerId) -> None:
        """See `Role.peer_died`."""
        self._apply(self.book.table.source_died(worker))

    def tick(self, now: float) -> None:
        """See `Role.tick`: leases, finals to resend, the listing of each second."""
        if self.book.news.is_late:
            self.book.send_news()
        self._apply(self.book.table.tick(now))
        self.book.send(self.book.outbox.resends(now))
        if now - self._listed_at >= LISTING_S:
            self._listed_at = now
            self.book.send(self.book.outbox.listings())
            self.book.forget_given_up()
            self.book.handoff.drop_dead_peers()

    def take_updates(self, updates: list[SequenceUpdate]) -> None:
        """See `Role.take_updates`."""
        self.book.news.updated(updates)

    def _apply(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            held = self.book.held.get(effect.attempt.request_id)
            if held is None or held.attempt != effect.attempt:
                continue
            match effect:
                case GoLocal(_, _, reason):
                    self.shell.metrics.inc(names.LEASE_LOSSES, holder="prefill")
                    if held.sink is not None:
                        self.book.handoff.apply(held, held.sink.go_local(reason))
                case Drop(_, reason):
                    log.info("dropped %s: %s", effect.attempt.request_id, reason, extra={"span": held.span})
                    if reason == INGRESS_SILENT:
                        self.shell.metrics.inc(names.LEASE_LOSSES, holder="ingress")
                    task: asyncio.Task[object] = asyncio.get_running_loop().create_task(self.book.end(held, reason))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)


def _refused(error: BatonError, *, never: bool = False) -> m.Refusal:
    return m.Refusal(error=to_wire(error), never=never)


def _as_refusal(exc: Exception) -> BatonError:
    if isinstance(exc, BatonError):
        return exc
    if isinstance(exc, NeverFits):
        return ContextExceeded(str(exc))
    if isinstance(exc, ReservationRefused):
        return Overloaded(str(exc), retry_after_s=0.5, code=type(exc).__name__)
    log.error("a reservation failed: %s", exc, exc_info=exc)
    return Internal("the reservation failed")
