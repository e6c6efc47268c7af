"""What the command line asks of policy: API keys and limits, changed and shown."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from services.policy.accounts import Accounts
from services.policy.admin import Admin
from services.policy.purges import Purges, check_purge
from services.policy.records import Records
from services.policy.tenants import KeyRecord, OwnLimits, TenantRecord
from shared.bus.bus import Bus, Delivery, Subscription
from shared.contracts import admin_messages as am
from shared.contracts import subjects
from shared.contracts.errors import InvalidInput
from shared.contracts.ids import TenantId

MESSAGES = (
    am.KeyCreate | am.KeyRevoke | am.LimitsChange | am.TermsChange | am.TenantsQuery | am.PurgeStart | am.PurgeQuery
)
MAX_LIMIT = 2**53
"""What Redis' scripts count exactly."""


class AdminDesk:
    """Answers `policy.admin`, to which only the command line's NATS user may publish. `start`, then `stop`."""

    def __init__(self, bus: Bus, admin: Admin, records: Records, accounts: Accounts, purges: Purges) -> None:
        self._purges = purges
        self._accounts = accounts
        self._bus = bus
        self._admin = admin
        self._records = records
        self._served: Subscription | None = None

    async def start(self) -> None:
        """Serve."""
        self._served = await self._bus.serve(subjects.POLICY_ADMIN, MESSAGES, self.answer, queue="policy")

    async def stop(self) -> None:
        """Take no new question; one in hand is finished."""
        if self._served is not None:
            await self._served.stop()

    async def answer(self, delivery: Delivery) -> am.Tenants | am.Purges:
        """Carry it out; the tenant or purge as it then stands. Raises InvalidInput, NotFound, Conflict, Unavailable."""
        ask = delivery.message
        if isinstance(ask, am.PurgeStart):
            return await self._purge(ask)
        if isinstance(ask, am.PurgeQuery):
            return await self._purges.shown(ask.purge_id)
        if isinstance(ask, am.KeyCreate):
            _check_limit("max_parallel", ask.max_parallel)
            await self._admin.create_key(ask.tenant, ask.key_id, ask.key_hash, ask.max_parallel)
        elif isinstance(ask, am.KeyRevoke):
            await self._admin.revoke_key(ask.tenant, ask.key_id)
        elif isinstance(ask, am.LimitsChange):
            await (self._change_key_limits(ask) if ask.key_id else self._change_limits(ask))
        elif isinstance(ask, am.TermsChange):
            await self._admin.set_terms(ask.tenant, ask.klass, ask.weight)
        return am.Tenants(tenants=await self._shown(ask.tenant))

    async def _purge(self, ask: am.PurgeStart) -> am.Purges:
        if ask.purge_id:
            return await self._purges.declare_gone(ask.purge_id, ask.gone)
        check_purge(ask)
        return await self._purges.order(ask)

    async def _change_limits(self, ask: am.LimitsChange) -> None:
        record = await self._records.tenant(ask.tenant)
        if record is None:
            raise InvalidInput(f"there is no tenant {ask.tenant!r}", param="tenant")
        for name, value in ask.limits.items():
            if name not in OwnLimits.__struct_fields__:
                raise InvalidInput(f"{name} is not a limit: {', '.join(OwnLimits.__struct_fields__)}", param=name)
            _check_limit(name, value)
        await self._admin.set_limits(ask.tenant, msgspec.structs.replace(record.limits, **ask.limits))

    async def _change_key_limits(self, ask: am.LimitsChange) -> None:
        for name, value in ask.limits.items():
            if name != "max_parallel":
                raise InvalidInput(f"{name} is a limit of tenants; a key has only max_parallel", param=name)
            _check_limit(name, value)
        await self._admin.limit_key(ask.tenant, ask.key_id, ask.limits.get("max_parallel") or 0)

    async def _shown(self, tenant: TenantId) -> tuple[am.TenantInfo, ...]:
        if tenant:
            found = await self._records.tenant(tenant)
            records = [found] if found is not None else []
        else:
            records = await self._records.tenants()
        keys: dict[TenantId, list[KeyRecord]] = {}
        for key in await self._records.keys():
            keys.setdefault(key.tenant, []).append(key)
        return tuple([await self._info(record, keys.get(record.id, ())) for record in records])

    async def _info(self, record: TenantRecord, keys: Sequence[KeyRecord]) -> am.TenantInfo:
        running = await self._accounts.running(record.id)
        infos = (am.KeyInfo(k.id, k.admin, k.revoked, k.max_parallel, running.get(k.id, 0)) for k in keys)
        limits, total = _own(record), sum(running.values())
        return am.TenantInfo(record.id, tuple(infos), limits, total, record.klass, record.weight)


def _check_limit(name: str, value: int | None) -> None:
    if value is not None and not 0 <= value <= MAX_LIMIT:
        raise InvalidInput(f"{name} must be 0 (no limit) to {MAX_LIMIT}", param=name)


def _own(record: TenantRecord) -> dict[str, int]:
    limits = msgspec.structs.asdict(record.limits)
    return {name: value for name, value in limits.items() if value is not None}
