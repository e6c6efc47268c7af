"""Quota and ledger in Redis: each change is one Lua script, so it is atomic whoever else asks at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from services.policy.ledger import Booked, compute_name
from services.policy.quota import MINUTE_US, NO_KEY, Asker, Verdict
from shared.contracts import messages as m
from shared.contracts.grants import Limits
from shared.contracts.ids import IngressId, RequestId, TenantId
from shared.contracts.quota import Quota
from shared.store.redis_store import RedisStore

LEDGER_ROW_S = 90 * 86400
"""How long a request's row is kept: far longer than a settlement may be redelivered. The tenant's sums stay."""

NOBODY = IngressId("")

_LUA = Path(__file__).with_name("lua")


def _script(name: str) -> str:
    return (_LUA / "bucket.lua").read_text() + (_LUA / f"{name}.lua").read_text()


_RESERVE, _RELEASE, _SETTLE, _PEEK, _RUNNING = map(_script, ("reserve", "release", "settle", "peek", "running"))


class Accounts:
    """Every tenant's quota and ledger.

    Args:
        redis: where they are kept.
        prefix: of every key; tests keep apart by it.

    Each method takes `now_us`, whole microseconds; 0 means Redis' own clock, which is what production uses. All raise
    Unavailable when Redis does not answer.
    """

    def __init__(self, redis: RedisStore, prefix: str = "baton:policy") -> None:
        self._redis = redis
        self._prefix = prefix

    async def reserve(
        self,
        tenant: TenantId,
        limits: Limits,
        reservation_id: str,
        tokens: int,
        ttl_us: int,
        now_us: int = 0,
        ingress: IngressId = NOBODY,
        asker: Asker = NO_KEY,
    ) -> tuple[Verdict, float, Quota]:
        """As `quota.reserve`; the verdict, when it was given (Redis time, unix seconds), and what is used now.

        `ingress`: who holds the request, for `held_by`.
        """
        arguments = _reserving(now_us, limits, reservation_id, tokens, ttl_us, ingress, asker)
        return _reserved(tenant, limits, asker, await self._redis.script(_RESERVE, self._quota_keys(tenant), arguments))

    async def reserve_behind(
        self,
        commands: Sequence[Sequence[str]],
        tenant: TenantId,
        limits: Limits,
        reservation_id: str,
        tokens: int,
        ttl_us: int,
        ingress: IngressId,
        asker: Asker,
    ) -> tuple[list[Any], tuple[Verdict, float, Quota]]:
        """As `reserve`, with commands before it in the same round trip; their replies too."""
        arguments = _reserving(0, limits, reservation_id, tokens, ttl_us, ingress, asker)
        replies, found = await self._redis.script_behind(commands, _RESERVE, self._quota_keys(tenant), arguments)
        return replies, _reserved(tenant, limits, asker, found)

    async def used(self, tenant: TenantId, limits: Limits, now_us: int = 0, asker: Asker = NO_KEY) -> Quota:
        """What a tenant, and the key that asks, have used of their limits."""
        arguments = (*_head(now_us, limits), asker.key_id, asker.max_parallel)
        found = await self._redis.script(_PEEK, self._quota_keys(tenant), arguments)
        return _quota(tenant, limits, asker, found)

    async def release(self, tenant: TenantId, limits: Limits, reservation_id: str, now_us: int = 0) -> None:
        """Let go of a hold whose request never ran. The request itself stays counted."""
        await self._redis.script(_RELEASE, self._quota_keys(tenant), (*_head(now_us, limits), reservation_id))

    async def held_by(self, tenant: TenantId) -> dict[RequestId, IngressId]:
        """Which ingress holds the request of each reservation that has one; ended ones may be among them."""
        holds = await self._texts(self._key(tenant, "holds"))
        parts = {RequestId(name): hold.split(" ") for name, hold in holds.items()}
        return {name: IngressId(hold[1]) for name, hold in parts.items() if any(hold[1:2])}

    async def running(self, tenant: TenantId, now_us: int = 0) -> dict[str, int]:
        """How many requests of a tenant run, by key; under "" those of which no key is known."""
        found = await self._redis.script(_RUNNING, self._quota_keys(tenant), (now_us,))
        return {key_id.decode(): int(count) for key_id, count in zip(found[::2], found[1::2], strict=True)}

    async def settle(
        self, tenant: TenantId, limits: Limits, reservation_id: str, settle: m.Settle, now_us: int = 0
    ) -> Booked:
        """As `ledger.apply` and `quota.settle`, in one step; the latter not without a reservation. Safe to repeat."""
        arguments: list[str | bytes | int | float] = [*_head(now_us, limits), reservation_id, LEDGER_ROW_S]
        arguments += [settle.attempt.epoch, settle.prompt_tokens, settle.completion_tokens, settle.cached_tokens]
        arguments.append(settle.finish)
        for row in settle.compute:
            totals = row.totals
            arguments += [compute_name(row), msgspec.json.encode(totals)]
            arguments += [totals.computed_tokens, totals.wasted_tokens, f"{totals.prefill_s + totals.decode_s:.6f}"]
        keys = [
            *self._quota_keys(tenant),
            self._row_key(tenant, settle.attempt.request_id),
            self._key(tenant, "usage"),
        ]
        replaced, change, rows = await self._redis.script(_SETTLE, keys, arguments)
        return Booked(replaced=int(replaced) == 1, token_change=int(change), compute_rows=int(rows))

    async def now_s(self) -> float:
        """Redis time, unix seconds."""
        return await self._redis.now_s()

    async def row(self, tenant: TenantId, request_id: RequestId) -> dict[str, str]:
        """One request's row as it stands in the ledger; empty when there is none."""
        return await self._texts(self._row_key(tenant, request_id))

    async def usage(self, tenant: TenantId) -> dict[str, str]:
        """A tenant's sums over all time: requests, tokens by kind, compute seconds."""
        return await self._texts(self._key(tenant, "usage"))

    async def quota(self, tenant: TenantId) -> dict[str, str]:
        """A tenant's bucket as last written: levels in `quota.MINUTE_US` units, held tokens, time."""
        return await self._texts(self._key(tenant, "bucket"))

    async def _texts(self, key: str) -> dict[str, str]:
        found = await self._redis.execute("HGETALL", key)
        pairs = found.items() if isinstance(found, dict) else zip(found[::2], found[1::2], strict=True)
        return {name.decode(): value.decode() for name, value in pairs}

    def _key(self, tenant: TenantId, what: str) -> str:
        # The braces keep a tenant's keys on one node of a Redis cluster, as a script needs.
        return f"{self._prefix}:{{{tenant}}}:{what}"

    def _row_key(self, tenant: TenantId, request_id: RequestId) -> str:
        return self._key(tenant, f"ledger:{request_id}")

    def _quota_keys(self, tenant: TenantId) -> list[str]:
        return [self._key(tenant, what) for what in ("bucket", "holds", "expiry")]


