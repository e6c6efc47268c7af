"""What policy last told of tenants' limits a minute, and the headers that tell it to clients. Pure.

Headers are OpenAI's: of each limit its size, what is left of it now, and how long until all of it is.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from shared.contracts.ids import TenantId
from shared.contracts.quota import Quota

FRESH_S = 1.0
MAX_TENANTS = 4096


class Quotas:
    """The newest account of each tenant. Times are monotonic seconds of one clock."""

    def __init__(self) -> None:
        self._told: OrderedDict[TenantId, tuple[Quota, float]] = OrderedDict()

    def tell(self, quota: Quota, now: float) -> None:
        """Policy says so."""
        self._told[quota.tenant] = (quota, now)
        self._told.move_to_end(quota.tenant)
        if len(self._told) > MAX_TENANTS:
            self._told.popitem(last=False)

    def headers(self, tenant: TenantId, now: float, max_age_s: float = FRESH_S) -> dict[str, str] | None:
        """The headers of a tenant's answer; None when what was told of it is older than `max_age_s`."""
        quota, at = self._told.get(tenant, (None, 0.0))
        if quota is None or now - at > max_age_s:
            return None
        told: dict[str, str] = {}
        if limit := quota.requests_per_minute:
            told |= _limit("requests", limit, _drained(quota.requests, limit, now - at))
        if limit := quota.tokens_per_minute:
            told |= _limit("tokens", limit, _drained(quota.tokens, limit, now - at) + quota.held)
        return told


def _drained(level: float, limit: int, elapsed_s: float) -> float:
    return max(0.0, level - limit * elapsed_s / 60.0)


def _limit(what: str, limit: int, used: float) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{what}": str(limit),
        f"x-ratelimit-remaining-{what}": str(max(0, math.floor(limit - used + 1e-9))),
        f"x-ratelimit-reset-{what}": f"{math.ceil(used / limit * 60_000) / 1000:g}s",
    }
