"""The newest generation of each tenant's scope: what comes below it ended and is refused. Pure; the shell stores it."""

from __future__ import annotations

from collections.abc import Mapping

from shared.contracts.errors import PURGED, Cancelled, Forbidden
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

    def is_over(self, scope: Scope) -> bool:
        """True for a scope below the newest generation of its tenant."""
        return scope.generation < self.newest(scope.tenant)

    def check(self, scope: Scope) -> None:
        """Raises Forbidden (`scope_ended`) for a scope that is over."""
        if self.is_over(scope):
            raise Forbidden("the scope of this grant has ended", code="scope_ended")

    def require_live(self, scope: Scope) -> None:
        """Raises what a request of a scope that is over ends with."""
        if self.is_over(scope):
            raise purged()


def purged() -> Cancelled:
    """What a request ends with when its tenant is purged while it waits or runs."""
    return Cancelled("everything of this tenant was purged while the request was under way", code=PURGED)
