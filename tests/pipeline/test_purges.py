"""A tenant's purge reaches every copy, leaves everybody else's as it is, and waits for owners that are not there."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from services.policy.admin import Admin
from services.policy.copies import WORKER_SILENT_S
from services.policy.idempotency import IdempotencyRecords
from services.policy.ingress_watch import LEASE_S, IngressWatch
from services.policy.purges import Purges
from services.policy.records import Records
from services.prefix_cache_index.scope_keys import ScopeKeys
from services.prefix_cache_index.service import IndexService
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.bus.streams import AUDIT_STREAM
from shared.contracts import admin_messages as am
from shared.contracts import messages as m
from shared.contracts import subjects
from shared.contracts.errors import PURGED, Conflict, Forbidden, InvalidInput, Unavailable, from_wire
from shared.contracts.grants import Grant, Scope, SignedGrant
from shared.contracts.ids import Incarnation, IngressId, RequestId, ScopeGeneration, TenantId, WorkerId
from shared.contracts.message import Message
from shared.contracts.sampling import SamplingParams
from shared.contracts.tokens import pack_tokens
from shared.security.grant_signature import GrantSigner, by_id
from shared.security.purge_orders import PurgeOrders, acknowledge
from shared.security.receipts import verify_receipt
from shared.store.redis_store import RedisStore, connect_redis
from shared.store.sealed import Sealer
from shared.telemetry import metric_names as names
from shared.telemetry.metrics import Metrics
from tests.pipeline import worker_support
from tests.pipeline.gateway_support import MODEL
from tests.pipeline.keyed_support import keyed_world, until
from tests.pipeline.worker_support import Cell, attempt, cell, options
from tests.servers import RedisServer

SIGNER = GrantSigner(Ed25519PrivateKey.generate())
ACME, OTHER = TenantId("acme"), TenantId("other")
KEYED = {"model": MODEL, "prompt": "hi"}
STORED = {"model": MODEL, "input": "hi", "store": True}
RUNNING = {"model": MODEL, "input": "hi", "background": True}
STAND_INS = ("decode-1", "s")
"""The worker and the scheduler of the gateways' backend, which take no orders."""
LONG = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[RedisStore]:
    async with connect_redis(redis_server.url) as redis:
        yield redis


@dataclass
class Clock:
    """Monotonic seconds, by so much ahead as a test likes."""

    late_s: float = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.late_s


@dataclass
class Policy:
    """The part of policy that purges, swept as often as a test looks."""

    purges: Purges
    admin: Admin
    audit: list[str]
    bus: MemoryBus
    metrics: Metrics
    clock: Clock

    async def order(self, tenant: TenantId, **fields: bool) -> am.PurgeReceipt:
        return opened((await self.purges.order(am.PurgeStart(tenant=tenant, **fields))).receipts[0])

    async def receipt(self, purge_id: str) -> am.PurgeReceipt:
        await self.purges.sweep()
        return opened((await self.purges.shown(purge_id)).receipts[0])

    async def complete(self, purge_id: str, but: tuple[str, ...] = ()) -> am.PurgeReceipt:
        """The receipt, when nobody is pending `but` these."""

        async def is_complete() -> bool:
            return set((await self.receipt(purge_id)).pending) == set(but)

        await until(is_complete)
        return await self.receipt(purge_id)


def opened(signed: am.SignedReceipt) -> am.PurgeReceipt:
    return verify_receipt(by_id([SIGNER.public_key]), signed)


def counts_of(receipt: am.PurgeReceipt, owner: str) -> dict[str, int]:
    return next(entry.counts for entry in receipt.owners if entry.owner == owner)


