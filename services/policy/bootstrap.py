"""Tenants from 0600 JSON files: the first ones (`BATON_BOOTSTRAP_FILE`) and the operator's (`policy.tenants`).

Applied at every start; a tenant whose entry has not changed is left alone, so what an administrator changed since stays
changed, and a revoked key stays revoked.

{"tenants": [{"id": "acme", "keys": [{"id": "first", "hash": "<hex SHA-256 of the API key>"}]}]}
"""

from __future__ import annotations

import hashlib
import logging
import re
from pathlib import Path

import msgspec
from msgspec import UNSET, UnsetType

from services.policy.admission import CLASSES
from services.policy.records import Records
from services.policy.tenants import KeyRecord, OwnLimits, TenantRecord
from shared.contracts.errors import SettingsError
from shared.contracts.ids import TenantId, is_id
from shared.store.secrets import read_secret

log = logging.getLogger("baton.policy")

_HASH = re.compile(r"[0-9a-f]{64}")


class BootstrapKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An API key, by the hex SHA-256 of it. `max_parallel` as in `KeyRecord`.

    A field that is not there must not show in the entry's digest, or files from before it would be applied once more.
    """

    id: str
    hash: str
    admin: bool = False
    max_parallel: int | UnsetType = UNSET

    @property
    def limit(self) -> int:
        """`max_parallel`, 0 where it is not given."""
        return 0 if isinstance(self.max_parallel, UnsetType) else self.max_parallel


class BootstrapTenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tenant; the optional fields are those of `TenantRecord`, which says what is in force."""

    id: TenantId
    keys: tuple[BootstrapKey, ...] = ()
    limits: OwnLimits = OwnLimits()
    models: tuple[str, ...] = ()
    klass: str = "interactive"
    weight: float = 1.0
    retention_s: int = -1
    default_max_tokens: int | None = None


class Bootstrap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    tenants: tuple[BootstrapTenant, ...]


def read_bootstrap(path: Path) -> Bootstrap:
    """The file's content. Raises SettingsError naming file and field: unreadable, open to others, unknown field, bad
    value."""
    try:
        found = msgspec.json.decode(read_secret(path), type=Bootstrap)
    except msgspec.MsgspecError as exc:
        raise SettingsError(f"{path}: {exc}", param=str(path)) from exc
    for tenant in found.tenants:
        problem = _problem(tenant)
        if problem:
            raise SettingsError(f"{path}: tenant {tenant.id!r}: {problem}", param=str(path))
    return found


def _problem(tenant: BootstrapTenant) -> str:
    """What is wrong with an entry; empty when nothing is."""
    wrong_ids = [text for text in (tenant.id, *(key.id for key in tenant.keys)) if not is_id(text)]
    if wrong_ids:
        return f"id {wrong_ids[0]!r} is not of the form [a-z0-9-]{{1,40}}"
    if any(not _HASH.fullmatch(key.hash) for key in tenant.keys):
        return "keys.hash is not a SHA-256 in 64 lower-case hex digits"
    if tenant.klass not in CLASSES:
        return f"klass {tenant.klass!r} is not one of {', '.join(CLASSES)}"
    if tenant.weight <= 0:
        return "weight is not above 0"
    if any(key.limit < 0 for key in tenant.keys):
        return "keys.max_parallel is negative"
    limits = msgspec.structs.asdict(tenant.limits)
    negative = [name for name, value in limits.items() if value is not None and value < 0]
    return f"limits.{negative[0]} is negative" if negative else ""


async def apply_bootstrap(bootstrap: Bootstrap, records: Records) -> int:
    """Make the tenants and keys that are new or whose entry changed; how many that were.

    Raises SettingsError when a key already belongs to another tenant, Unavailable when Redis does not answer.
    """
    changed = 0
    for entry in bootstrap.tenants:
        digest = hashlib.sha256(msgspec.json.encode(entry)).hexdigest()
        if await records.applied(entry.id) == digest:
            continue
        await records.change_tenant(entry.id, lambda old, entry=entry: _updated(old, entry), create=True)  # type: ignore[misc]
        for key in entry.keys:
            await records.change_key(key.hash, lambda old, key=key, entry=entry: _key(old, key, entry))  # type: ignore[misc]
        await records.set_applied(entry.id, digest)
        changed += 1
        log.info("tenant %s set up from the bootstrap file, %d keys", entry.id, len(entry.keys))
    return changed


def _updated(old: TenantRecord, entry: BootstrapTenant) -> TenantRecord:
    return msgspec.structs.replace(
        old,
        limits=entry.limits,
        models=entry.models,
        klass=entry.klass,
        weight=entry.weight,
        retention_s=entry.retention_s,
        default_max_tokens=entry.default_max_tokens,
    )


def _key(old: KeyRecord | None, key: BootstrapKey, entry: BootstrapTenant) -> KeyRecord:
    if old is not None and old.tenant != entry.id:
        raise SettingsError(f"key {key.id!r} of tenant {entry.id!r} already belongs to another tenant")
    revoked = old is not None and old.revoked
    return KeyRecord(
        id=key.id, tenant=entry.id, hash=key.hash, admin=key.admin, revoked=revoked, max_parallel=key.limit
    )