def _reserving(
    now_us: int, limits: Limits, reservation_id: str, tokens: int, ttl_us: int, ingress: IngressId, asker: Asker
) -> list[str | bytes | int | float]:
    own = (limits.max_parallel, asker.key_id, asker.max_parallel)
    return [*_head(now_us, limits), reservation_id, tokens, ttl_us, ingress, *own]


def _reserved(tenant: TenantId, limits: Limits, asker: Asker, found: Sequence[bytes]) -> tuple[Verdict, float, Quota]:
    reason, retry_us, at_us, *used = found
    return Verdict(reason.decode(), int(retry_us)), int(at_us) / 1e6, _quota(tenant, limits, asker, used)


def _quota(tenant: TenantId, limits: Limits, asker: Asker, used: Sequence[bytes]) -> Quota:
    requests, tokens, held, running, key_running = (int(part) for part in used)
    return Quota(
        tenant,
        limits.requests_per_minute,
        limits.tokens_per_minute,
        requests / MINUTE_US,
        tokens / MINUTE_US,
        held,
        limits.max_parallel,
        running,
        asker.key_id,
        asker.max_parallel,
        key_running,
    )


def _head(now_us: int, limits: Limits) -> tuple[int, int, int]:
    return now_us, limits.requests_per_minute, limits.tokens_per_minute