@asynccontextmanager
async def policy_on(
    broker: MemoryBroker,
    redis: RedisStore,
    kept: tuple[tuple[str, IdempotencyRecords], ...] = (),
    prefix: str = "",
    watch: IngressWatch | None = None,
) -> AsyncIterator[Policy]:
    prefix, bus = prefix or f"test-{secrets.token_hex(4)}", MemoryBus(broker, "policy")
    records, watch = Records(redis, prefix), watch or IngressWatch()
    for tenant in (ACME, OTHER):
        await records.change_tenant(tenant, lambda old: old, create=True)
    admin = Admin(bus, redis, records)
    metrics = Metrics("policy")
    clock = Clock()
    purges = Purges(bus, redis, admin, kept, watch, SIGNER, prefix=prefix, listened_s=0.0, metrics=metrics, clock=clock)
    found = Policy(purges, admin, [], bus, metrics, clock)

    async def on_audit(delivery: object) -> None:
        found.audit.append(delivery.message.action)  # type: ignore[attr-defined]

    auditing = await bus.consume(AUDIT_STREAM, subjects.audit("policy"), m.AuditRecord, on_audit, durable="test")
    await purges.start()
    try:
        yield found
    finally:
        await purges.stop()
        await auditing.stop()
        await bus.close()


@asynccontextmanager
async def index_on(broker: MemoryBroker, redis: RedisStore) -> AsyncIterator[IndexService]:
    keys = ScopeKeys(redis, Sealer(bytes(32)), secrets.token_bytes, f"test-{secrets.token_hex(4)}")
    bus = MemoryBus(broker, "prefix-cache-index")
    service = IndexService(bus, keys, worker_support.VERIFIER)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()
        await bus.close()


def grant_of(name: str, tenant: TenantId = ACME, generation: int = 1) -> SignedGrant:
    grant = Grant(
        request_id=RequestId(name),
        tenant=tenant,
        scope=Scope(tenant, (), ScopeGeneration(generation)),
        model="m",
        klass="interactive",
        reservation_id="r",
        reserved_tokens=1,
        expires_s=time.time() + 600,
        budget_s=60,
    )
    return worker_support.SIGNER.sign(grant)


async def begin(cell: Cell, name: str, tenant: TenantId, sampling: SamplingParams = LONG, generation: int = 1) -> None:
    prompt = list(range(100, 117)) if tenant == ACME else list(range(300, 317))
    grant = grant_of(name, tenant, generation)
    reserved = await cell.driver.reserve(
        cell.decode_id, prompt, a=attempt(name), grant=grant, prefill=cell.prefill_id, sampling=sampling
    )
    assert isinstance(reserved, m.Reserved), reserved
    if reserved.num_cached_tokens < len(prompt) - 1:
        run = m.PrefillRun(
            attempt=attempt(name),
            term=worker_support.Term(1),
            grant=grant,
            token_ids=pack_tokens(prompt[:-1]),
            decode_worker=cell.decode_id,
            lease_token=reserved.lease_token,
            decode_incarnation=reserved.incarnation,
            first_token=reserved.num_cached_tokens,
        )
        await cell.driver.bus.request(
            subjects.prefill(cell.prefill_id, "run"), run, m.PrefillAccepted | m.Refusal, timeout_s=10
        )


def zeros(cell: Cell) -> list[bool]:
    """Whether nothing but zeros lies in the pool file of each worker."""
    return [not any(shell.core.pool.path.read_bytes()) for shell in (cell.decode.shell, cell.prefill.shell)]


