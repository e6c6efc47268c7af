"""Which tenant has most of something. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from shared.contracts.ids import TenantId

SPARE = 64
"""Entries beyond two a tenant at which the heap is made anew."""


class TenantShares:
    """Counts by tenant, and the largest of them in O(log tenants), amortized.

    The heap has an entry of each tenant that is at least its count: one that is too high is put right when it comes to
    the top, and older ones of a tenant are dropped there.
    """

    def __init__(self) -> None:
        self._counts: dict[TenantId, int] = {}
        self._told: dict[TenantId, int] = {}
        self._heap: list[tuple[int, TenantId]] = []  # (-told, tenant)

    def counts(self) -> dict[TenantId, int]:
        """Of every tenant that has any."""
        return dict(self._counts)

    def add(self, tenant: TenantId, change: int) -> None:
        """Raises ValueError for a count that would be negative."""
        count = self._counts.get(tenant, 0) + change
        if count < 0:
            raise ValueError("a tenant cannot have less than nothing")
        if count:
            self._counts[tenant] = count
        else:
            self._counts.pop(tenant, None)
        if count > self._told.get(tenant, 0):
            self._told[tenant] = count
            heapq.heappush(self._heap, (-count, tenant))
            if len(self._heap) > 2 * len(self._told) + SPARE:
                self._heap = [(-told, tenant) for tenant, told in self._told.items()]
                heapq.heapify(self._heap)

    def largest(self, counts: Callable[[TenantId], bool]) -> TenantId:
        """The tenant with most, of those that `counts`. Raises LookupError when none does."""
        passed: list[tuple[int, TenantId]] = []
        try:
            while self._heap:
                negative, tenant = self._heap[0]
                count = self._counts.get(tenant, 0)
                if -negative != self._told.get(tenant):  # an older entry of one that was pushed again
                    heapq.heappop(self._heap)
                elif not count:
                    heapq.heappop(self._heap)
                    del self._told[tenant]
                elif count < -negative:
                    self._told[tenant] = count
                    heapq.heapreplace(self._heap, (-count, tenant))
                elif counts(tenant):
                    return tenant
                else:
                    passed.append(heapq.heappop(self._heap))
            raise LookupError("no tenant counts")
        finally:
            for entry in passed:
                heapq.heappush(self._heap, entry)
