"""What an administrator changes: each change is stored, then told to every service, then audited.

In that order, so that a crash in between leaves the change in force; every one of them may be repeated.
"""

from __future__ import annotations

from typing import Any

import msgspec

from services.policy.records import Records
from services.policy.tenants import HASH_BYTES, KeyRecord, OwnLimits, TenantRecord
from shared.bus.bus import Bus
from shared.contracts import messages as m
from shared.contracts import subjects
from shared.contracts.errors import Conflict, InvalidInput
from shared.contracts.grants import CLASSES
from shared.contracts.ids import ScopeGeneration, TenantId, is_id
from shared.store.redis_store import RedisStore

SERVICE = "policy"
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
"""Further apart, the lighter of two tenants would hardly ever have a turn."""


class Admin:
    """Changes to tenants and keys, for the service and the command line.

    Methods raise InvalidInput for what does not exist, Unavailable when Redis or NATS does not answer.
    """

    def __init__(self, bus: Bus, redis: RedisStore, records: Records) -> None:
        self._bus = bus
        self._redis = redis
        self._records = records

    async def create_key(self, tenant: TenantId, key_id: str, key_hash: bytes, max_parallel: int = 0) -> None:
        """A new key of the tenant, which is made if there is none. The same again changes nothing.

        Raises InvalidInput for an id or a hash that is none, Conflict when the name or the key is taken.
        """
        for field, text in (("tenant", tenant), ("key_id", key_id)):
            if not is_id(text):
                raise InvalidInput(f"{field} {text!r} is not of the form [a-z0-9-]{{1,40}}", param=field)
        if len(key_hash) != HASH_BYTES:
            raise InvalidInput("key_hash is not a SHA-256", param="key_hash")
        named = await self._records.key_by_id(tenant, key_id)
        if named is not None and named.hash != key_hash.hex():
            raise Conflict(f"tenant {tenant!r} has had a key {key_id!r} already; choose another name", param="key_id")
        known = await self._records.tenant(tenant)
        if known is None or known.removed:
            await self._records.change_tenant(tenant, _restored, create=True)

        def created(old: KeyRecord | None) -> KeyRecord:
            if old is not None and (old.tenant, old.id) != (tenant, key_id):
                raise Conflict("this key is in use already", param="key_hash")
            return old or KeyRecord(id=key_id, tenant=tenant, hash=key_hash.hex(), max_parallel=max_parallel)

        await self._records.change_key(key_hash.hex(), created)
        await self._tell(m.PolicyEvent(kind="changed", tenant=tenant))
        await self.audit("key_created", tenant, key_id)

    async def revoke_key(self, tenant: TenantId, key_id: str) -> None:
        """From now on the key opens nothing. Running requests go on; gateways forget the key at once."""
        await self._change_key(tenant, key_id, revoked=True)
        await self._tell(m.PolicyEvent(kind="revoked", tenant=tenant, key_id=key_id))
        await self.audit("key_revoked", tenant, key_id)

    async def remove_tenant(self, tenant: TenantId) -> None:
        """None of its keys opens anything any more, and no line of its queue is admitted. What runs is the purge's."""
        await self._records.change_tenant(tenant, lambda old: msgspec.structs.replace(old, removed=True))
        for key in await self._records.keys():
            if key.tenant == tenant and not key.revoked:
                await self._change_key(tenant, key.id, revoked=True)
        await self._tell(m.PolicyEvent(kind="revoked", tenant=tenant))
        await self.audit("tenant_removed", tenant, tenant)

    async def set_limits(self, tenant: TenantId, limits: OwnLimits) -> TenantRecord:
        """Replace the tenant's own limits; they hold from its next request on. Returns the new record."""
        record = await self._records.change_tenant(tenant, lambda old: msgspec.structs.replace(old, limits=limits))
        await self._tell(m.PolicyEvent(kind="changed", tenant=tenant, version=record.version))
        await self.audit("limits_changed", tenant, msgspec.json.encode(limits).decode())
        return record

    async def set_terms(self, tenant: TenantId, klass: str, weight: float) -> TenantRecord:
        """The tenant's class and its weight, for its next requests; an empty class or a weight of 0 stays as it is.

        Raises InvalidInput for a class that is none, or a weight that is no share.
        """
        if klass and klass not in CLASSES:
            raise InvalidInput(f"the class is one of {', '.join(CLASSES)}", param="klass")
        if weight and not MIN_WEIGHT <= weight <= MAX_WEIGHT:
            raise InvalidInput(f"the weight is {MIN_WEIGHT:g} to {MAX_WEIGHT:g}", param="weight")

        def changed(old: TenantRecord) -> TenantRecord:
            return msgspec.structs.replace(old, klass=klass or old.klass, weight=weight or old.weight)

        record = await self._records.change_tenant(tenant, changed)
        await self._tell(m.PolicyEvent(kind="changed", tenant=tenant, version=record.version))
        await self.audit("terms_changed", tenant, f"class={record.klass} weight={record.weight:g}")
        return record

    async def limit_key(self, tenant: TenantId, key_id: str, max_parallel: int) -> None:
        """How many requests of the key may run at once, 0 = no limit of its own; holds from its next request on."""
        await self._change_key(tenant, key_id, max_parallel=max_parallel)
        await self._tell(m.PolicyEvent(kind="changed", tenant=tenant))
        await self.audit("key_limited", tenant, f"{key_id} max_parallel={max_parallel}")

    async def raise_generation(self, tenant: TenantId) -> ScopeGeneration:
        """End the tenant's scope: nothing cached before is ever shared again. Returns the new generation."""

        def raised(old: TenantRecord) -> TenantRecord:
            return msgspec.structs.replace(old, generation=ScopeGeneration(old.generation + 1))

        record = await self._records.change_tenant(tenant, raised)
        event = m.PolicyEvent(kind="scope_raised", tenant=tenant, generation=record.generation, version=record.version)
        await self._tell(event)
        await self.audit("scope_raised", tenant, str(record.generation))
        return record.generation

    async def _change_key(self, tenant: TenantId, key_id: str, **fields: Any) -> None:
        key = await self._records.key_by_id(tenant, key_id)
        if key is None:
            raise InvalidInput(f"tenant {tenant!r} has no key {key_id!r}", param="key_id")

        def changed(record: KeyRecord | None) -> KeyRecord:
            assert record is not None
            return msgspec.structs.replace(record, **fields)

        await self._records.change_key(key.hash, changed)

    async def _tell(self, event: m.PolicyEvent) -> None:
        await self._bus.publish(subjects.POLICY_EVENTS, event)

    async def audit(self, action: str, tenant: TenantId, subject: str) -> None:
        """Keep a record of what was done; `subject` holds no text of a tenant's."""
        number = await self._records.next_audit_number()
        record = m.AuditRecord(
            service=SERVICE,
            number=number,
            action=action,
            tenant=tenant,
            subject=subject,
            wall_time_s=await self._redis.now_s(),
        )
        await self._bus.publish_durable(subjects.audit(SERVICE), record, message_id=f"{SERVICE}-{number}")


def _restored(old: TenantRecord) -> TenantRecord:
    return msgspec.structs.replace(old, removed=False)
