"""What policy last told of the limits of tenants and keys, and the headers that tell it to clients. Pure.

Headers are OpenAI's: of each limit a minute its size, what is left of it now, and how long until all of it is. Requests
at once are told the same way, of tenant or key, whichever has less left; nobody knows when those end.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from shared.contracts.ids import TenantId
from shared.contracts.quota import Quota

FRESH_S = 1.0
MAX_KEYS = 4096


class Quotas:
    """The newest account of each key. Times are monotonic seconds of one clock."""

    def __init__(self) -> None:
        self._told: OrderedDict[tuple[TenantId, str], tuple[Quota, float]] = OrderedDict()

    def tell(self, quota: Quota, now: float) -> None:
        """Policy says so."""
        whose = (quota.tenant, quota.key_id)
        self._told[whose] = (quota, now)
        self._told.move_to_end(whose)
        if len(self._told) > MAX_KEYS:
            self._told.popitem(last=False)

    def headers(self, tenant: TenantId, key_id: str, now: float, max_age_s: float = FRESH_S) -> dict[str, str] | None:
        """The headers of an answer to this key; None when what was told of it is older than `max_age_s`."""
        quota, at = self._told.get((tenant, key_id), (None, 0.0))
        if quota is None or now - at > max_age_s:
            return None
        told: dict[str, str] = {}
        if limit := quota.requests_per_minute:
            told |= _limit("requests", limit, _drained(quota.requests, limit, now - at))
        if limit := quota.tokens_per_minute:
            told |= _limit("tokens", limit, _drained(quota.tokens, limit, now - at) + quota.held)
        return told | _parallel(quota)


def _parallel(quota: Quota) -> dict[str, str]:
    both = ((quota.max_parallel, quota.running), (quota.key_max_parallel, quota.key_running))
    left = [(max(0, limit - running), limit) for limit, running in both if limit]
    if not left:
        return {}
    least, limit = min(left)
    return {"x-ratelimit-limit-parallel": str(limit), "x-ratelimit-remaining-parallel": str(least)}


def _drained(level: float, limit: int, elapsed_s: float) -> float:
    return max(0.0, level - limit * elapsed_s / 60.0)


def _limit(what: str, limit: int, used: float) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{what}": str(limit),
        f"x-ratelimit-remaining-{what}": str(max(0, math.floor(limit - used + 1e-9))),
        f"x-ratelimit-reset-{what}": f"{math.ceil(used / limit * 60_000) / 1000:g}s",
    }
