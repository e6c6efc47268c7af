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


class KeyRevoke(Message, frozen=True, kw_only=True):
    """command line → policy: the key opens nothing any more."""

    tenant: TenantId
    key_id: str


class LimitsChange(Message, frozen=True, kw_only=True):
    """command line → policy: change some limits of a tenant. None = the installation's default, 0 = no limit."""

    tenant: TenantId
    limits: dict[str, int | None]  # fields of `Limits`


class TenantsQuery(Message, frozen=True, kw_only=True):
    """command line → policy: what is known of a tenant; of all when `tenant` is empty."""

    tenant: TenantId = TenantId("")


class KeyInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An API key, as shown: its name, never the key."""

    id: str
    admin: bool = False
    revoked: bool = False


class TenantInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tenant as policy keeps it. `limits`: those of its own."""

    id: TenantId
    keys: tuple[KeyInfo, ...] = ()
    limits: dict[str, int] = msgspec.field(default_factory=dict)


class Tenants(Message, frozen=True, kw_only=True):
    """policy → command line: tenants as they stand after the change; none when the one asked for is unknown."""

    tenants: tuple[TenantInfo, ...] = ()
