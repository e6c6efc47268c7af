"""The requests of one class that wait: first in first out inside a tenant, the tenant served least goes first. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from services.scheduler.shares import Shares
from shared.contracts.ids import RequestId, TenantId


@dataclass(frozen=True, slots=True, order=True)
class Waiting:
    """A request in the queue, ordered by arrival, those that ran before first (`fresh` is False for them).

    `cost`: tokens to be computed for it, as predicted.
    """

    fresh: bool
    arrival_s: float
    order: int
    request_id: RequestId
    klass: str
    tenant: TenantId
    weight: float = 1.0
    cost: float = 1.0


Rank = tuple[bool, float, float, Waiting]


def _rank(served: float, first: Waiting) -> Rank:
    """What ran before goes first: its client has been promised the rest. Then who was served least; of equals the one
    with the smaller request, of equals in that too who came first."""
    return first.fresh, served, first.cost / first.weight, first


class ClassLane:
    """See the module's text. Iterating gives every request, tenant by tenant in the order of their turns."""

    def __init__(self) -> None:
        self.shares = Shares()
        self._tenants: dict[TenantId, list[Waiting]] = {}

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def __iter__(self) -> Iterator[Waiting]:
        for tenant in self.tenants():
            yield from self._tenants[tenant]

    def tenants(self) -> list[TenantId]:
        """Those who wait, whose turn it is first."""
        return [first.tenant for first in sorted((line[0] for line in self._tenants.values()), key=self._rank)]

    def _rank(self, first: Waiting) -> Rank:
        return _rank(self.shares.account(first.tenant).served, first)

    def first(self, tenant: TenantId) -> Waiting:
        """The request of a waiting tenant that came first."""
        return self._tenants[tenant][0]

    def head(self) -> Waiting:
        """Whose turn it is; there must be one."""
        return min((line[0] for line in self._tenants.values()), key=self._rank)

    def line(self, tenant: TenantId) -> list[Waiting]:
        """A tenant's requests by arrival. Not a copy."""
        return self._tenants.get(tenant, [])

    def add(self, waiting: Waiting, *, again: bool) -> None:
        """`again`: it was here before, and stands where it stood."""
        insort(self._tenants.setdefault(waiting.tenant, []), waiting)
        self.shares.waits(waiting.tenant, waiting.weight, again=again)

    def remove(self, waiting: Waiting) -> None:
        line = self._tenants[waiting.tenant]
        del line[bisect_left(line, waiting)]
        if not line:
            del self._tenants[waiting.tenant]
        self.shares.waits_no_more(waiting.tenant)

    def before(self, waiting: Waiting) -> list[Waiting]:
        """Who has a turn before `waiting`, in it or about to be: its tenant's earlier requests, and of the others as
        much as brings them to where its tenant then stands."""
        line = self.line(waiting.tenant)
        own = line[: bisect_left(line, waiting)]
        account = self.shares.account(waiting.tenant)
        start = account.served if line else self.shares.level(waiting.tenant, account)
        reached = start + sum(w.cost for w in own) / waiting.weight
        found, last = list(own), _rank(reached, waiting)
        for tenant, others in self._tenants.items():
            if tenant == waiting.tenant:
                continue
            served = self.shares.account(tenant).served
            for other in others:
                if (served >= reached or not waiting.fresh) and _rank(served, other) > last:
                    break
                found.append(other)
                served += other.cost / other.weight
        return found