async def test_a_purge_reaches_every_copy_of_index_and_workers(redis: RedisStore, tmp_path: Path) -> None:
    async with (
        cell(options(tmp_path, fake_speed=1.0, pool_bytes=1024 * 16)) as cells,
        index_on(cells.broker, redis) as index,
        policy_on(cells.broker, redis) as policy,
    ):
        # Given a tenant with cached blocks at both workers and a request that runs, and another tenant's that runs too
        await begin(cells, "req-cached", ACME, msgspec.structs.replace(LONG, max_tokens=6))
        await cells.driver.final("req-cached")
        await until(lambda: len(index.index) >= 4)
        await begin(cells, "req-other", OTHER)
        await begin(cells, "req-runs", ACME, msgspec.structs.replace(LONG, max_tokens=2000))
        await until(
            lambda: cells.driver.tokens.get(RequestId("req-runs")) and cells.driver.tokens[RequestId("req-other")]
        )
        # When the tenant is purged
        ordered = await policy.order(ACME)
        assert ordered.generation == 2
        assert not ordered.complete
        # Then its request ends with the error, whole and not as if it had been complete
        final = await cells.driver.final("req-runs")
        assert final.error is not None
        assert from_wire(final.error).code == PURGED
        # And everybody says what he took
        receipt = await policy.complete(ordered.purge_id)
        assert receipt.pending == ()
        assert {"policy", "prefix-cache-index", "redis", "decode-1", "prefill-1"} == {o.owner for o in receipt.owners}
        assert counts_of(receipt, "prefix-cache-index")["scope_keys"] == 1
        assert counts_of(receipt, "decode-1")["requests"] == 1
        assert counts_of(receipt, "decode-1")["blocks"] >= 5
        assert counts_of(receipt, "prefill-1")["blocks"] >= 4
        # And the other's goes on to its end
        assert (await cells.driver.final("req-other")).finish == "length"
        # And what is of the old generation is refused everywhere, what is of the new one runs
        old = grant_of("req-old")
        refused = await cells.driver.reserve(cells.decode_id, [1, 2, 3], a=attempt("req-old"), grant=old)
        assert isinstance(refused, m.Refusal)
        assert refused.never
        assert from_wire(refused.error).code == PURGED
        match = m.Match(grant=old, token_ids=pack_tokens(list(range(100, 117))))
        matched = await cells.driver.bus.request(subjects.INDEX_MATCH, match, m.Matched | m.Refusal, timeout_s=5)
        assert isinstance(matched, m.Refusal)
        cells.driver.held.clear()
        await begin(cells, "req-new", ACME, msgspec.structs.replace(LONG, max_tokens=4), generation=2)
        assert (await cells.driver.final("req-new")).finish == "length"
        # And when the other is purged too, and the new generation, the pools hold nothing but zeros
        for tenant in (OTHER, ACME):
            await policy.complete((await policy.order(tenant)).purge_id)
        assert zeros(cells) == [True, True]
        assert len(index.index) == 0
        await cells.check()
        await until(lambda: policy.audit.count("purge_ordered") == policy.audit.count("purge_completed") == 3)


def beat_of(worker: str, host: str = "h", boot_id: str = "b") -> m.WorkerBeat:
    return m.WorkerBeat(
        worker=WorkerId(worker),
        role="decode",
        pool="p",
        incarnation=Incarnation(1),
        boot_id=boot_id,
        host=host,
        number=1,
    )


async def test_who_is_not_there_stays_pending_and_is_told_when_it_comes_back(redis: RedisStore) -> None:
    broker = MemoryBroker()
    worker, prefix = MemoryBus(broker, "decode"), f"test-{secrets.token_hex(4)}"
    async with index_on(broker, redis):
        async with policy_on(broker, redis, prefix=prefix) as policy:
            # Given two workers of which nobody takes orders
            for name in ("decode-frozen", "decode-killed"):
                await worker.publish(subjects.worker_beat(WorkerId(name)), beat_of(name))
            await asyncio.sleep(0)
            ordered = await policy.order(ACME)

            await policy.complete(ordered.purge_id, but=("decode-frozen", "decode-killed"))
        # When policy starts anew, one of them comes back, and another one finds the pool of the other
        async with policy_on(broker, redis, prefix=prefix) as policy:
            taken: list[str] = []

            async def take(order: m.PurgeOrder) -> dict[str, int]:
                taken.append(order.purge_id)
                return {"blocks": 7}

            orders = PurgeOrders(worker, "decode", "decode-frozen", take)
            await orders.start()

            await policy.complete(ordered.purge_id, but=("decode-killed",))
            assert policy.metrics.value(names.PURGES_PENDING) == 1
            gone = (WorkerId("decode-killed"),)
            await acknowledge(worker, m.PurgeAck(purge_id="", owner="decode-new", service="decode", wiped=gone))
            # Then the purge is complete, and each was asked once only
            receipt = await policy.complete(ordered.purge_id)
            assert counts_of(receipt, "decode-frozen") == {"blocks": 7}
            assert counts_of(receipt, "decode-killed") == {"pool_gone": 1}
            assert taken == [ordered.purge_id]

            async def told() -> bool:
                await policy.purges.sweep()
                return policy.metrics.value(names.PURGES_PENDING) == 0

            await until(told)
            # And the next one does not wait for the dead
            again = await policy.order(OTHER)
            assert "decode-killed" not in again.pending
            await orders.stop()
    await worker.close()


