"""What an ingress was granted and does not know of: the answer to its question was lost, or what it had to settle was.

An ingress names its requests in every beat. A hold that it leaves out for a while is let go, so that a tenant's place
is free long before the hold's own time is over. Nothing is booked; a settlement that comes later still is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from services.policy.accounts import Accounts
from services.policy.ingress_watch import IngressWatch
from services.policy.records import Records
from services.policy.tenants import effective_limits
from shared.contracts.grants import Limits
from shared.contracts.ids import IngressId, RequestId, TenantId

log = logging.getLogger("baton.policy")

EVERY_S = 5.0
"""Holds are compared with beats so often."""
UNCLAIMED_S = 15.0
"""A hold that its ingress does not name for so long is nobody's: longer than an ingress waits for policy's answer, and
than a settlement usually takes."""

_Hold = tuple[TenantId, RequestId, IngressId]


class UnclaimedHolds:
    """Looks for holds that nobody knows of. Several processes may do the same: all is safe to repeat."""

    def __init__(
        self,
        records: Records,
        accounts: Accounts,
        watch: IngressWatch,
        defaults: Limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._records = records
        self._accounts = accounts
        self._watch = watch
        self._defaults = defaults
        self._clock = clock
        self._missed: dict[_Hold, float] = {}
        self._looked = float("-inf")

    async def sweep(self) -> None:
        """Compare and let go, if it is time to. Raises Unavailable; call again then."""
        now = self._clock()
        if now - self._looked < EVERY_S:
            return
        missed: dict[_Hold, float] = {}
        for tenant in await self._records.tenants():
            for request_id, ingress in (await self._accounts.held_by(tenant.id)).items():
                if self._watch.names(ingress, request_id, now) is not False:
                    continue
                hold = (tenant.id, request_id, ingress)
                since = self._missed.get(hold, now)
                if now - since < UNCLAIMED_S:
                    missed[hold] = since
                    continue
                limits = effective_limits(tenant.limits, self._defaults)
                await self._accounts.release(tenant.id, limits, request_id)
                log.warning("request %s of tenant %s was granted and is nobody's", request_id, tenant.id)
        self._missed, self._looked = missed, now
