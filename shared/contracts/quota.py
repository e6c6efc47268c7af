"""What a tenant has used of its limits, as policy tells it."""

from __future__ import annotations

import msgspec

from shared.contracts.ids import TenantId


class Quota(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a tenant, and the key that asked, have used of their limits at the moment of telling. 0 = no limit.

    The two buckets drain on, at their limit a minute. Requests that run are counted for the key only if it has a limit.
    """

    tenant: TenantId
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    requests: float = 0.0  # in the bucket
    tokens: float = 0.0
    held: int = 0  # tokens of requests that run
    max_parallel: int = 0
    running: int = 0
    key_id: str = ""
    key_max_parallel: int = 0
    key_running: int = 0