async def until_told(policy: Policy, orders: PurgeOrders) -> None:
    """Policy sweeps until an owner that came later knows of the tenant's purge."""

    async def knows() -> bool:
        await policy.purges.sweep()
        return orders.generations.is_over(Scope(ACME))

    await until(knows)


async def test_a_worker_that_began_after_a_purge_hears_of_it_while_old_grants_may_live(redis: RedisStore) -> None:
    broker = MemoryBroker()
    async with index_on(broker, redis), policy_on(broker, redis) as policy, policy_bus(broker, "decode") as bus:
        await policy.complete((await policy.order(ACME)).purge_id)
        orders = PurgeOrders(bus, "decode", "decode-1", nothing)
        await orders.start()
        orders.generations.require_live(Scope(ACME))
        await bus.publish(subjects.worker_beat(WorkerId("decode-1")), beat_of("decode-1"))

        await until_told(policy, orders)
        await orders.stop()


async def test_who_comes_while_others_are_told_is_told_too(redis: RedisStore) -> None:
    broker = MemoryBroker()
    async with index_on(broker, redis), policy_on(broker, redis) as policy, policy_bus(broker, "decode") as bus:
        await policy.complete((await policy.order(ACME)).purge_id)
        orders = PurgeOrders(bus, "decode", "decode-2", nothing)
        publish, told = policy.bus.publish, 0

        async def publish_then_come(subject: str, message: Message, **fields: Any) -> None:
            nonlocal told
            await publish(subject, message, **fields)
            told += 1
            if told == 1:
                await orders.start()
                await bus.publish(subjects.worker_beat(WorkerId("decode-2")), beat_of("decode-2"))
                await until(lambda: WorkerId("decode-2") in policy.purges._copies.new_workers)

        policy.bus.publish = publish_then_come  # type: ignore[method-assign]
        await bus.publish(subjects.worker_beat(WorkerId("decode-1")), beat_of("decode-1"))

        await until_told(policy, orders)
        await orders.stop()


async def test_newcomers_are_told_again_when_that_failed(redis: RedisStore) -> None:
    broker = MemoryBroker()
    async with index_on(broker, redis), policy_on(broker, redis) as policy, policy_bus(broker, "decode") as bus:
        await policy.complete((await policy.order(ACME)).purge_id)
        await bus.publish(subjects.worker_beat(WorkerId("decode-1")), beat_of("decode-1"))
        await until(lambda: policy.purges._copies.newcomers)
        publish, told = policy.bus.publish, 0

        async def fail_once(subject: str, message: Message, **fields: Any) -> None:
            nonlocal told
            told += 1
            if told == 1:
                raise Unavailable("away")
            await publish(subject, message, **fields)

        policy.bus.publish = fail_once  # type: ignore[method-assign]
        with pytest.raises(Unavailable):
            await policy.purges.sweep()
        await policy.purges.sweep()
        assert told == 2


async def test_a_purge_that_cannot_go_on_keeps_no_other_from_it(redis: RedisStore) -> None:
    broker = MemoryBroker()
    async with policy_on(broker, redis) as policy:
        first = (await policy.order(ACME)).purge_id
        later = (await policy.order(OTHER)).purge_id
        for purge_id in (first, later):
            await policy.purges._acked(purge_id, "prefix-cache-index", {})
        rewritten, asked = policy.purges._store.log_is_rewritten, 0

        async def fail_first() -> bool | None:
            nonlocal asked
            asked += 1
            if asked == 1:
                raise Unavailable("away")
            return await rewritten()

        policy.purges._store.log_is_rewritten = fail_first  # type: ignore[method-assign]
        with pytest.raises(Unavailable):
            await policy.purges.sweep()
        assert later in policy.purges._rewriting
        await policy.complete(first)
        await policy.complete(later)


