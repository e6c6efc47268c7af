"""What an ingress that died held of its tenants' limits is given back at once, not when its requests' time is over.

A request under an Idempotency-Key is settled as its owner last wrote it; of others nobody knows how far they were, and
nothing is billed: their clients saw an error. Both are booked below any settlement the ingress may still send.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence

from services.policy.accounts import Accounts
from services.policy.idempotency import IdempotencyRecords, Progress
from services.policy.ingress_watch import IngressWatch
from services.policy.records import Records
from services.policy.tenants import TenantRecord, effective_limits
from shared.contracts.attempt import Attempt
from shared.contracts.grants import Limits, SignedGrant
from shared.contracts.ids import Epoch, IngressId, RequestId
from shared.contracts.messages import Settle

log = logging.getLogger("baton.policy")

FINISH = "ingress_lost"
_NO_GRANT = SignedGrant(b"", b"")


class LostIngresses:
    """Looks after reservations of ingresses that are gone. Several processes may do the same: all is safe to repeat."""

    def __init__(
        self,
        records: Records,
        accounts: Accounts,
        kept: Sequence[IdempotencyRecords],
        watch: IngressWatch,
        defaults: Limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._records = records
        self._accounts = accounts
        self._kept = kept
        self._watch = watch
        self._defaults = defaults
        self._clock = clock
        self._started = False
        self._done: set[IngressId] = set()

    async def sweep(self) -> None:
        """Settle what lost ingresses held. Raises Unavailable; call again then."""
        lost = self._watch.all_lost(self._clock())
        if self._started and not lost - self._done:
            self._done &= lost
            return
        for tenant in await self._records.tenants():
            await self._sweep_tenant(tenant, lost)
        self._started, self._done = True, lost

    async def _sweep_tenant(self, tenant: TenantRecord, lost: Collection[IngressId]) -> None:
        held_by = await self._accounts.held_by(tenant.id)
        for ingress in set(held_by.values()):
            self._watch.heard_of(ingress, self._clock())  # it may have died before this process began
        held = [name for name, ingress in held_by.items() if ingress in lost]
        if not held:
            return
        limits = effective_limits(tenant.limits, self._defaults)
        for request_id in held:
            settle = await self._settlement(tenant, request_id, held_by[request_id])
            await self._accounts.settle(tenant.id, limits, str(request_id), settle)
        log.warning("%d requests of tenant %s were held by an ingress that is gone", len(held), tenant.id)

    async def _settlement(self, tenant: TenantRecord, request_id: RequestId, ingress: IngressId) -> Settle:
        found = await self._progress(tenant, request_id)
        if found is None or not found.running or found.owner != ingress:
            return Settle(
                attempt=Attempt(request_id, Epoch(0)),
                grant=_NO_GRANT,
                prompt_tokens=0,
                completion_tokens=0,
                finish=FINISH,
            )
        return Settle(
            attempt=Attempt(request_id, Epoch(max(0, found.epoch - 1))),
            grant=_NO_GRANT,
            prompt_tokens=found.prompt_tokens,
            completion_tokens=found.completion_tokens,
            finish=FINISH,
        )

    async def _progress(self, tenant: TenantRecord, request_id: RequestId) -> Progress | None:
        for kept in self._kept:
            if (found := await kept.progress(tenant.id, request_id)) is not None:
                return found
        return None
