"""Redis replies in Python's types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shared.contracts.errors import NotFound
from shared.store.redis_store import RedisStore


def pairs(reply: Any) -> dict[str, bytes]:
    """HGETALL, which is a dict or a flat list by protocol version."""
    found = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    return {name.decode(): value for name, value in found}


def number(value: bytes | int | None) -> int:
    """An integer; a missing one is 0."""
    return int(value or 0)


async def page_of(
    redis: RedisStore, index: str, after: str, limit: int, ascending: bool, missing: Callable[[str], NotFound]
) -> tuple[list[str], bool]:
    """Up to `limit` members of a sorted set behind `after`, and whether more follow.

    Raises what `missing` makes for an `after` that is not in it.
    """
    start = 0
    if after:
        rank = await redis.execute("ZRANK" if ascending else "ZREVRANK", index, after)
        if rank is None:
            raise missing(after)
        start = int(rank) + 1
    found = await redis.execute("ZRANGE" if ascending else "ZREVRANGE", index, start, start + limit)
    return [member.decode() for member in found[:limit]], len(found) > limit