async def test_a_rewrite_of_the_log_that_runs_already_is_waited_for(redis: RedisStore) -> None:
    broker = MemoryBroker()
    async with policy_on(broker, redis) as policy:
        ordered = (await policy.order(ACME)).purge_id
        await policy.purges._acked(ordered, "prefix-cache-index", {})
        store, running, begun = policy.purges._store, True, 0

        async def log_is_rewritten() -> bool | None:
            return None if running else True

        async def rewrite_log() -> None:
            nonlocal begun
            begun += 1

        store.log_is_rewritten = log_is_rewritten  # type: ignore[method-assign]
        store.rewrite_log = rewrite_log  # type: ignore[method-assign]
        # While one runs that may have begun before, nothing is asked of Redis and nothing is acknowledged
        assert (await policy.receipt(ordered)).pending == ("redis",)
        assert begun == 0
        running = False
        await policy.complete(ordered)
        assert begun == 1


async def nothing(order: m.PurgeOrder) -> dict[str, int]:
    return {}


async def test_nobody_acknowledges_for_another_service(redis: RedisStore) -> None:
    broker = MemoryBroker()
    async with policy_on(broker, redis) as policy, policy_bus(broker, "gateway") as gateway:
        await gateway.publish(subjects.worker_beat(WorkerId("decode-1")), beat_of("decode-1"))
        await asyncio.sleep(0)
        ordered = await policy.order(ACME)
        for forged in (
            m.PurgeAck(purge_id=ordered.purge_id, owner="decode-1", service="gateway"),
            m.PurgeAck(purge_id="", owner="gateway-1", service="gateway", wiped=(WorkerId("decode-1"),)),
        ):
            await acknowledge(gateway, forged)
        await acknowledge(gateway, m.PurgeAck(purge_id=ordered.purge_id, owner="gateway-1", service="gateway"))

        async def heard() -> bool:
            return any(entry.owner == "gateway-1" for entry in (await policy.receipt(ordered.purge_id)).owners)

        await until(heard)
        assert "decode-1" in (await policy.receipt(ordered.purge_id)).pending
        # but the operator may say that a machine is lost, of workers that are waited for only
        with pytest.raises(InvalidInput, match="decode-2"):
            await policy.purges.declare_gone(ordered.purge_id, ["decode-2"])
        policy.clock.late_s += WORKER_SILENT_S
        await policy.purges.declare_gone(ordered.purge_id, ["decode-1"])
        assert "decode-1" not in (await policy.receipt(ordered.purge_id)).pending


async def test_a_worker_that_lives_cannot_be_declared_gone_and_one_that_comes_back_counts_again(
    redis: RedisStore,
) -> None:
    broker = MemoryBroker()
    async with policy_on(broker, redis) as policy, policy_bus(broker, "decode") as bus:
        for name in ("decode-1", "decode-2"):
            await bus.publish(subjects.worker_beat(WorkerId(name)), beat_of(name))
        await until(lambda: len(policy.purges._copies.new_workers) == 2)
        ordered = await policy.order(ACME)
        policy.clock.late_s += WORKER_SILENT_S
        await bus.publish(subjects.worker_beat(WorkerId("decode-1")), beat_of("decode-1"))
        await until(lambda: policy.purges._copies.is_heard(WorkerId("decode-1"), policy.clock()))
        # Of several named, none is given up when one lives
        with pytest.raises(Conflict, match="decode-1 was heard"):
            await policy.purges.declare_gone(ordered.purge_id, ["decode-2", "decode-1"])
        assert {"decode-1", "decode-2"} <= set((await policy.receipt(ordered.purge_id)).pending)
        # One that was silent is given up, and later purges do not wait for it
        policy.clock.late_s += WORKER_SILENT_S
        await policy.purges.declare_gone(ordered.purge_id, ["decode-1"])
        assert "decode-1" not in (await policy.order(OTHER)).pending
        # until it beats all the same: it was frozen
        await policy.purges.sweep()
        await bus.publish(subjects.worker_beat(WorkerId("decode-1")), beat_of("decode-1"))
        await until(lambda: policy.purges._copies.newcomers)
        assert "decode-1" in (await policy.order(OTHER)).pending


