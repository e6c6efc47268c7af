"""Several gateways on one memory bus, with policy's real idempotency desk behind them, and one worker stand-in."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import httpx

from services.gateway import keyed_run, once
from services.gateway.app import Door, build_app
from services.gateway.server import bind, serve
from services.gateway.service import GatewayService
from services.gateway.settings import GatewayConfig
from services.policy import orphans
from services.policy.accounts import Accounts
from services.policy.idempotency import IdempotencyRecords
from services.policy.idempotency_desk import IdempotencyDesk
from services.policy.ingress_watch import IngressWatch
from services.policy.lost_ingresses import LostIngresses
from services.policy.orphans import Orphans
from services.policy.records import Records
from services.policy.responses import ResponseRecords
from services.policy.responses_desk import ResponsesDesk
from services.policy.tenants import KeyRecord
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.contracts import messages as m
from shared.contracts.grants import Limits
from shared.contracts.ids import IngressId, TenantId
from shared.contracts.parts import HeldAttempt, StreamRecord
from shared.ingress.config import IngressConfig
from shared.ingress.prompt_codec import PromptCodec
from shared.ingress.served_models import ServedModel, ServedModels
from shared.store.redis_store import RedisStore
from shared.store.sealed import Sealer
from shared.telemetry.setup import Telemetry
from tests.pipeline.gateway_support import CONTEXT, KEYS, MODEL, TOKENIZER, Backend

LIMIT_S = 30.0
HURRIED = (
    (keyed_run, "KEEP_S", 0.05),
    (keyed_run, "LATE_PAUSE_S", 0.1),
    (once, "POLL_S", 0.05),
    (orphans, "AGAIN_S", 0.2),
)
"""Pauses of production that no test needs to wait for."""


async def until(condition: Callable[[], Any], limit_s: float = LIMIT_S) -> None:
    """Poll until it holds."""
    deadline = time.monotonic() + limit_s
    while not (await found if isinstance(found := condition(), Awaitable) else found):
        assert time.monotonic() < deadline, "condition not met in time"
        await asyncio.sleep(0.02)


@dataclass
class SharedBackend(Backend):
    """A backend of several gateways: news go to the one that submitted."""

    ingresses: list[IngressId] = field(default_factory=list)

    def owner(self, request_id: str) -> IngressId:
        return next(s.ingress_id for s in reversed(self.submits) if s.attempt.request_id == request_id)

    async def _tell(self, event: Any) -> None:
        if isinstance(event, m.Placed | m.PlacementRefused):
            self.ingress = self.owner(event.attempt.request_id)
            await super()._tell(event)
            return
        for ingress in self.ingresses:
            self.ingress = ingress
            await super()._tell(event)

    async def _send(self, *records: StreamRecord, held: Sequence[HeldAttempt] = (), listing: bool = False) -> None:
        for ingress in self.ingresses:
            own = [r for r in records if self.owner(r.attempt.request_id) == ingress]
            listed = [h for h in held if self.owner(h.attempt.request_id) == ingress]
            if own or listing:
                self.ingress = ingress
                await super()._send(*own, held=listed, listing=listing)


@dataclass
class Gateway:
    """One of them, behind a real listener."""

    id: IngressId
    bus: MemoryBus
    service: GatewayService
    door: Door
    client: httpx.AsyncClient
    url: str
    killed: bool = False

    async def kill(self) -> None:
        """As `kill -9`: from one moment to the next nobody hears of it, nor it of anybody."""
        self.killed = True
        await self.bus.close()

    async def post(
        self, path: str, body: Any, idempotency: str = "", key: str = "key-a", **more: str
    ) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json", **more}
        if idempotency:
            headers["idempotency-key"] = idempotency
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.client.post(f"/v1/{path}", content=content, headers=headers)


@dataclass
class World:
    """Everything of a test."""

    backend: SharedBackend
    gateways: list[Gateway]
    records: IdempotencyRecords
    accounts: Accounts
    watch: IngressWatch
    desk: IdempotencyDesk
    lost: LostIngresses
    policy_records: Records
    responses: ResponseRecords
    orphans: Orphans

    async def settled(self, count: int) -> list[m.Settle]:
        """The settlements, once there are `count` and nothing runs."""
        running = lambda: any(g.service.ingress.sessions for g in self.gateways if not g.killed)  # noqa: E731
        await until(lambda: len(self.backend.settles) >= count and not running())
        assert len(self.backend.settles) == count
        return self.backend.settles


@asynccontextmanager
async def keyed_world(redis: RedisStore, count: int = 2, **options: Any) -> AsyncIterator[World]:
    """`count` gateways. `options`: of the backend, `linger_s`, `keep_alive_s`, and `context` in tokens."""
    linger_s, keep_alive_s = options.pop("linger_s", 60.0), options.pop("keep_alive_s", 15.0)
    context = options.pop("context", CONTEXT)
    broker, prefix = MemoryBroker(), f"test-{secrets.token_hex(4)}"
    records, accounts = Records(redis, prefix), Accounts(redis, prefix)
    for key, tenant in KEYS.items():
        digest = hashlib.sha256(key.encode()).hexdigest()
        found = KeyRecord(id=key, tenant=TenantId(tenant), hash=digest)
        await records.change_key(digest, lambda old, found=found: found)
        await records.change_tenant(TenantId(tenant), lambda old: old, create=True)
    kept = IdempotencyRecords(redis, Sealer(bytes(32)), 600, prefix)
    responses = ResponseRecords(redis, Sealer(bytes(32)), 600, prefix)
    watch = IngressWatch(quiet_s=0.3, lease_s=20.0, gone_s=0.3)
    policy_bus = MemoryBus(broker, "policy")
    desk = IdempotencyDesk(policy_bus, records, kept, watch)
    stored = ResponsesDesk(policy_bus, records, responses, watch)
    lost = LostIngresses(records, accounts, (kept, responses), watch, Limits())
    offers = Orphans(policy_bus, records, responses, watch)
    ids = [IngressId(f"gateway-{number}") for number in range(1, count + 1)]
    backend = SharedBackend(broker, ingress=ids[0], ingresses=ids, **options)
    await desk.start()
    await stored.start()
    async with backend.run(), AsyncExitStack() as stack:
        for module, name, pause_s in HURRIED:
            stack.enter_context(patch.object(module, name, pause_s))
        stack.push_async_callback(policy_bus.close)
        stack.push_async_callback(desk.stop)
        stack.push_async_callback(stored.stop)
        gateways = [
            await stack.enter_async_context(_gateway(broker, ingress, linger_s, keep_alive_s, context))
            for ingress in ids
        ]
        yield World(backend, gateways, kept, accounts, watch, desk, lost, records, responses, offers)


@asynccontextmanager
async def _gateway(
    broker: MemoryBroker, ingress: IngressId, linger_s: float, keep_alive_s: float, context: int
) -> AsyncIterator[Gateway]:
    bus = MemoryBus(broker, "gateway")
    ingress_config = IngressConfig(ingress, "gateway", tick_s=0.05, beat_s=0.05, drain_s=0.1, hop_timeout_s=2.0)
    config = GatewayConfig(ingress=ingress_config, keyed_linger_s=linger_s, keep_alive_s=keep_alive_s)
    models = ServedModels([ServedModel(MODEL, "default", context, PromptCodec(TOKENIZER, context))])
    async with Telemetry("gateway", bus) as telemetry:
        service = await GatewayService(bus, config, telemetry, models).__aenter__()
        door, sock = Door(service), bind("127.0.0.1", 0)
        await door.stored.serve(bus)
        async with serve(build_app(door), sock) as listener:
            url = f"http://127.0.0.1:{listener.port}"
            async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client:
                gateway = Gateway(ingress, bus, service, door, client, url)
                yield gateway
        if not gateway.killed:
            await service.__aexit__(None, None, None)
            await bus.close()
        models.close()
