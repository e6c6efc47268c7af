"""Messages by which the command line of an operator changes tenants: `policy.admin`."""

from __future__ import annotations

import msgspec

from shared.contracts.ids import TenantId
from shared.contracts.message import Message


class KeyCreate(Message, frozen=True, kw_only=True):
    """command line → policy, `policy.admin`: a new API key of a tenant, which is made if there is none."""

    tenant: TenantId
    key_id: str
    key_hash: bytes  # SHA-256 of the key, which never leaves who made it
    max_parallel: int = 0  # requests of it at once; 0 = no limit of its own


class KeyRevoke(Message, frozen=True, kw_only=True):
    """command line → policy: the key opens nothing any more."""

    tenant: TenantId
    key_id: str


class LimitsChange(Message, frozen=True, kw_only=True):
    """command line → policy: change some limits of a tenant. None = the installation's default, 0 = no limit.

    With `key_id` those of one of its keys, which may have one: `max_parallel`; None = no limit of its own.
    """

    tenant: TenantId
    limits: dict[str, int | None]  # fields of `Limits`
    key_id: str = ""


class TenantsQuery(Message, frozen=True, kw_only=True):
    """command line → policy: what is known of a tenant; of all when `tenant` is empty."""

    tenant: TenantId = TenantId("")


class KeyInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An API key, as shown: its name, never the key. `running`: its requests now."""

    id: str
    admin: bool = False
    revoked: bool = False
    max_parallel: int = 0
    running: int = 0


class TenantInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tenant as policy keeps it. `limits`: those of its own. `running`: its requests now, of all keys."""

    id: TenantId
    keys: tuple[KeyInfo, ...] = ()
    limits: dict[str, int] = msgspec.field(default_factory=dict)
    running: int = 0


class Tenants(Message, frozen=True, kw_only=True):
    """policy → command line: tenants as they stand after the change; none when the one asked for is unknown."""

    tenants: tuple[TenantInfo, ...] = ()