async def test_what_lay_in_the_memory_of_a_machine_is_gone_when_it_was_started_anew(redis: RedisStore) -> None:
    broker, prefix = MemoryBroker(), f"test-{secrets.token_hex(4)}"
    async with policy_bus(broker, "decode") as bus:

        async def beat(policy: Policy, *beats: m.WorkerBeat) -> None:
            for one in beats:
                await bus.publish(subjects.worker_beat(one.worker), one)
            now = policy.clock()
            await until(lambda: all(policy.purges._copies.is_heard(one.worker, now) for one in beats))

        async with policy_on(broker, redis, prefix=prefix) as policy:
            await redis.execute("HSET", f"{prefix}:pools", "decode-noted-at-first", 1.5)
            await beat(policy, beat_of("decode-1"), beat_of("decode-other", host="other"))
            ordered = await policy.order(ACME)
        # When policy and that machine come back, and another of the same name lives on
        async with policy_on(broker, redis, prefix=prefix) as policy:
            new = (beat_of("decode-2", boot_id="b2"), beat_of("decode-3"))
            policy.clock.late_s += WORKER_SILENT_S
            await beat(policy, *new)
            pending = (await policy.receipt(ordered.purge_id)).pending
            assert {"decode-1", "decode-other", "decode-noted-at-first"} <= set(pending)
            # then nothing is said of a pool until only the new boot is heard
            policy.clock.late_s += WORKER_SILENT_S
            await beat(policy, *new[:1])
            receipt = await policy.receipt(ordered.purge_id)
            assert {"decode-other", "decode-noted-at-first"} <= set(receipt.pending)
            assert counts_of(receipt, "decode-1") == {"machine_restarted": 1}
            # and later purges wait for neither, but for who beats all the same
            assert not {"decode-1", "decode-3"} & set((await policy.order(OTHER)).pending)
            await bus.publish(subjects.worker_beat(new[1].worker), new[1])
            await until(lambda: policy.purges._copies.newcomers)
            assert "decode-3" in (await policy.order(OTHER)).pending


async def test_an_ingress_is_waited_for_as_long_as_its_lease_and_told_when_it_is_back(redis: RedisStore) -> None:
    broker, watch = MemoryBroker(), IngressWatch()
    gateway = IngressId("gateway-1")
    async with index_on(broker, redis), policy_on(broker, redis, watch=watch) as policy:
        now = policy.clock
        watch.beat(gateway, (), now())
        ordered = await policy.order(ACME)
        # Nobody listens: the bus was restarted, and policy is back before the gateway
        await policy.complete(ordered.purge_id, but=(gateway,))
        policy.clock.late_s += LEASE_S - 3.0
        assert gateway in (await policy.receipt(ordered.purge_id)).pending
        watch.nobody_listens(gateway, now())
        policy.clock.late_s += 3.0
        receipt = await policy.complete(ordered.purge_id)
        assert counts_of(receipt, gateway) == {"process_gone": 1}
        await policy.purges.sweep()
        # When it is there after all, it hears of what it missed
        bus = MemoryBus(broker, "gateway")
        orders = PurgeOrders(bus, "gateway", gateway, nothing)
        await orders.start()
        watch.beat(gateway, (), now())

        await until_told(policy, orders)
        await orders.stop()
        await bus.close()


@asynccontextmanager
async def policy_bus(broker: MemoryBroker, name: str) -> AsyncIterator[MemoryBus]:
    bus = MemoryBus(broker, name)
    yield bus
    await bus.close()


