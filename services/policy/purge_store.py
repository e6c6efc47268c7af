"""Purges in Redis: records, acknowledgements, and the workers whose pools may hold something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from services.policy.copies import Place
from services.policy.purge_record import OwnerAck, PurgeRecord
from shared.contracts.errors import NotFound
from shared.contracts.ids import WorkerId
from shared.store.redis_store import RedisStore

LISTED = 50
"""Purges that are shown, the newest first."""
CLAIM_S = 60
"""A process that began a part of a purge and died leaves it to another after so long."""


class PurgeStore:
    """Durable, as Redis keeps it in its append-only file. Methods raise Unavailable when Redis does not answer.

    Args:
        prefix: of every key; tests keep apart by it.
    """

    def __init__(self, redis: RedisStore, prefix: str = "baton:policy") -> None:
        self._redis = redis
        self._prefix = prefix

    async def add(self, record: PurgeRecord) -> None:
        """Keep a new purge, which is open until `close`."""
        await self._redis.transaction(
            [
                ("HSET", self._records, record.purge_id, msgspec.json.encode(record)),
                ("ZADD", self._open, record.ordered_s, record.purge_id),
                ("ZADD", self._order, record.ordered_s, record.purge_id),
            ]
        )

    async def get(self, purge_id: str) -> PurgeRecord:
        """Raises NotFound."""
        found = await self._redis.execute("HGET", self._records, purge_id)
        if found is None:
            raise NotFound(f"there is no purge {purge_id[:64]!r}", param="purge_id")
        return msgspec.json.decode(found, type=PurgeRecord)

    async def open_ids(self) -> list[str]:
        """Purges that wait for somebody, the oldest first."""
        return [name.decode() for name in await self._redis.execute("ZRANGE", self._open, 0, -1)]

    async def newest_ids(self) -> list[str]:
        """The latest purges, the newest first."""
        return [name.decode() for name in await self._redis.execute("ZREVRANGE", self._order, 0, LISTED - 1)]

    async def ids_since(self, unix_s: float) -> list[str]:
        """Purges ordered since then, the oldest first."""
        found = await self._redis.execute("ZRANGEBYSCORE", self._order, unix_s, "+inf")
        return [name.decode() for name in found]

    async def close(self, purge_id: str) -> bool:
        """It waits for nobody any more. True for whoever is the first to say so."""
        return bool(await self._redis.execute("ZREM", self._open, purge_id))

    async def acks(self, purge_id: str) -> dict[str, OwnerAck]:
        """Acknowledgements by owner."""
        found = _pairs(await self._redis.execute("HGETALL", self._acks(purge_id)))
        return {owner.decode(): msgspec.json.decode(ack, type=OwnerAck) for owner, ack in found}

    async def acknowledge(self, purge_id: str, owner: str, counts: Mapping[str, int]) -> None:
        """Keep an acknowledgement; the first one of an owner stands."""
        ack = OwnerAck(await self._redis.now_s(), dict(counts))
        await self._redis.execute("HSETNX", self._acks(purge_id), owner, msgspec.json.encode(ack))

    async def claim(self, purge_id: str, part: str) -> bool:
        """The right to carry out a part of a purge; False while another process has it."""
        key = f"{self._prefix}:purge-claim:{purge_id}:{part}"
        return await self._redis.execute("SET", key, 1, "NX", "EX", CLAIM_S) is not None

    async def unclaim(self, purge_id: str, part: str) -> None:
        """Leave a part to whoever comes next."""
        await self._redis.execute("DEL", f"{self._prefix}:purge-claim:{purge_id}:{part}")

    async def note_batch(self) -> None:
        """There has been a batch service, which keeps things here."""
        await self._redis.execute("SET", f"{self._prefix}:has-batch", 1)

    async def knows_batch(self) -> bool:
        """Whether it was noted."""
        return bool(await self._redis.execute("EXISTS", f"{self._prefix}:has-batch"))

    async def add_pools(self, workers: Mapping[WorkerId, Place]) -> None:
        """These workers have pools, there."""
        await self._redis.transaction(
            [("HSET", self._pools, worker, msgspec.json.encode(place)) for worker, place in workers.items()]
        )

    async def pools(self) -> dict[WorkerId, Place | None]:
        """Workers whose pools are not known to be gone; None where it was not noted where they lie."""
        found = _pairs(await self._redis.execute("HGETALL", self._pools))
        return {WorkerId(name.decode()): _place_of(noted) for name, noted in found}

    async def forget_pools(self, workers: Sequence[WorkerId]) -> None:
        """The pools of these workers are gone."""
        if workers:
            await self._redis.execute("HDEL", self._pools, *workers)

    async def rewrite_log(self) -> None:
        """Begin to rewrite the append-only file from what there is now, if there is one. Raises Unavailable while
        another rewrite is under way, which may have begun before."""
        if await self._persistence("aof_enabled"):
            await self._redis.execute("BGREWRITEAOF")

    async def log_is_rewritten(self) -> bool | None:
        """None while a rewrite is under way; else whether the last one went well."""
        if not await self._persistence("aof_enabled"):
            return True
        if await self._persistence("aof_rewrite_in_progress") or await self._persistence("aof_rewrite_scheduled"):
            return None
        return await self._persistence("aof_last_bgrewrite_status") in ("ok", b"ok")

    async def _persistence(self, name: str) -> object:
        found = await self._redis.execute("INFO", "persistence")
        if isinstance(found, bytes):
            lines = (line.partition(b":") for line in found.splitlines())
            value: object = {key.decode(): text for key, _, text in lines}.get(name)
            return int(value) if isinstance(value, bytes) and value.isdigit() else value
        return found.get(name)

    @property
    def _records(self) -> str:
        return f"{self._prefix}:purges"

    @property
    def _open(self) -> str:
        return f"{self._prefix}:purges-open"

    @property
    def _order(self) -> str:
        return f"{self._prefix}:purges-by-time"

    @property
    def _pools(self) -> str:
        return f"{self._prefix}:pools"

    def _acks(self, purge_id: str) -> str:
        return f"{self._prefix}:purge-acks:{purge_id}"


def _place_of(noted: bytes) -> Place | None:
    found = msgspec.json.decode(noted, type=Place | float)  # a number: as it was noted at first
    return found if isinstance(found, Place) else None


def _pairs(found: Mapping[bytes, bytes] | Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """Fields and values, in either of the forms in which the client gives a hash."""
    if isinstance(found, Mapping):
        return list(found.items())
    return list(zip(found[::2], found[1::2], strict=True))
