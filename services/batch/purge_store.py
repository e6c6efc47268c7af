"""What a tenant had made before a purge was ordered, deleted: files and uploads, batches, lines of its queue."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from services.batch.keys import Keys, lua
from services.batch.records import PURPOSE_INPUT, PURPOSE_OUTPUT, QUEUE_BATCH
from services.batch.redis_types import number, pairs
from shared.contracts.ids import BatchId, FileId, TenantId
from shared.contracts.messages import PurgeOrder
from shared.store.redis_store import RedisStore

AT_ONCE = 1000
PASSES = 2
"""What a process still writes while the first one deletes the batch it writes for, the second one finds."""
KEPT_S = 30 * 86400
"""What an order took is remembered for so long. The same order again takes nothing new, but would count nothing."""
_EVERYTHING_US = 2**53
_RAISE, _FILE, _JOB, _LINES, _REST = map(lua, ("raise_to", "purge_file", "purge_job", "purge_lines", "purge_rest"))
_BY_NUMBER = ("bodies", "results", "epochs", "lost", "settles")


class PurgeStore:
    """Purges in Redis. Methods raise Unavailable when Redis does not answer."""

    def __init__(self, redis: RedisStore, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    async def purge(self, order: PurgeOrder) -> dict[str, int]:
        """Delete all that was made before the order, which an order without a time takes for now. What was made since
        stays, however often, late or by how many processes the order is carried out.

        Returns how many files and batches there were.
        """
        tenant, done = order.tenant, self._keys.spared(order.tenant, order.purge_id)
        found = await self._redis.execute("HMGET", done, "files", "batches")
        if found[0] is not None:
            return {"files": number(found[0]), "batches": number(found[1])}
        ordered_us = int(order.ordered_s * 1e6)
        await self._redis.script(_RAISE, [self._lines_before(tenant)], (ordered_us,))
        counts = {"files": 0, "batches": 0}
        for _ in range(PASSES):
            await self._pass(tenant, ordered_us or _EVERYTHING_US, counts)
        kept = ("HSET", done, "files", counts["files"], "batches", counts["batches"])
        await self._redis.transaction([kept, ("EXPIRE", done, KEPT_S)])
        return counts

    async def purged_us(self, tenant: TenantId) -> int:
        """Queued lines from before this time (unix microseconds) are of what was purged; 0: there was no purge."""
        return number(await self._redis.execute("GET", self._lines_before(tenant)))

    def _lines_before(self, tenant: TenantId) -> str:
        return self._keys.spared(tenant, "lines-before")

    async def _pass(self, tenant: TenantId, before_us: int, counts: dict[str, int]) -> None:
        prefix, cursor = self._keys.of(tenant, ""), 0
        closed: list[str] = []
        while True:
            cursor, found = await self._redis.execute("SCAN", cursor, "MATCH", f"{prefix}*", "COUNT", AT_ONCE)
            names: dict[tuple[str, str], list[str]] = defaultdict(list)
            for key in found:
                kind, _, rest = (name := key.decode()).removeprefix(prefix).partition(":")
                names[kind, rest.partition(":")[0]].append(name)
            for (kind, name), keys in names.items():
                if kind == "file":
                    counts["files"] += await self._file(tenant, FileId(name), before_us)
                elif kind == "job" and name != QUEUE_BATCH:
                    counts["batches"] += await self._job(tenant, BatchId(name), keys, before_us)
                elif kind == "once":
                    closed += keys
            if not (cursor := int(cursor)):
                break
        counts["batches"] += await self._lines(tenant, before_us)
        for key in closed:
            await self._closed(tenant, key)
        await self._rest(tenant)

    async def _file(self, tenant: TenantId, file_id: FileId, before_us: int) -> int:
        keys = [self._keys.file(tenant, file_id), self._keys.file(tenant, file_id, "data")]
        keys += [self._keys.of(tenant, name) for name in ("stored", "uploads", "expiry", "files")]
        keys += [self._keys.of(tenant, "files", purpose) for purpose in (PURPOSE_INPUT, PURPOSE_OUTPUT)]
        return int(await self._redis.script(_FILE, keys, (file_id, before_us)))

    async def _closed(self, tenant: TenantId, key: str) -> None:
        file_id = await self._redis.execute("GET", key)
        if file_id and not await self._redis.execute("EXISTS", self._keys.file(tenant, FileId(file_id.decode()))):
            await self._redis.execute("UNLINK", key)

    async def _job(self, tenant: TenantId, batch_id: BatchId, found: Sequence[str], before_us: int) -> int:
        keys = [self._keys.job(tenant, batch_id), self._keys.job(tenant, batch_id, "tokens")]
        keys += [self._keys.of(tenant, name) for name in ("enqueued", "stored", "jobs", "active")]
        return int(await self._redis.script(_JOB, [*keys, *found], (batch_id, before_us)))

    async def _lines(self, tenant: TenantId, before_us: int) -> int:
        key, cursor, batches = self._keys.job(tenant, QUEUE_BATCH), 0, 0
        while True:
            cursor, found = await self._redis.execute("HSCAN", f"{key}:refs", cursor, "COUNT", AT_ONCE)
            refs = pairs(found)
            batches += await self._forget(tenant, [line for line, ref in refs.items() if _stored_us(ref) < before_us])
            if not (cursor := int(cursor)):
                break
        start = "-"
        while entries := await self._redis.execute("XRANGE", f"{key}:finished", start, "+", "COUNT", AT_ONCE):
            start = f"({entries[-1][0].decode()}"
            lines = [pairs(fields)["number"].decode() for _, fields in entries]
            refs_left = await self._redis.execute("HMGET", f"{key}:refs", *lines)
            gone = [entry for (entry, _), ref in zip(entries, refs_left, strict=True) if ref is None]
            if gone:
                await self._redis.execute("XDEL", f"{key}:finished", *gone)
        # why a line was given up tells of it, and names it only under seal
        await self._redis.execute("UNLINK", f"{key}:dead")
        return batches + await self._forget(tenant, [])

    async def _forget(self, tenant: TenantId, lines: Sequence[str]) -> int:
        keys = [self._keys.job(tenant, QUEUE_BATCH)]
        keys += self._keys.job_parts(tenant, QUEUE_BATCH, "origins", "ids", "refs", "tokens")
        keys += [self._keys.of(tenant, name) for name in ("enqueued", "stored")]
        keys += self._keys.job_parts(tenant, QUEUE_BATCH, *_BY_NUMBER, "finished", "lease")
        return int(await self._redis.script(_LINES, keys, (len(_BY_NUMBER), *lines)))

    async def _rest(self, tenant: TenantId) -> None:
        keys = [self._keys.of(tenant, name) for name in ("files", "uploads", "jobs")]
        keys.append(self._keys.job(tenant, QUEUE_BATCH))
        keys += [self._keys.of(tenant, name) for name in ("stored", "enqueued", "serial")]
        await self._redis.script(_REST, keys, ())


def _stored_us(ref: bytes) -> int:
    """When the stream took a line, by its origin, unix microseconds; 0 where that does not tell."""
    text = ref.partition(b" ")[0].rpartition(b"-")[2]
    return int(text) if text.isdigit() else 0