def test_a_receipt_that_was_changed_does_not_verify() -> None:
    from services.policy.purge_record import OwnerAck, PurgeRecord, receipt_of
    from shared.security.receipts import sign_receipt

    record = PurgeRecord(
        purge_id="p", tenant=ACME, generation=ScopeGeneration(2), ordered_s=1.0, expected=("policy", "decode-1")
    )
    receipt = receipt_of(record, {"policy": OwnerAck(2.0, {"responses": 3})}, 3.0)
    assert (receipt.complete, receipt.pending) == (False, ("decode-1",))
    signed, keys = sign_receipt(SIGNER, receipt), by_id([SIGNER.public_key])
    assert verify_receipt(keys, signed) == receipt
    changed = signed.payload.replace('"complete":false', '"complete":true')
    for wrong in (
        msgspec.structs.replace(signed, payload=changed),
        msgspec.structs.replace(signed, key_id="other"),
        msgspec.structs.replace(signed, signature="zz"),
    ):
        with pytest.raises(Forbidden):
            verify_receipt(keys, wrong)


async def kept_of(redis: RedisStore, prefix: str, tenant: str) -> set[str]:
    """Kinds of what Redis holds of a tenant's answers."""
    prefix = f"{prefix}:{{{tenant}}}:"
    names = [key.decode().removeprefix(prefix) async for key in redis._client.scan_iter(f"{prefix}*")]
    return {name.partition(":")[0] for name in names if name.startswith(("once", "response"))}


async def test_a_purge_takes_what_policy_keeps_of_a_tenant(redis: RedisStore) -> None:
    hold = asyncio.Event()
    hold.set()
    async with keyed_world(redis, hold=hold) as world:
        gateway, prefix = world.gateways[0], world.records._prefix
        owned = (("keyed_answers", world.records), ("responses", world.responses))
        async with (
            index_on(world.backend.broker, redis),
            policy_on(world.backend.broker, redis, owned, prefix, world.watch) as policy,
        ):
            # Given answers of two tenants under keys and stored, and one that still runs in the background
            for key in ("key-a", "key-b"):
                assert (await gateway.post("completions", KEYED, "k", key)).status_code == 200
                assert (await gateway.post("responses", STORED, "", key)).status_code == 200
            hold.clear()
            running = (await gateway.post("responses", RUNNING)).json()
            await until(lambda: gateway.service.ingress.sessions)
            before = await kept_of(redis, prefix, "tenant-b")
            assert before > {"once-parts", "response-parts", "response-input"}
            copies, clock = policy.purges._copies, policy.clock
            await until(lambda: copies.leaders(clock()) and copies.is_heard(WorkerId(STAND_INS[0]), clock()))
            # When one of them is purged
            ordered = await policy.order(TenantId("tenant-a"))
            receipt = await policy.complete(ordered.purge_id, but=STAND_INS)
            # Then nothing is left of it, what ran ends, and the other's is as it was
            assert counts_of(receipt, "policy") == {"keyed_answers": 1, "responses": 2}
            assert await kept_of(redis, prefix, "tenant-a") == set()
            await until(lambda: not gateway.service.ingress.sessions)
            found = await gateway.client.get(
                f"/v1/responses/{running['id']}", headers={"authorization": "Bearer key-a"}
            )
            assert found.status_code == 404
            assert await kept_of(redis, prefix, "tenant-a") == set()
            assert await kept_of(redis, prefix, "tenant-b") == before
            # And the order, told again, takes nothing that was made since; a purge of the cache takes nothing stored
            hold.set()
            assert (await gateway.post("completions", KEYED, "k")).status_code == 200
            await policy.receipt(ordered.purge_id)
            spared = await policy.order(TenantId("tenant-b"), cache_only=True)
            await policy.complete(spared.purge_id, but=STAND_INS)
            assert "once-parts" in await kept_of(redis, prefix, "tenant-a")
            assert await kept_of(redis, prefix, "tenant-b") == before
