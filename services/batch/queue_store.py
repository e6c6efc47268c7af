"""The standing batch of a tenant: lines that came over NATS get a number each, and results in order of finishing."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from services.batch.item_store import ItemStore
from services.batch.keys import Keys, lua
from services.batch.records import QUEUE_BATCH, ItemBody, JobSpec, QueueResult, QueueSlot
from services.batch.store_limits import StoreLimits
from shared.contracts.errors import InvalidInput
from shared.contracts.ids import TenantId
from shared.store.redis_store import RedisStore
from shared.store.sealed import Sealer

TRIM = 500
"""Most results one `trim` removes."""

_SLOT, _RELEASE, _PUT, _TRIM = (lua(f"queue_{name}") for name in ("slot", "release", "put", "trim"))


class QueueStore:
    """Standing batches. Claims, results and dead letters of their items are ItemStore's, under QUEUE_BATCH."""

    def __init__(self, redis: RedisStore, sealer: Sealer, keys: Keys, limits: StoreLimits) -> None:
        self._limits = limits
        self._redis = redis
        self._sealer = sealer
        self._keys = keys
        self._items = ItemStore(redis, sealer, keys)

    async def slot(self, tenant: TenantId, origin: str, custom_id: str, now_s: int) -> QueueSlot:
        """The number of a line; asking again with the same `origin` gives the same one.

        Args:
            origin: names the message, such as its stream sequence; no spaces.
            custom_id: empty when the line has no usable one.
        """
        if " " in origin:
            raise InvalidInput("an origin holds no space", param="origin")
        spec = JobSpec(endpoint="", created_s=now_s, expires_s=0)
        sealed = self._sealer.seal(tenant, f"job:{QUEUE_BATCH}", msgspec.msgpack.encode(spec))
        await self._redis.execute("SADD", self._keys.tenants, tenant)
        keys = [self._keys.job(tenant, QUEUE_BATCH)]
        keys += self._keys.job_parts(tenant, QUEUE_BATCH, "origins", "ids", "refs", "results")
        keys.append(self._keys.spared(tenant, "line-serial"))
        number, duplicate = await self._redis.script(_SLOT, keys, (origin, self._mark(tenant, custom_id), sealed))
        return QueueSlot(int(number), bool(duplicate))

    async def release(self, tenant: TenantId, number: int, custom_id: str) -> None:
        """The line is told to come again later: its custom_id is free. To be done before it gets that result."""
        keys = [self._keys.job(tenant, QUEUE_BATCH, "ids")]
        await self._redis.script(_RELEASE, keys, (self._mark(tenant, custom_id), str(number)))

    async def put_body(
        self, tenant: TenantId, number: int, body: ItemBody, *, tokens_limit: int = 0, lines_limit: int = 0
    ) -> str:
        """Keep a line's body, once.

        Returns "" when it is kept, "done" when the line has a result already or was purged, "over_limit" when the
        tenant would have more than `tokens_limit` prompt tokens waiting, "full" when more than `lines_limit` lines
        (0 = any number), "over_storage" when it would store too much.
        """
        keys = [self._keys.job(tenant, QUEUE_BATCH)]
        keys += self._keys.job_parts(tenant, QUEUE_BATCH, "bodies", "results", "tokens")
        keys += [self._keys.of(tenant, name) for name in ("enqueued", "stored")]
        keys.append(self._keys.job(tenant, QUEUE_BATCH, "refs"))
        sealed = self._items.seal_body(tenant, QUEUE_BATCH, number, body)
        code = await self._redis.script(
            _PUT,
            keys,
            (str(number), sealed, body.prompt_tokens, tokens_limit, lines_limit, self._limits.max_stored_bytes),
        )
        return {1: "", 0: "done", -1: "over_limit", -2: "full", -3: "over_storage"}[int(code)]

    async def waiting(self, tenant: TenantId) -> int:
        """Lines of the standing batch without a result."""
        key = self._keys.job(tenant, QUEUE_BATCH)
        total, *finished = await self._redis.execute("HMGET", key, "total", "completed", "failed")
        return int(total or 0) - sum(int(count or 0) for count in finished)

    async def used_by(self, tenants: Sequence[TenantId]) -> list[TenantId]:
        """Those of them that ever sent a line."""
        found = await self._redis.transaction([("EXISTS", self._keys.job(t, QUEUE_BATCH)) for t in tenants])
        return [tenant for tenant, used in zip(tenants, found, strict=True) if used]

    async def open_items(self, tenant: TenantId) -> tuple[list[int], int]:
        """Numbers of the lines that are to be run, in order, and how often any line was claimed."""
        key = self._keys.job(tenant, QUEUE_BATCH)
        numbers, claims = await self._redis.transaction([("HKEYS", f"{key}:bodies"), ("HGET", key, "claims")])
        return sorted(map(int, numbers)), int(claims or 0)

    async def results(self, tenant: TenantId, after: str, limit: int) -> tuple[list[QueueResult], bool]:
        """Up to `limit` results behind cursor `after` (empty: from the oldest kept), and whether more follow.

        Raises InvalidInput for a cursor that is none.
        """
        start = f"({after}" if _is_cursor(after) else "-"
        if after and start == "-":
            raise InvalidInput("after: this is not a cursor", param="after")
        key = self._keys.job(tenant, QUEUE_BATCH, "finished")
        entries = await self._redis.execute("XRANGE", key, start, "+", "COUNT", limit + 1)
        listed = [(cursor.decode(), _field(fields)) for cursor, fields in entries[:limit]]
        found = await self._items.results(tenant, QUEUE_BATCH, [number for _, number in listed])
        page = [QueueResult(cursor, number, found[number]) for cursor, number in listed if number in found]
        return page, len(entries) > limit

    async def note_retention(self, tenant: TenantId, retention_s: int) -> None:
        """How long results of the tenant may be kept, as of grants."""
        await self._redis.execute("SET", self._keys.spared(tenant, "retention"), retention_s)

    async def retention_s(self, tenant: TenantId) -> int:
        """As noted last; -1: none."""
        found = await self._redis.execute("GET", self._keys.spared(tenant, "retention"))
        return -1 if found is None else int(found)

    async def trim(self, tenant: TenantId, before_s: int = 0) -> int:
        """Remove results that finished before that time, and the oldest of too many; how many went, at most TRIM."""
        keys = self._keys.job_parts(tenant, QUEUE_BATCH, "finished", "results", "origins", "ids", "refs")
        keys += self._keys.job_parts(tenant, QUEUE_BATCH, "epochs", "lost")
        keys.append(self._keys.of(tenant, "stored"))
        return int(
            await self._redis.script(
                _TRIM, keys, (f"{max(1, before_s * 1000)}-0", TRIM, self._limits.max_queue_results)
            )
        )

    def _mark(self, tenant: TenantId, custom_id: str) -> str:
        # Names of strangers are texts of theirs, and here only have to be compared.
        return self._sealer.mark(tenant, custom_id) if custom_id else ""


def _is_cursor(text: str) -> bool:
    milliseconds, dash, serial = text.partition("-")
    parts = (milliseconds, serial)
    return bool(dash) and all(part.isascii() and part.isdigit() and len(part) <= 19 for part in parts)


def _field(fields: object) -> int:
    values = list(fields.values()) if isinstance(fields, dict) else list(fields)[1:]  # type: ignore[call-overload]
    return int(values[0])
