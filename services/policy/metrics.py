"""What policy tells in metrics."""

from __future__ import annotations

import time
from collections.abc import Callable

from services.policy.accounts import Accounts
from services.policy.admission import ALL_TAKEN
from services.policy.records import Records
from shared.contracts.errors import QuotaExceeded
from shared.contracts.ids import TenantId
from shared.contracts.messages import Settle
from shared.telemetry import metric_names as names
from shared.telemetry.metrics import Metrics

LIMITED_S = 15.0
"""A limiter counts as active for so long after it turned a request away: a usual scrape interval."""


class PolicyMetrics:
    """Counts answers and settlements. `clock` gives monotonic seconds."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._limited_s = float("-inf")
        metrics.before_scrape(self._read)

    def answered(self, code: str) -> None:
        """An answer to admit: the code of its error, or empty for a grant."""
        self._metrics.inc(names.ADMISSIONS, outcome=code or "granted")
        if code in (QuotaExceeded.default_code, ALL_TAKEN):
            self._limited_s = self._clock()

    def settlement(self, outcome: str) -> None:
        """A settlement was taken from the stream."""
        self._metrics.inc(names.SETTLEMENTS, outcome=outcome)

    def booked(self, tenant: TenantId, settle: Settle, *, again: bool) -> None:
        """A settlement is in the ledger; `again`: it was there before."""
        self.settlement("already_booked" if again else "booked")
        if again:
            return
        tokens = {
            "prompt": settle.prompt_tokens,
            "cached": settle.cached_tokens,
            "completion": settle.completion_tokens,
        }
        for kind, count in tokens.items():
            self._metrics.inc(names.BILLED_TOKENS, count, kind=kind)
            self._metrics.inc(names.TENANT_TOKENS, count, tenant=tenant, kind=kind)

    def _read(self) -> None:
        limited = self._clock() - self._limited_s < LIMITED_S
        self._metrics.set(names.LIMITER, limited, limiter="quota")


class RunningGauge:
    """Requests of each tenant that hold a place, as admission counts them."""

    def __init__(self, metrics: Metrics, records: Records, accounts: Accounts) -> None:
        self._metrics = metrics
        self._records = records
        self._accounts = accounts

    async def refresh(self) -> None:
        """Count again, where the metric is exposed. Raises Unavailable."""
        if not self._metrics.exposes(names.TENANT_RUNNING):
            return
        tenants = [tenant.id for tenant in await self._records.tenants()]
        counts: dict[str, float] = {tenant: sum((await self._accounts.running(tenant)).values()) for tenant in tenants}
        self._metrics.set_by_tenant(names.TENANT_RUNNING, counts)
