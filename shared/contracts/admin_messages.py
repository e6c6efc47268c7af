"""Messages by which the command line of an operator changes tenants: `policy.admin`."""

from __future__ import annotations

import msgspec

from shared.contracts.ids import ScopeGeneration, TenantId
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


class TermsChange(Message, frozen=True, kw_only=True):
    """command line → policy: in what class a tenant's requests run, and its weight against other tenants of the class.

    An empty class, or a weight of 0, stays as it is.
    """

    tenant: TenantId
    klass: str = ""
    weight: float = 0.0


class TenantsQuery(Message, frozen=True, kw_only=True):
    """command line → policy: what is known of a tenant; of all when `tenant` is empty."""

    tenant: TenantId = TenantId("")


class PurgeStart(Message, frozen=True, kw_only=True):
    """command line → policy: end the tenant's scope, and take what is kept of it everywhere.

    `remove`: its keys open nothing any more either. `gone`: workers whose machine's memory is known to be lost, of the
    purge `purge_id`, which waits for them; the rest does not count then.
    """

    tenant: TenantId = TenantId("")
    reason: str = ""
    cache_only: bool = False
    remove: bool = False
    purge_id: str = ""
    gone: tuple[str, ...] = ()


class PurgeQuery(Message, frozen=True, kw_only=True):
    """command line → policy: a purge as it stands; the latest ones when `purge_id` is empty."""

    purge_id: str = ""


class SignedReceipt(msgspec.Struct, frozen=True):
    """`payload` is the JSON of a `PurgeReceipt`, `signature` policy's Ed25519 signature over it in hex, `key_id` which
    key."""

    payload: str
    signature: str
    key_id: str


class OwnerReceipt(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one owner of copies took. `owner` is a process or a service; `at_s` unix seconds."""

    owner: str
    at_s: float
    counts: dict[str, int] = msgspec.field(default_factory=dict)


class PurgeReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """A purge as it stood at `issued_s`. `generation` is the first that lives: what was below it has ended. Owners in
    `pending` have not said yet that nothing is left with them. Times in unix seconds."""

    purge_id: str
    tenant: TenantId
    generation: ScopeGeneration
    reason: str
    cache_only: bool
    removed: bool
    ordered_s: float
    issued_s: float
    complete: bool
    owners: tuple[OwnerReceipt, ...] = ()
    pending: tuple[str, ...] = ()


class Purges(Message, frozen=True, kw_only=True):
    """policy → command line: signed receipts of purges, the newest first."""

    receipts: tuple[SignedReceipt, ...] = ()


class KeyInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An API key, as shown: its name, never the key. `running`: its requests now."""

    id: str
    admin: bool = False
    revoked: bool = False
    max_parallel: int = 0
    running: int = 0


class TenantInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tenant as policy keeps it. `limits`: those of its own. `running`: its requests now, of all keys. `klass`: the
    highest its requests may run in."""

    id: TenantId
    keys: tuple[KeyInfo, ...] = ()
    limits: dict[str, int] = msgspec.field(default_factory=dict)
    running: int = 0
    klass: str = ""
    weight: float = 0.0


class Tenants(Message, frozen=True, kw_only=True):
    """policy → command line: tenants as they stand after the change; none when the one asked for is unknown."""

    tenants: tuple[TenantInfo, ...] = ()
