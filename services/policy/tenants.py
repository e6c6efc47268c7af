"""Who may use Baton: tenants and their API keys, as records. Knows keys by SHA-256 hash only."""

from __future__ import annotations

import hmac

import msgspec

from shared.contracts.errors import Unauthenticated
from shared.contracts.grants import Limits
from shared.contracts.ids import ScopeGeneration, TenantId
from shared.contracts.messages import Identity

HASH_BYTES = 32


class OwnLimits(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Limits set for one tenant; None = the installation's default, 0 = no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_context_tokens: int | None = None
    max_output_tokens: int | None = None
    batch_enqueued_tokens: int | None = None
    max_parallel: int | None = None


class TenantRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tenant. `version` changes whenever anything about it does.

    `models` empty = every model. `weight` is its share against other tenants in the queue and inside a worker's step.
    `retention_s`: how long its KV is kept after use, as in `Grant`, and at most what it stores, and its traces
    (`docs/security.md`).
    """

    id: TenantId
    limits: OwnLimits = OwnLimits()
    models: tuple[str, ...] = ()
    klass: str = "interactive"
    weight: float = 1.0
    retention_s: int = -1
    default_max_tokens: int | None = None
    generation: ScopeGeneration = ScopeGeneration(1)
    version: int = 0
    removed: bool = False  # nothing of it runs until a key is made for it again


class KeyRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One API key. `hash` is the hex SHA-256 of the key; the key itself is nowhere.

    `max_parallel`: requests of this key at once, besides the limit of its tenant; 0 = no limit of its own.
    """

    id: str
    tenant: TenantId
    hash: str
    admin: bool = False
    revoked: bool = False
    max_parallel: int = 0


def effective_limits(own: OwnLimits, defaults: Limits) -> Limits:
    """A tenant's limits, with the installation's defaults where it has none of its own."""
    return Limits(
        **{
            name: getattr(defaults, name) if getattr(own, name) is None else getattr(own, name)
            for name in OwnLimits.__struct_fields__
        }
    )


def check_key(key_hash: bytes, key: KeyRecord | None) -> KeyRecord:
    """The record, if it is the live record of exactly this hash. Raises Unauthenticated, alike for every reason.

    The lookup that found `key` went by hash, whose timing tells nothing about keys of 128 random bits; the comparison
    here takes the same time wherever two hashes differ.
    """
    found = "" if key is None else key.hash
    same = hmac.compare_digest(key_hash.hex(), found)
    if key is None or not same or key.revoked or len(key_hash) != HASH_BYTES:
        raise Unauthenticated("the API key is not valid")
    return key


def default_output(tenant: TenantRecord, default: int) -> int:
    """Output tokens of a request that names no number; `default` is the installation's."""
    return default if tenant.default_max_tokens is None else tenant.default_max_tokens


def identity(tenant: TenantRecord, key: KeyRecord, defaults: Limits, default_max_tokens: int) -> Identity:
    """What the gateway may know about a key's owner."""
    return Identity(
        tenant=tenant.id,
        key_id=key.id,
        admin=key.admin,
        default_max_tokens=default_output(tenant, default_max_tokens),
        limits=effective_limits(tenant.limits, defaults),
        version=tenant.version,
        models=tenant.models,
        key_max_parallel=key.max_parallel,
        retention_s=tenant.retention_s,
    )
