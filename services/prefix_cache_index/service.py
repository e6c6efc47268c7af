"""The index's shell: answers match and extend, listens to workers' beats and block events, asks for replays."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from opentelemetry import trace
from opentelemetry.trace import Span

from services.prefix_cache_index.fleet import Fleet, Heard
from services.prefix_cache_index.index import BlockIndex
from services.prefix_cache_index.issued import IssuedTags
from services.prefix_cache_index.scope_keys import ScopeKeys
from services.prefix_cache_index.tagging import Tagger
from shared.bus.bus import Bus, Delivery, Subscription
from shared.contracts import messages as m
from shared.contracts import subjects
from shared.contracts.errors import BatonError, Conflict, Unavailable, to_wire
from shared.contracts.grants import Grant, SignedGrant
from shared.contracts.ids import ScopeGeneration, TenantId
from shared.contracts.parts import ExtendedRun, ExtendRun
from shared.security.generations import Generations
from shared.security.grant_signature import GrantVerifier
from shared.security.purge_orders import PurgeOrders
from shared.security.scope import KvFormat
from shared.telemetry import attributes as attr
from shared.telemetry import metric_names as names
from shared.telemetry.metrics import Metrics

log = logging.getLogger("baton.index")
tracer = trace.get_tracer("baton.index")

SERVICE = "prefix-cache-index"
TICK_S = 1.0


class IndexService:
    """One prefix cache index. `start`, then `stop`.

    Args:
        keys: scope keys and generations.
        verifier: of policy's grants.
        wall: unix seconds, for the expiry of grants.
        clock: monotonic seconds, for beats and replays.
    """

    def __init__(
        self,
        bus: Bus,
        keys: ScopeKeys,
        verifier: GrantVerifier,
        *,
        fleet: Fleet | None = None,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        metrics: Metrics | None = None,
    ) -> None:
        self.index = BlockIndex()
        self._metrics = metrics or Metrics("prefix-cache-index")
        self._metrics.before_scrape(lambda: self._metrics.set(names.INDEX_ENTRIES, len(self.index)))
        self._bus = bus
        self._keys = keys
        self._verifier = verifier
        self._fleet = fleet or Fleet()
        self._wall = wall
        self._clock = clock
        self._generations = Generations()
        self._issued = IssuedTags()
        self._tagger = Tagger(keys, self._issued, self._generations)
        self._purges = PurgeOrders(bus, SERVICE, SERVICE, self._purge, self._generations)
        self._subscriptions: list[Subscription] = []
        self._news = asyncio.Event()
        self._unsaved: dict[TenantId, ScopeGeneration] = {}
        self._ticking: asyncio.Task[None] | None = None
        self._stopping = False

    async def start(self) -> None:
        """Read the generations, listen, then serve. Raises Unavailable when Redis or NATS does not answer."""
        for tenant, generation in (await self._keys.generations()).items():
            self._generations.rise(tenant, generation)
        bus = self._bus
        self._subscriptions = [
            await bus.subscribe(subjects.POLICY_EVENTS, m.PolicyEvent, self.on_policy_event),
            await bus.subscribe(subjects.ANY_INDEX_EVENTS, m.BlockEvents, self.on_block_events),
            await bus.subscribe(subjects.ANY_WORKER_BEAT, m.WorkerBeat, self.on_beat),
            await bus.serve(subjects.INDEX_EXTEND, m.Extend, self.extend, queue=SERVICE),
            await bus.serve(subjects.INDEX_MATCH, m.Match, self.match, queue=SERVICE),
        ]
        await self._purges.start()
        self._ticking = asyncio.create_task(self._tick_until_stopped())

    async def stop(self) -> None:
        """Take no new questions first, then stop listening."""
        await self._purges.stop()
        for subscription in reversed(self._subscriptions):
            await subscription.stop()
        self._subscriptions.clear()
        # Not by cancelling: `wait_for` may swallow a cancellation that meets the event it waits for.
        self._stopping = True
        self._news.set()
        if self._ticking is not None:
            await self._ticking

    async def match(self, delivery: Delivery) -> m.Matched | m.Refusal:
        """Tags of the prompt and who holds them. Raises Unavailable when a key is needed and Redis does not answer."""
        question: m.Match = delivery.message
        with tracer.start_as_current_span("index.match", context=delivery.context) as span:
            try:
                grant = self._verified(question.grant)
                span.set_attributes({attr.REQUEST_ID: grant.request_id, attr.TENANT: grant.tenant})
                return await self._matched(grant, question.token_ids, span)
            except Unavailable as error:
                self._metrics.inc(names.INDEX_MATCHES, outcome="unavailable")
                span.set_attributes({attr.STATUS: error.code, attr.REASON: error.param or "unavailable"})
                raise
            except BatonError as error:
                self._metrics.inc(names.INDEX_MATCHES, outcome="refused")
                span.set_attributes({attr.STATUS: error.code, attr.REASON: error.message})
                return m.Refusal(error=to_wire(error))

    async def extend(self, delivery: Delivery) -> m.Extended | m.Refusal:
        """Tags for committed blocks. A refused run does not harm the others.

        Raises Unavailable when a key is needed and Redis does not answer: the worker asks again.
        """
        question: m.Extend = delivery.message
        with tracer.start_as_current_span("index.extend", context=delivery.context) as span:
            span.set_attribute(attr.WORKER, question.worker)
            member = self._fleet.member(question.worker)
            if member is None or member.incarnation != question.incarnation:
                span.set_attributes({attr.STATUS: "unknown_worker", attr.REASON: "no beat of this incarnation"})
                error = Conflict(f"no beat of this incarnation of {question.worker} counts here", code="unknown_worker")
                return m.Refusal(error=to_wire(error))
            kv_format = self._fleet.format_of(member.pool)
            answers = [await self._extended(run, kv_format) for run in question.runs]
            refused = [answer.error.code for answer in answers if answer.error is not None]
            self._metrics.inc(names.INDEX_EXTENDED, len(answers) - len(refused), outcome="tagged")
            self._metrics.inc(names.INDEX_EXTENDED, len(refused), outcome="refused")
            span.set_attributes(
                {attr.STATUS: "refused" if refused else "ok", attr.BLOCKS: sum(len(answer.tags) for answer in answers)}
            )
            if refused:
                span.set_attribute(attr.REASON, f"{len(refused)} of {len(answers)} runs: {refused[0]}")
            return m.Extended(runs=tuple(answers))

    def on_beat(self, delivery: Delivery) -> None:
        """A worker lives; a new one is asked for what it holds."""
        beat: m.WorkerBeat = delivery.message
        heard = self._fleet.beat(beat, self._clock())
        if heard == Heard.FIRST:
            self.index.admit(beat.worker, beat.incarnation)
            self._news.set()
        elif self._fleet.member(beat.worker) is None:
            self.index.drop(beat.worker)

    def on_block_events(self, delivery: Delivery) -> None:
        """A worker holds other blocks than before."""
        self.index.apply(delivery.message)
        self._news.set()

    def on_policy_event(self, delivery: Delivery) -> None:
        """A scope may have ended."""
        event: m.PolicyEvent = delivery.message
        if event.kind == "scope_raised":
            self._rise(event.tenant, event.generation)

    async def _purge(self, order: m.PurgeOrder) -> Mapping[str, int]:
        """The tombstone is durable and the scopes' keys are destroyed when this returns. Raises Unavailable."""
        self._rise(order.tenant, order.generation)
        scopes = await self._keys.destroy(order.tenant, order.generation)
        tags = self.index.forget(self._issued.forget(frozenset(scopes)))
        return {"scope_keys": len(scopes), "tags": tags}

    async def _matched(self, grant: Grant, token_ids: bytes, span: Span) -> m.Matched:
        answer = m.Matched(scope_generation=grant.scope.generation)
        pool = self._fleet.pool_for(grant.model)
        # A request that must never be cached gets no tags: with them a worker could keep its blocks.
        if pool is None or grant.retention_s == 0:
            self._generations.check(grant.scope)
            reason = "no_worker" if pool is None else "never_cached"
            self._metrics.inc(names.INDEX_MATCHES, outcome=reason)
            span.set_attributes({attr.STATUS: "ok", attr.REASON: reason})
            return answer
        chains = await self._tagger.prompt(grant, self._fleet.format_of(pool), token_ids)
        holders = self.index.match(chains, self._fleet.workers(pool))
        self._metrics.inc(names.INDEX_MATCHES, outcome="found" if holders else "nothing_held")
        span.set_attributes(
            {
                attr.STATUS: "ok",
                attr.REASON: "found" if holders else "nothing_held",
                attr.BLOCKS: sum(len(chain.tags) for chain in chains),
                attr.HOLDERS: len(holders),
                attr.MATCHED_BLOCKS: sum(holders[0].blocks) if holders else 0,
            }
        )
        return m.Matched(scope_generation=grant.scope.generation, tags=chains, holders=holders)

    async def _extended(self, run: ExtendRun, kv_format: KvFormat) -> ExtendedRun:
        try:
            grant = self._verified(run.grant)
            if grant.retention_s == 0:
                raise Conflict("blocks of this request are never cached", code="never_cached")
            tags = await self._tagger.run(grant, kv_format, run)
        except Unavailable:
            raise
        except BatonError as error:
            return ExtendedRun(error=to_wire(error))
        return ExtendedRun(tags=tags, scope_generation=grant.scope.generation)

    def _verified(self, signed: SignedGrant) -> Grant:
        grant = self._verifier.verify(signed, self._wall())
        # Policy signed it, so its generation is at least this one: makes good for an event that was lost.
        self._rise(grant.tenant, grant.scope.generation)
        return grant

    def _rise(self, tenant: TenantId, generation: ScopeGeneration) -> None:
        if self._generations.rise(tenant, generation):
            self._keys.forget(tenant)
            self._unsaved[tenant] = generation
            self._metrics.inc(names.SCOPES_RAISED)
            self._news.set()

    async def _tick_until_stopped(self) -> None:
        while not self._stopping:
            await self._tick()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), TICK_S)
            self._news.clear()

    async def _tick(self) -> None:
        """Drop the dead, ask for replays, save generations. What cannot be sent or saved is tried again."""
        now = self._clock()
        for worker in self._fleet.expire(now):
            log.warning("worker %s is silent; its blocks are dropped", worker)
            self.index.drop(worker)
        try:
            for worker, number in self.index.replays_due(now):
                await self._bus.publish(subjects.index_replay(worker), m.Replay(number=number))
                self._metrics.inc(names.INDEX_REPLAYS)
            for tenant, generation in list(self._unsaved.items()):
                await self._keys.keep_generation(tenant, generation)
                if self._unsaved.get(tenant) == generation:
                    del self._unsaved[tenant]
        except BatonError as exc:
            log.warning("tried again later: %s", exc.message)
