"""Purges of tenants: ordered, told to every owner of copies until it says that nothing is left, and receipted.

An order is durable before it is told. Policy is an owner too: of stored responses, answers under Idempotency-Keys, and
the append-only file, which is rewritten when everything is deleted that it may still show.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from services.policy.admin import Admin
from services.policy.copies import WORKER_SILENT_S, Copies, Place
from services.policy.idempotency import IdempotencyRecords
from services.policy.ingress_watch import IngressWatch
from services.policy.purge_record import (
    BATCH,
    INDEX,
    POLICY,
    STORE,
    PurgeRecord,
    order_of,
    pending,
    receipt_of,
    store_is_due,
)
from services.policy.purge_store import PurgeStore
from shared.bus.bus import NO_RESPONDERS, Bus, Delivery, Subscription
from shared.bus.streams import PURGE_ACK_STREAM
from shared.contracts import admin_messages as am
from shared.contracts import messages as m
from shared.contracts import subjects
from shared.contracts.errors import BatonError, Conflict, InvalidInput, NotFound, Unavailable
from shared.contracts.idempotency_messages import IngressAsked, IngressHere
from shared.contracts.ids import IngressId, WorkerId
from shared.contracts.subjects import INGRESS, WORKERS
from shared.security.grant_signature import GrantSigner
from shared.security.receipts import sign_receipt
from shared.store.redis_store import RedisStore
from shared.telemetry import metric_names as names
from shared.telemetry.metrics import Metrics

log = logging.getLogger("baton.policy")

LISTENED_S = 3.0
"""Beats come once a second: whoever lives was heard after so long."""
GRANTS_LIVE_S = 2 * 86400.0
FIRST_AGAIN_S, MOST_AGAIN_S = 1.0, 30.0
"""Pauses between publications of an order."""
SWEEP_S, HURRIED_S, HURRY_S = 1.0, 0.2, 10.0
"""Pauses between sweeps, and for how long after an order they are short."""
ASK_S = 1.0
GONE_S = 10.0
"""An ingress that nobody listens for during so long has ended, and what it held with it. As long as its lease: after an
outage of the bus policy may be back before it."""


class Purges:
    """One of any number on the same Redis. `start`, then `sweep` about once a second, then `stop`.

    Args:
        kept: what policy keeps of tenants' texts, by what it is called on receipts.
        grants_live_s: after so many seconds no grant is good any more.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        bus: Bus,
        redis: RedisStore,
        admin: Admin,
        kept: Sequence[tuple[str, IdempotencyRecords]],
        watch: IngressWatch,
        signer: GrantSigner,
        *,
        prefix: str = "baton:policy",
        listened_s: float = LISTENED_S,
        grants_live_s: float = GRANTS_LIVE_S,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._redis = redis
        self._admin = admin
        self._kept = kept
        self._watch = watch
        self._signer = signer
        self._store = PurgeStore(redis, prefix)
        self._copies = Copies()
        self._listened_s = listened_s
        self._grants_live_s = grants_live_s
        self._metrics = metrics or Metrics("policy")
        self._clock = clock
        self._started = clock()
        self._again: dict[str, tuple[float, float]] = {}  # when an open purge is told again, and the pause behind that
        self._nobody: dict[str, float] = {}  # since when nobody listens for an ingress
        self._rewriting: set[str] = set()  # purges whose rewrite of the append-only file is under way
        self._batch_known = False
        self._hurried_until = float("-inf")
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        """Hear who lives, and take acknowledgements."""
        bus = self._bus
        self._subscriptions = [
            await bus.subscribe(subjects.ANY_WORKER_BEAT, m.WorkerBeat, self._on_worker_beat),
            await bus.subscribe(subjects.ANY_SCHED_BEAT, m.SchedulerBeat, self._on_scheduler_beat),
            await bus.consume(PURGE_ACK_STREAM, subjects.ANY_PURGE_ACK, m.PurgeAck, self._on_ack, durable=POLICY),
        ]
        self._started = self._clock()

    async def stop(self) -> None:
        """Take nothing new; what is in hand is finished."""
        for subscription in reversed(self._subscriptions):
            await subscription.stop()
        self._subscriptions.clear()

    # ------------------------------------------------------------------------------------------ asked for

    async def order(self, ask: am.PurgeStart) -> am.Purges:
        """Begin a purge; its receipt as it stands then. Raises InvalidInput for an unknown tenant, Unavailable."""
        await asyncio.sleep(max(0.0, self._started + self._listened_s - self._clock()))
        if ask.remove:
            await self._admin.remove_tenant(ask.tenant)
        generation = await self._admin.raise_generation(ask.tenant)
        record = PurgeRecord(
            purge_id=f"purge-{secrets.token_hex(8)}",
            tenant=ask.tenant,
            generation=generation,
            ordered_s=await self._redis.now_s(),
            expected=await self._expected(),
            reason=ask.reason,
            cache_only=ask.cache_only,
            removed=ask.remove,
        )
        await self._store.add(record)
        await self._publish(record)
        await self._take_own(record)  # now, so that it takes nothing that was made since
        self._hurried_until = self._clock() + HURRY_S
        await self._admin.audit("purge_ordered", record.tenant, record.purge_id)
        return await self.shown(record.purge_id)

    async def declare_gone(self, purge_id: str, workers: Sequence[str]) -> am.Purges:
        """The operator says that the memory of these workers' machines is lost. Raises NotFound, InvalidInput, Conflict
        for a worker that was heard of late."""
        await asyncio.sleep(max(0.0, self._started + self._listened_s - self._clock()))
        record = await self._store.get(purge_id)
        left = pending(record, await self._store.acks(purge_id))
        for worker in workers:
            if worker not in left or not worker.startswith(tuple(f"{role}-" for role in WORKERS)):
                raise InvalidInput(f"the purge does not wait for a worker {worker[:64]!r}", param="gone")
            if self._copies.is_heard(WorkerId(worker), self._clock()):
                raise Conflict(f"{worker} was heard in the last {WORKER_SILENT_S:.0f} s: end it first", param="gone")
        for worker in workers:
            await self._admin.audit("pool_declared_gone", record.tenant, worker)
            await self._taken_for_lost(WorkerId(worker), "declared_gone")
        return await self.shown(purge_id)

    async def shown(self, purge_id: str = "") -> am.Purges:
        """Signed receipts: of one purge, or of the latest. Raises NotFound."""
        ids = [purge_id] if purge_id else await self._store.newest_ids()
        now_s = await self._redis.now_s()
        receipts = []
        for name in ids:
            record, acks = await self._store.get(name), await self._store.acks(name)
            receipts.append(sign_receipt(self._signer, receipt_of(record, acks, now_s)))
        return am.Purges(receipts=tuple(receipts))

    async def _expected(self) -> tuple[str, ...]:
        await self._keep_owners()
        now = self._clock()
        services = (POLICY, INDEX, BATCH) if await self._store.knows_batch() else (POLICY, INDEX)
        processes = [*self._watch.may_live(now), *self._copies.leaders(now), *await self._store.pools()]
        return (*services, *sorted(processes), STORE)

    # ------------------------------------------------------------------------------------------ carried out

    def pause_s(self) -> float:
        """Until the next sweep: shorter while somebody waits for a receipt."""
        return HURRIED_S if self._clock() < self._hurried_until else SWEEP_S

    async def sweep(self) -> None:
        """Tell again, carry out policy's own part, and close what is complete; what fails keeps nothing else from it.
        Raises Unavailable; call again then."""
        await self._keep_owners()
        ids = await self._store.open_ids()
        self._metrics.set(names.PURGES_PENDING, len(ids))
        looks = (partial(self._go_on, purge_id) for purge_id in ids)
        steps: list[Callable[[], Awaitable[None]]] = [partial(self._tell_newcomers, ids), self._end_lost_boots, *looks]
        failed: BatonError | None = None
        for step in steps:
            try:
                await step()
            except BatonError as exc:
                failed = failed or exc
        self._again = {name: due for name, due in self._again.items() if name in ids}
        if failed is not None:
            raise failed

    async def _go_on(self, purge_id: str) -> None:
        record, acks = await self._store.get(purge_id), await self._store.acks(purge_id)
        left = pending(record, acks)
        if not left:
            await self._close(record)
            return
        if POLICY in left:
            await self._take_own(record)
        await asyncio.gather(*(self._look_for(record, owner) for owner in left))
        when, pause_s = self._again.get(purge_id, (0.0, FIRST_AGAIN_S))
        if self._clock() >= when:
            await self._publish(record, pause_s)
        if store_is_due(record, acks):
            await self._rewrite(record)

    async def _tell_newcomers(self, open_ids: Sequence[str]) -> None:
        """A process that began after a purge does not know of it: while there may be grants of before, it is told."""
        if not self._copies.newcomers:
            return
        self._copies.newcomers = False  # before the first await: who comes meanwhile is told by the next sweep
        try:
            since_s = await self._redis.now_s() - self._grants_live_s
            for purge_id in await self._store.ids_since(since_s):
                if purge_id not in open_ids:
                    await self._bus.publish(subjects.PURGE_ORDER, order_of(await self._store.get(purge_id)))
        except BatonError:
            self._copies.newcomers = True
            raise

    async def _end_lost_boots(self) -> None:
        """A machine that was started anew has lost what lay in its memory."""
        now = self._clock()
        if now - self._started < WORKER_SILENT_S:
            return
        for worker in self._copies.lost_with_their_boot(await self._store.pools(), now):
            log.warning("the pool of %s is gone: its machine was started anew", worker)
            await self._taken_for_lost(worker, "machine_restarted")

    async def _taken_for_lost(self, worker: WorkerId, how: str) -> None:
        """It counts again if it beats all the same."""
        self._copies.forget(worker)
        await self._pools_gone([worker], how)

    async def _publish(self, record: PurgeRecord, pause_s: float = FIRST_AGAIN_S) -> None:
        self._again[record.purge_id] = (self._clock() + pause_s, min(MOST_AGAIN_S, 2 * pause_s))
        await self._bus.publish(subjects.PURGE_ORDER, order_of(record))

    async def _take_own(self, record: PurgeRecord) -> None:
        """An order that was carried out takes nothing that was made since: another process does not begin it again."""

        async def take() -> None:
            counts = {}
            if not record.cache_only:
                counts = {name: await kept.purge(record.tenant) for name, kept in self._kept}
            await self._acked(record.purge_id, POLICY, counts)

        await self._once(record, POLICY, take)

    async def _rewrite(self, record: PurgeRecord) -> None:
        if record.purge_id not in self._rewriting:
            if await self._store.log_is_rewritten() is None:
                return  # it may have begun before everything was deleted
            if await self._once(record, STORE, self._store.rewrite_log):
                self._rewriting.add(record.purge_id)
            return
        ended = await self._store.log_is_rewritten()
        if ended is None:
            return
        self._rewriting.discard(record.purge_id)
        if ended:
            await self._acked(record.purge_id, STORE, {"rewritten": 1})

    async def _once(self, record: PurgeRecord, part: str, work: Callable[[], Awaitable[None]]) -> bool:
        """Carry out a part of a purge, unless another process does; what failed is left to whoever comes next."""
        if not await self._store.claim(record.purge_id, part):
            return False
        try:
            await work()
        except BatonError:
            await self._store.unclaim(record.purge_id, part)
            raise
        return True

    async def _look_for(self, record: PurgeRecord, owner: str) -> None:
        """What a process held in its memory alone is gone with it."""
        now = self._clock()
        if owner.startswith("scheduler-"):
            if now - self._started > self._listened_s and owner not in self._copies.leaders(now):
                await self._acked(record.purge_id, owner, {"leads_no_more": 1})
        elif owner.startswith(tuple(f"{role}-" for role in INGRESS)) and await self._is_gone(IngressId(owner)):
            await self._acked(record.purge_id, owner, {"process_gone": 1})

    async def _is_gone(self, ingress: IngressId) -> bool:
        try:
            await self._bus.request(subjects.gateway_ask(ingress), IngressAsked(), IngressHere, timeout_s=ASK_S)
        except Unavailable as exc:
            if exc.code == NO_RESPONDERS:
                return self._clock() - self._nobody.setdefault(ingress, self._clock()) >= GONE_S
        except BatonError:
            pass
        self._nobody.pop(ingress, None)
        return False

    async def _close(self, record: PurgeRecord) -> None:
        if await self._store.close(record.purge_id):
            log.warning("purge %s of tenant %s is complete", record.purge_id, record.tenant)
            await self._admin.audit("purge_completed", record.tenant, record.purge_id)

    # ------------------------------------------------------------------------------------------ news

    async def _on_ack(self, delivery: Delivery) -> None:
        ack: m.PurgeAck = delivery.message
        if delivery.subject != subjects.purge_ack(ack.service) or not _may_speak(ack):
            log.error("acknowledgement of %s on %s dropped", ack.owner, delivery.subject)
            return
        await self._pools_gone(ack.wiped, "pool_gone")
        if ack.purge_id:
            await self._acked(ack.purge_id, ack.owner, ack.counts)

    async def _acked(self, purge_id: str, owner: str, counts: dict[str, int]) -> None:
        try:
            record = await self._store.get(purge_id)
        except NotFound:
            log.error("acknowledgement of %s for an unknown purge dropped", owner)
            return
        await self._store.acknowledge(purge_id, owner, counts)
        if not pending(record, await self._store.acks(purge_id)):
            await self._close(record)

    async def _pools_gone(self, workers: Sequence[WorkerId], how: str) -> None:
        """Whatever was asked of them is done."""
        await self._store.forget_pools(workers)
        for worker in workers:
            for purge_id in await self._store.open_ids():
                if worker in (await self._store.get(purge_id)).expected:
                    await self._acked(purge_id, worker, {how: 1})

    def _on_worker_beat(self, delivery: Delivery) -> None:
        beat: m.WorkerBeat = delivery.message
        self._copies.worker_beat(beat.worker, Place(beat.host, beat.boot_id), self._clock())

    def _on_scheduler_beat(self, delivery: Delivery) -> None:
        self._copies.scheduler_beat(delivery.message.scheduler_id, self._clock())

    async def _keep_owners(self) -> None:
        """Who outlives its process must be known for longer than beats come."""
        if workers := dict(self._copies.new_workers):
            await self._store.add_pools(workers)
            self._copies.kept(workers)
        ingresses = self._watch.may_live(self._clock())
        self._copies.ingresses(ingresses)
        if not self._batch_known and any(name.startswith(f"{BATCH}-") for name in ingresses):
            await self._store.note_batch()
            self._batch_known = True


def _may_speak(ack: m.PurgeAck) -> bool:
    """Only for itself, and of pools only a worker."""
    own = ack.owner == ack.service or ack.owner.startswith(f"{ack.service}-")
    return own and (not ack.wiped or ack.service in WORKERS)


def check_purge(ask: am.PurgeStart) -> None:
    """Raises InvalidInput for what cannot be asked."""
    if len(ask.reason) > 200:
        raise InvalidInput("the reason has at most 200 characters", param="reason")
    if ask.cache_only and ask.remove:
        raise InvalidInput("a tenant that is removed keeps nothing: not both cache_only and remove", param="cache_only")
    if not ask.tenant:
        raise InvalidInput("a purge needs a tenant", param="tenant")
