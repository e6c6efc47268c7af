"""A tenant's purge takes its idempotency records and stored responses, those that run included, and nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.policy.purges import Purges
from shared.bus.bus import Delivery
from shared.bus.memory_bus import MemoryBus
from shared.bus.streams import PURGE_ACK_STREAM
from shared.contracts import messages as m
from shared.contracts import subjects
from shared.contracts.ids import ScopeGeneration, TenantId
from shared.store.redis_store import RedisStore, connect_redis
from tests.pipeline.gateway_support import MODEL
from tests.pipeline.keyed_support import World, keyed_world, until
from tests.servers import RedisServer

KEYED = {"model": MODEL, "prompt": "hi"}
STORED = {"model": MODEL, "input": "hi", "store": True}
RUNNING = {"model": MODEL, "input": "hi", "background": True}


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[RedisStore]:
    async with connect_redis(redis_server.url) as redis:
        yield redis


async def kept(redis: RedisStore, world: World, tenant: str) -> set[str]:
    """Kinds of what Redis holds of a tenant's answers."""
    prefix = f"{world.records._prefix}:{{{tenant}}}:"
    names = [key.decode().removeprefix(prefix) async for key in redis._client.scan_iter(f"{prefix}*")]
    return {name.partition(":")[0] for name in names if name.startswith(("once", "response"))}


async def test_a_purge_takes_what_policy_keeps_of_a_tenant(redis: RedisStore) -> None:
    hold = asyncio.Event()
    hold.set()
    async with keyed_world(redis, hold=hold) as world:
        gateway, bus = world.gateways[0], MemoryBus(world.backend.broker, "policy")
        acks: list[m.PurgeAck] = []

        async def on_ack(delivery: Delivery) -> None:
            acks.append(delivery.message)

        index = MemoryBus(world.backend.broker, "prefix-cache-index")
        taking = await index.consume(PURGE_ACK_STREAM, subjects.PURGE_ACK, m.PurgeAck, on_ack, durable="index")
        purges = Purges(bus, redis, (world.records, world.responses), world.records._prefix)
        await purges.start()
        # Given answers of two tenants under keys and stored, and one that still runs in the background
        for key in ("key-a", "key-b"):
            assert (await gateway.post("completions", KEYED, "k", key)).status_code == 200
            assert (await gateway.post("responses", STORED, "", key)).status_code == 200
        hold.clear()
        running = (await gateway.post("responses", RUNNING)).json()
        await until(lambda: gateway.service.ingress.sessions)
        before = await kept(redis, world, "tenant-b")
        assert before > {"once-parts", "response-parts", "response-input"}
        # When one of them is purged
        order = m.PurgeOrder(purge_id="p-1", tenant=TenantId("tenant-a"), generation=ScopeGeneration(2))
        await index.publish_durable(subjects.PURGE_ORDER, order, message_id="one")
        await until(lambda: acks)
        # Then nothing is left of it, what ran ends, and the other's is as it was
        assert (acks[0].purge_id, acks[0].owner, acks[0].counts) == ("p-1", "policy", (1, 2))
        assert await kept(redis, world, "tenant-a") == set()
        await until(lambda: not gateway.service.ingress.sessions)
        found = await gateway.client.get(f"/v1/responses/{running['id']}", headers={"authorization": "Bearer key-a"})
        assert found.status_code == 404
        assert await kept(redis, world, "tenant-a") == set()
        assert await kept(redis, world, "tenant-b") == before
        # And the order, delivered again, takes nothing that was made since
        hold.set()
        assert (await gateway.post("completions", KEYED, "k")).status_code == 200
        await index.publish_durable(subjects.PURGE_ORDER, order, message_id="two")
        other = m.PurgeOrder(purge_id="p-2", tenant=TenantId("tenant-b"), generation=ScopeGeneration(2))
        await index.publish_durable(subjects.PURGE_ORDER, other, message_id="three")
        await until(lambda: acks[-1].purge_id == "p-2")
        assert "once-parts" in await kept(redis, world, "tenant-a")
        assert await kept(redis, world, "tenant-b") == set()
        await purges.stop()
        await taking.stop()
        await bus.close()
        await index.close()
