"""How many requests of one tenant are answered at the same time, so that none keeps the others waiting. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from shared.contracts.errors import Overloaded
from shared.contracts.ids import TenantId


class OpenRequests:
    """Counts them, by tenant."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: Counter[TenantId] = Counter()

    @contextmanager
    def one(self, tenant: TenantId) -> Iterator[None]:
        """One of the tenant's. Raises Overloaded when it has too many."""
        if self._open[tenant] >= self._most:
            raise Overloaded(f"you have {self._most} requests open; wait for an answer", retry_after_s=1.0)
        self._open[tenant] += 1
        try:
            yield
        finally:
            self._open[tenant] -= 1
            if not self._open[tenant]:
                del self._open[tenant]
