"""What a tenant has used of its limits a minute, as policy tells it."""

from __future__ import annotations

import msgspec

from shared.contracts.ids import TenantId


class Quota(msgspec.Struct, frozen=True, omit_defaults=True):
    """The two buckets of a tenant at the moment of telling; they drain on, at their limit a minute. 0 = no limit."""

    tenant: TenantId
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    requests: float = 0.0  # in the bucket
    tokens: float = 0.0
    held: int = 0  # tokens of requests that run
