"""What policy promises about one request, signed so that index and workers need not trust the messenger."""

from __future__ import annotations

import msgspec

from shared.contracts.ids import RequestId, ScopeGeneration, TenantId

CLASSES = ("interactive", "analysis", "batch")
"""Of requests, the most urgent first."""


SALT_BYTES = 16


def class_rank(klass: str) -> int:
    """Place of a class in `CLASSES`; one that nobody knows ranks last."""
    return CLASSES.index(klass) if klass in CLASSES else len(CLASSES) - 1


class Scope(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who may share KV with whom. Derived server-side only; the index adds model digest, KV dtype and block size.

    `authorization` is the sorted authorization set; an empty `tenant` never occurs: no scope, no sharing. `salt` is the
    one part that a request chooses: within its tenant, it shares only with requests of the same salt.
    """

    tenant: TenantId
    authorization: tuple[str, ...] = ()
    generation: ScopeGeneration = ScopeGeneration(1)
    salt: bytes = b""  # SALT_BYTES, or none


class Limits(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tenant's limits. 0 = no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_context_tokens: int = 0
    max_output_tokens: int = 0
    batch_enqueued_tokens: int = 0  # prompt tokens of batch items that have not ended
    max_parallel: int = 0  # requests that run at once, waiting ones included, batch items not


class Placement(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the request may run. Empty tuples allow everything. `regions` and `hardware` are not yet in force."""

    models: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    hardware: tuple[str, ...] = ()


class Grant(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """policy's yes to one request.

    `expires_s` is a wall-clock unix time in seconds (Redis time), after which no new work starts under the grant.
    `budget_s` is how long the request may take from admission. `retention_s` is how long KV blocks of this request may
    stay in a worker after it ends (-1 = as long as there is room, 0 = never cached). `weight` is the tenant's share
    in the scheduler's queue and inside a worker's step. Not yet in force: `priority`, and of `placement` all but
    `models`, which policy itself checks.
    """

    request_id: RequestId
    tenant: TenantId
    scope: Scope
    model: str
    klass: str  # interactive | analysis | batch
    reservation_id: str
    reserved_tokens: int
    expires_s: float
    budget_s: float
    weight: float = 1.0
    priority: int = 0
    retention_s: int = -1
    limits: Limits = Limits()
    placement: Placement = Placement()
    policy_version: int = 0


class SignedGrant(msgspec.Struct, frozen=True, omit_defaults=True):
    """`payload` is the msgpack of a Grant, `signature` its Ed25519 signature by policy, `key_id` which key."""

    payload: bytes
    signature: bytes
    key_id: str = ""
