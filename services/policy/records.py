"""Tenants and keys in Redis. Changes compare before they set, so two administrators cannot undo each other unseen."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from services.policy.tenants import KeyRecord, TenantRecord
from shared.contracts.errors import Conflict, InvalidInput
from shared.contracts.ids import TenantId
from shared.store.redis_store import RedisStore

# KEYS[1] hash; ARGV: field, expected value ('' = absent), new value
_COMPARE_AND_SET = """
local found = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if found ~= ARGV[2] then
  return 0
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
"""
_ATTEMPTS = 10

Command = tuple[str, str, str]
Record = TypeVar("Record", TenantRecord, KeyRecord)


class Records:
    """Every tenant and key, by id and by hash. All methods raise Unavailable when Redis does not answer."""

    def __init__(self, redis: RedisStore, prefix: str = "baton:policy") -> None:
        self._redis = redis
        self._tenants = f"{prefix}:tenants"
        self._keys = f"{prefix}:keys"
        self._key_ids = f"{prefix}:key-ids"
        self._applied = f"{prefix}:bootstrap"
        self._audit_number = f"{prefix}:audit-number"
        self._audit = f"{prefix}:audit"

    async def tenant(self, tenant: TenantId) -> TenantRecord | None:
        """The tenant's record."""
        return tenant_of(await self._redis.execute(*self.tenant_command(tenant)))

    async def retention_s(self, tenant: TenantId) -> int:
        """How long what it stores is kept, as in `Grant`; -1 for one that there is not."""
        record = await self.tenant(tenant)
        return -1 if record is None else record.retention_s

    async def key(self, key_hash: bytes) -> KeyRecord | None:
        """The key whose SHA-256 this is, revoked ones included."""
        return key_of(await self._redis.execute(*self.key_command(key_hash)))

    def tenant_command(self, tenant: TenantId) -> Command:
        """Reads what `tenant_of` decodes."""
        return ("HGET", self._tenants, tenant)

    def key_command(self, key_hash: bytes) -> Command:
        """Reads what `key_of` decodes."""
        return ("HGET", self._keys, key_hash.hex())

    async def read(self, command: Command) -> bytes | None:
        """What one of these commands reads."""
        found: bytes | None = await self._redis.execute(*command)
        return found

    async def key_by_id(self, tenant: TenantId, key_id: str) -> KeyRecord | None:
        """A tenant's key by the name it goes by."""
        found = await self._redis.execute("HGET", self._key_ids, _key_name(tenant, key_id))
        return None if found is None else await self.key(bytes.fromhex(found.decode()))

    async def tenants(self) -> list[TenantRecord]:
        """All of them, by id."""
        found = await self._redis.execute("HVALS", self._tenants)
        return sorted((msgspec.json.decode(data, type=TenantRecord) for data in found), key=lambda tenant: tenant.id)

    async def keys(self) -> list[KeyRecord]:
        """All of them, revoked ones included, by tenant and name."""
        found = await self._redis.execute("HVALS", self._keys)
        records = (msgspec.json.decode(data, type=KeyRecord) for data in found)
        return sorted(records, key=lambda key: (key.tenant, key.id))

    async def change_tenant(
        self, tenant: TenantId, change: Callable[[TenantRecord], TenantRecord], *, create: bool = False
    ) -> TenantRecord:
        """Apply `change` and raise the tenant's version. Raises InvalidInput for an unknown tenant unless `create`."""

        def changed(record: TenantRecord | None) -> TenantRecord:
            if record is None and not create:
                raise InvalidInput(f"there is no tenant {tenant!r}", param="tenant")
            old = record or TenantRecord(id=tenant)
            return msgspec.structs.replace(change(old), id=tenant, version=old.version + 1)

        return await self._change(self._tenants, tenant, TenantRecord, changed)

    async def change_key(self, key_hash: str, change: Callable[[KeyRecord | None], KeyRecord]) -> KeyRecord:
        """Apply `change` to the key with this hex hash (None: there is none yet)."""
        record = await self._change(self._keys, key_hash, KeyRecord, change)
        await self._redis.execute("HSET", self._key_ids, _key_name(record.tenant, record.id), record.hash)
        return record

    async def applied(self, tenant: TenantId) -> str:
        """Digest of the bootstrap entry last applied to this tenant; empty when there was none."""
        found = await self._redis.execute("HGET", self._applied, tenant)
        return "" if found is None else found.decode()

    async def set_applied(self, tenant: TenantId, digest: str) -> None:
        await self._redis.execute("HSET", self._applied, tenant, digest)

    async def next_audit_number(self) -> int:
        """Numbers policy's own audit records, over restarts too."""
        return int(await self._redis.execute("INCR", self._audit_number))

    async def keep_audit(self, name: str, record: bytes) -> None:
        """Keep one audit record under its name; the same one again changes nothing."""
        await self._redis.execute("HSETNX", self._audit, name, record)

    async def _change(
        self, key: str, field: str, record_type: type[Record], change: Callable[[Record | None], Record]
    ) -> Record:
        for _ in range(_ATTEMPTS):
            found = await self._redis.execute("HGET", key, field)
            record = change(_decoded(found, record_type))
            arguments = (field, found or b"", msgspec.json.encode(record))
            if await self._redis.script(_COMPARE_AND_SET, [key], arguments):
                return record
        raise Conflict(f"{field} is being changed by others; try again", retry_after_s=1.0)


def _key_name(tenant: TenantId, key_id: str) -> str:
    return f"{tenant}/{key_id}"  # ids hold no slash


def tenant_of(data: bytes | None) -> TenantRecord | None:
    """The tenant that was read; None: there is none."""
    return _decoded(data, TenantRecord)


def key_of(data: bytes | None) -> KeyRecord | None:
    """The key that was read; None: there is none."""
    return _decoded(data, KeyRecord)


def _decoded(data: bytes | None, record_type: type[Record]) -> Record | None:
    return None if data is None else msgspec.json.decode(data, type=record_type)
