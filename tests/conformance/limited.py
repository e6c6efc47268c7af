"""A gateway with the real policy behind it, Redis included, and the usual stand-ins for the rest."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from services.policy.accounts import Accounts
from services.policy.admission import Terms
from services.policy.records import Records
from services.policy.service import Defaults, PolicyService
from services.policy.tenants import KeyRecord, OwnLimits
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.contracts.grants import Limits
from shared.contracts.ids import TenantId
from shared.security.grant_signature import GrantSigner
from shared.store.redis_store import connect_redis
from tests.pipeline.gateway_support import KEYS, Backend, Stack, http_stack

TERMS = Terms(budget_s={"interactive": 60.0, "analysis": 60.0, "batch": 60.0}, margin_s=5.0)
TENANT = TenantId("tenant-a")
LIMIT_S = 30.0


@dataclass
class Limited:
    """What a test looks at."""

    stack: Stack
    url: str
    accounts: Accounts

    async def nothing_held(self) -> None:
        """Returns when nothing is held of tenant-a's limits."""
        async with asyncio.timeout(LIMIT_S):
            while int((await self.accounts.quota(TENANT)).get("held", 0)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def idle(self) -> None:
        """Returns when nothing runs, and nothing is held either."""
        async with asyncio.timeout(LIMIT_S):
            while self.stack.service.ingress.sessions:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await self.nothing_held()


@asynccontextmanager
async def limited_stack(redis_url: str, own: OwnLimits, **options: Any) -> AsyncIterator[Limited]:
    """`own`: limits of tenant-a, whose key is key-a; nobody else has any. `options`: of the backend."""
    broker, prefix = MemoryBroker(), f"test-{secrets.token_hex(4)}"
    async with connect_redis(redis_url) as redis:
        records, accounts = Records(redis, prefix), Accounts(redis, prefix)
        for key, tenant in KEYS.items():
            digest = hashlib.sha256(key.encode()).hexdigest()
            found = KeyRecord(id=key, tenant=TenantId(tenant), hash=digest)
            await records.change_key(digest, lambda old, found=found: found)
            limited = tenant == TENANT
            await records.change_tenant(
                TenantId(tenant),
                lambda old, limited=limited: type(old)(id=old.id, limits=own) if limited else old,
                create=True,
            )
        signer = GrantSigner(Ed25519PrivateKey.from_private_bytes(bytes(32)))
        bus = MemoryBus(broker, "policy")
        policy = PolicyService(bus, records, accounts, signer, Defaults(limits=Limits(), max_tokens=64, terms=TERMS))
        await policy.start()
        try:
            # a first answer's check against OpenAI's document may hold everything up for seconds
            async with http_stack(Backend(broker, policy=False, **options), hop_timeout_s=LIMIT_S) as (stack, url):
                yield Limited(stack, url, accounts)
        finally:
            await policy.stop()
            await bus.close()
