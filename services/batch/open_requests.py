"""How many requests of one tenant are answered at the same time, so that none keeps the others waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from shared.contracts.errors import Overloaded
from shared.contracts.ids import TenantId


@dataclass(slots=True)
class _Tenant:
    turn: asyncio.Semaphore
    open: int = 0


class OpenRequests:
    """Takes them in turn, by tenant.

    Args:
        at_work: answered at the same time; the rest waits.
        most: open, those that wait included.
    """

    def __init__(self, at_work: int, most: int) -> None:
        self._at_work = at_work
        self._most = most
        self._tenants: dict[TenantId, _Tenant] = {}

    @asynccontextmanager
    async def one(self, tenant: TenantId) -> AsyncIterator[None]:
        """One of the tenant's. Raises Overloaded when it has too many."""
        found = self._tenants.setdefault(tenant, _Tenant(asyncio.Semaphore(self._at_work)))
        if found.open >= self._most:
            raise Overloaded(f"you have {self._most} requests open; wait for an answer", retry_after_s=1.0)
        found.open += 1
        try:
            async with found.turn:
                yield
        finally:
            found.open -= 1
            if not found.open:
                del self._tenants[tenant]
