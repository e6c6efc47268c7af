"""The queue: whose turn it is, by class, by tenant, and by how long somebody has waited. Pure; docs/fairness.md.

Three rules, the first that names somebody holds:

1. Late: a request that has waited for its class's `max_wait` goes by what was due first, whatever its class. Such turns
   get at most a share `LATE_SHARE` of the tokens while others wait, and none that would bring a tenant further ahead of
   the tenant of its class that was served least than the request itself.
2. Passed over: interactive before analysis before batch; but a class that was passed over for `PASSES` times its head's
   tokens by higher classes has the next turn, the highest such class first. Only placements count: a head that waits
   for blocks does not use up others' turns.
3. Inside a class what ran before, on a worker that was lost; then the tenant that was served least, in tokens over
   weight; inside a tenant first in first out.

Both the first and the third charge alike. So of two tenants of a class that wait all the time neither is ever served
more than the other, in tokens over weight, by more than the sum of their two largest requests, twice that with late
ones: whatever the lengths of requests and queues.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, islice

from services.scheduler.class_lane import ClassLane, Waiting
from services.scheduler.shares import Charge
from shared.contracts.grants import CLASSES
from shared.contracts.ids import RequestId, TenantId

PASSES = 8
LATE_SHARE = 0.25
LOOK_BEHIND = 4
"""So many of a tenant's requests are looked at where its first has no room, and more where few tenants wait."""
MOST_LOOKED_AT = 64
"""Requests of a class that are looked at for one place."""
NOBODY = TenantId("")


