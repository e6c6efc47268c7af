"""What policy says of a tenant that asks for no run yet: a grant holds nothing, so it is asked for one to hear it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable

from shared.contracts import subjects
from shared.contracts.errors import BatonError, Unavailable
from shared.contracts.grants import Grant
from shared.contracts.ids import RequestId, TenantId
from shared.contracts.message import decode
from shared.contracts.messages import AdmitTenant, Granted, Identity, Refusal
from shared.ingress.ingress import Ingress
from shared.ingress.served_models import ServedModels

KEPT_S = 5.0
RETENTION_EVERY_S = 600.0
AWAY_S = 30.0
"""Policy did not answer: it is not asked of one tenant after the other for so long."""


async def tenant_terms(
    ingress: Ingress, tenant: TenantId, request_id: RequestId, model: str, num_prompt_tokens: int
) -> Identity:
    """The tenant's limits, and how much output it gets where it names no number.

    Raises what policy refuses such a request with, or Unavailable.
    """
    ask = AdmitTenant(
        request_id=request_id, tenant=tenant, model=model, num_prompt_tokens=num_prompt_tokens, max_tokens=1
    )
    granted: Granted = await ingress.ask_policy(subjects.POLICY_ADMIT_TENANT, ask, Granted | Refusal)
    grant = decode(granted.grant.payload, Grant)
    return Identity(
        tenant=tenant,
        key_id="",
        default_max_tokens=granted.default_max_tokens,
        limits=grant.limits,
        retention_s=grant.retention_s,
    )


class TokenLimits:
    """How many prompt tokens tenants may have waiting, as policy said at most KEPT_S ago.

    Args:
        on_retention: hears a tenant's retention each time policy says it.
    """

    def __init__(
        self,
        ingress: Ingress,
        clock: Callable[[], float] = time.monotonic,
        *,
        on_retention: Callable[[TenantId, int], Awaitable[None]] | None = None,
    ) -> None:
        self._ingress = ingress
        self._clock = clock
        self._on_retention = on_retention
        self._known: dict[TenantId, tuple[float, int]] = {}

    async def of(self, tenant: TenantId, model: str) -> int:
        """0 = any number. Raises what policy refuses a request for `model` with, or Unavailable."""
        now = self._clock()
        asked_at, limit = self._known.get(tenant, (-KEPT_S, 0))
        if now - asked_at >= KEPT_S:
            name = RequestId(f"req-{secrets.token_hex(16)}")
            terms = await tenant_terms(self._ingress, tenant, name, model, 1)
            limit = terms.limits.batch_enqueued_tokens
            if self._on_retention is not None:
                await self._on_retention(tenant, terms.retention_s)
            self._known[tenant] = (now, limit)
        return limit


class RetentionNews:
    """Asks policy for the retention of tenants that send no lines, so that a changed one holds for results there are.

    Args:
        limits: tells whoever keeps retentions what policy says.
    """

    def __init__(self, limits: TokenLimits, models: ServedModels, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._models = models
        self._clock = clock
        self._asked: dict[TenantId, float] = {}
        self._quiet_until = -AWAY_S

    async def hear(self, tenant: TenantId) -> None:
        """Ask, unless it was within RETENTION_EVERY_S. A policy that is away or refuses leaves all as it is."""
        now = self._clock()
        if now < self._quiet_until or now - self._asked.get(tenant, -RETENTION_EVERY_S) < RETENTION_EVERY_S:
            return
        for model in self._models.names:  # the first ones may not be the tenant's
            try:
                await self._limits.of(tenant, model)
                break
            except Unavailable:
                self._quiet_until = now + AWAY_S
                return
            except BatonError:
                continue
        self._asked[tenant] = now
