"""Everything of a tenant, deleted: its files and uploads, batches with their lines and results, its queue."""

from __future__ import annotations

from services.batch.keys import Keys, lua
from services.batch.redis_types import number
from shared.contracts.ids import TenantId
from shared.contracts.messages import PurgeOrder
from shared.store.redis_store import RedisStore

AT_ONCE = 1000
PASSES = 2
"""What a process still writes while the first one deletes the batch it writes for, the second one finds."""


_RAISE = lua("raise_to")


class PurgeStore:
    """Purges in Redis. Methods raise Unavailable when Redis does not answer."""

    def __init__(self, redis: RedisStore, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    async def purge(self, order: PurgeOrder) -> dict[str, int]:
        """Delete all that was made before the order, once: the same order again takes nothing that was made since.
        Returns how many files and batches there were."""
        done = self._keys.spared(order.tenant, order.purge_id)
        found = await self._redis.execute("HMGET", done, "files", "batches")
        if found[0] is None:
            await self._redis.script(_RAISE, [self._lines_before(order.tenant)], (int(order.ordered_s * 1e6),))
            counts = {"files": 0, "batches": 0}
            for _ in range(PASSES):
                await self._pass(order.tenant, counts)
            await self._redis.execute("HSET", done, "files", counts["files"], "batches", counts["batches"])
            return counts
        return {"files": number(found[0]), "batches": number(found[1])}

    async def purged_us(self, tenant: TenantId) -> int:
        """Queued lines from before this time (unix microseconds) are of what was purged; 0: there was no purge."""
        return number(await self._redis.execute("GET", self._lines_before(tenant)))

    def _lines_before(self, tenant: TenantId) -> str:
        return self._keys.spared(tenant, "lines-before")

    async def _pass(self, tenant: TenantId, counts: dict[str, int]) -> None:
        prefix, spared = self._keys.of(tenant, ""), self._keys.spared(tenant, "")
        cursor = 0
        while True:
            cursor, keys = await self._redis.execute("SCAN", cursor, "MATCH", f"{prefix}*", "COUNT", AT_ONCE)
            names = [name for key in keys if not (name := key.decode()).startswith(spared)]
            for name in names:
                kind, _, rest = name.removeprefix(prefix).partition(":")
                if rest and ":" not in rest and kind in ("file", "job"):
                    counts["files" if kind == "file" else "batches"] += 1
            if names:
                await self._redis.execute("UNLINK", *names)
            if not (cursor := int(cursor)):
                return
