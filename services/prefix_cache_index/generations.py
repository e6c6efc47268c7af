"""The newest generation of each tenant's scope: what comes below it ended and is refused. Pure; the shell stores it."""

from __future__ import annotations

from collections.abc import Mapping

from shared.contracts.errors import Forbidden
from shared.contracts.grants import Scope
from shared.contracts.ids import ScopeGeneration, TenantId


class Generations:
    """Newest generation by tenant; it only rises."""

    def __init__(self, known: Mapping[TenantId, ScopeGeneration] | None = None) -> None:
        self._newest = dict(known or {})

    def newest(self, tenant: TenantId) -> ScopeGeneration:
        """0 when nothing is known."""
        return self._newest.get(tenant, ScopeGeneration(0))

    def rise(self, tenant: TenantId, generation: ScopeGeneration) -> bool:
        """True if that is news."""
        if generation <= self.newest(tenant):
            return False
        self._newest[tenant] = generation
        return True

    def check(self, scope: Scope) -> None:
        """Raises Forbidden (`scope_ended`) for a scope below the newest generation of its tenant."""
        if scope.generation < self.newest(scope.tenant):
            raise Forbidden("the scope of this grant has ended", code="scope_ended")