class FairQueue:
    """Request ids in the order they are to be tried. Knows of a request only its class, tenant, arrival and cost.

    Args:
        max_wait_s: by class, seconds; 0 or none: it is never late.
    """

    def __init__(self, passes: int = PASSES, max_wait_s: Mapping[str, float] | None = None) -> None:
        self._passes = passes
        self._max_wait_s = {k: s for k, s in (max_wait_s or {}).items() if s > 0}
        self._lanes = {klass: ClassLane() for klass in CLASSES}
        self._where: dict[RequestId, Waiting] = {}
        self._passed = dict.fromkeys(CLASSES, 0.0)  # tokens of higher classes since its last turn
        self._late_debt = 0.0  # tokens that others are to get before the next late turn

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._where

    def __iter__(self) -> Iterator[RequestId]:
        """Every queued request, by class, tenant and arrival."""
        for lane in self._lanes.values():
            for waiting in lane:
                yield waiting.request_id

    def push(
        self,
        request_id: RequestId,
        klass: str,
        arrival_s: float,
        order: int,
        *,
        tenant: TenantId = NOBODY,
        weight: float = 1.0,
        cost: float = 1.0,
        again: bool = False,
        resumed: bool = False,
    ) -> None:
        """Queue at the place `arrival_s` gives among its tenant's, ties by `order`.

        A class nobody knows is queued as batch. Pushing a queued request again changes nothing.

        Args:
            cost: tokens to be computed, as predicted; what it is charged for is told to `begin`.
            resumed: it ran before, on a worker that was lost: it goes before all of its class that have not.
            again: it was queued before: its tenant's counter is left as it is, and it stands where it stood.
        """
        if request_id in self._where:
            return
        lane, fresh = class_of(klass), not resumed
        waiting = Waiting(fresh, arrival_s, order, request_id, lane, tenant, sane_weight(weight), cost)
        self._lanes[waiting.klass].add(waiting, again=again)
        self._where[request_id] = waiting

    def remove(self, request_id: RequestId) -> bool:
        """Take a request out, placed or not. Returns whether it was queued."""
        waiting = self._where.pop(request_id, None)
        if waiting is None:
            return False
        lane = self._lanes[waiting.klass]
        lane.remove(waiting)
        if not lane:
            self._passed[waiting.klass] = 0.0
        return True

    def waiting_of(self, klass: str, tenant: TenantId) -> int:
        """How many requests of a tenant wait in a class."""
        return len(self._lanes[class_of(klass)].line(tenant))

    def weights(self, klass: str) -> dict[TenantId, float]:
        """Who waits in a class or a higher one, with its weight."""
        lanes = [self._lanes[one] for one in CLASSES[: CLASSES.index(class_of(klass)) + 1]]
        return {tenant: lane.shares.account(tenant).weight for lane in lanes for tenant in lane.tenants()}

    # ------------------------------------------------------------------------------------------ turns

    def head(self, now: float = float("-inf")) -> RequestId | None:
        """Whose turn it is; without `now` (seconds, as arrivals) nobody is late."""
        first = self._late_head(now) or self._class_head()
        return None if first is None else first.request_id

    def turns(self, now: float = float("-inf")) -> Iterator[RequestId]:
        """The head, then of each class others in the order they may be tried where those before have no room."""
        head = self.head(now)
        if head is None:
            return
        yield head
        for lane in self._lanes.values():
            tenants = lane.tenants()
            behind = max(LOOK_BEHIND, MOST_LOOKED_AT // max(1, len(tenants)))
            lines = chain.from_iterable(islice(lane.line(tenant), behind) for tenant in tenants)
            for waiting in islice(lines, MOST_LOOKED_AT):
                if waiting.request_id != head:
                    yield waiting.request_id

    def _class_head(self) -> Waiting | None:
        waiting = [klass for klass in CLASSES if self._lanes[klass]]
        if not waiting:
            return None
        for klass in waiting[1:]:
            head = self._lanes[klass].head()
            if self._passed[klass] >= self._passes * head.cost:
                return head
        return self._lanes[waiting[0]].head()

    def _late_head(self, now: float) -> Waiting | None:
        late = list(self._late(now)) if self._late_debt <= 0 else []
        return min(late)[1] if late else None

    def _late(self, now: float) -> Iterator[tuple[float, Waiting]]:
        """The first requests of tenants that are due, with when they were, but of those too far ahead."""
        for klass, max_wait_s in self._max_wait_s.items():
            lane = self._lanes[klass]
            if (least := lane.shares.least()) is None:
                continue
            for tenant in lane.tenants():
                first = lane.first(tenant)
                ahead = lane.shares.account(tenant).served - least
                if first.arrival_s + max_wait_s <= now and ahead <= first.cost / first.weight:
                    yield first.arrival_s + max_wait_s, first

    def is_late(self, request_id: RequestId, now: float) -> bool:
        """True if it would begin by the first rule."""
        late = self._late_head(now)
        return late is not None and late.request_id == request_id

    # ------------------------------------------------------------------------------------------ service

    def charge(self, klass: str, tenant: TenantId, weight: float, tokens: float) -> Charge:
        """A request begins: its tenant has been served so much more."""
        return self._lanes[class_of(klass)].shares.charge(tenant, sane_weight(weight), tokens)

    def correct(self, klass: str, charge: Charge, tokens: float) -> None:
        """What the request comes to in all is known better."""
        self._lanes[class_of(klass)].shares.correct(charge, tokens)

    def close(self, klass: str, charge: Charge) -> None:
        """The request runs no more; 0 tokens before that give everything back."""
        self._lanes[class_of(klass)].shares.close(charge)

    def began_late(self, cost: float) -> None:
        """A request began by the first rule: others have the next turns. A negative `cost` takes that back."""
        self._late_debt = max(0.0, self._late_debt + cost * (1 / LATE_SHARE - 1))

    def count_placed(self, klass: str, cost: float = 1.0, *, late: bool = False) -> None:
        """One of `klass` was placed: every waiting lower class has been passed over for so many tokens more."""
        own = class_of(klass)
        self._passed[own] = 0.0
        for lower in CLASSES[CLASSES.index(own) + 1 :]:
            if self._lanes[lower]:
                self._passed[lower] += cost
        if not late:
            self._late_debt = max(0.0, self._late_debt - cost)

    def before(self, request_id: RequestId) -> list[RequestId]:
        """Who has a turn before a request that waits, by the second and third rule; nobody before one that does not."""
        waiting = self._where.get(request_id)
        return self._before(waiting) if waiting is not None else []

    def ahead(self, klass: str, tenant: TenantId = NOBODY, weight: float = 1.0, cost: float = 1.0) -> list[RequestId]:
        """The same for a newcomer."""
        last = float("inf")
        return self._before(Waiting(True, last, 0, RequestId(""), class_of(klass), tenant, sane_weight(weight), cost))

    def _before(self, waiting: Waiting) -> list[RequestId]:
        higher = CLASSES[: CLASSES.index(waiting.klass)]
        found = [w for klass in higher for w in self._lanes[klass]]
        return [w.request_id for w in (*found, *self._lanes[waiting.klass].before(waiting))]


def class_of(klass: str) -> str:
    """The class a request is queued in."""
    return klass if klass in CLASSES else CLASSES[-1]


def sane_weight(weight: float) -> float:
    """A weight one can divide by; policy grants none that is not above 0."""
    return weight if weight > 0 else 1.0
