"""Events to ingresses: numbered per ingress, in order, resent until seen.

Numbers rise from `term << NUMBER_SHIFT`: those of a new leader are above the old one's, and those of an ingress that
was given up and came back above its earlier ones. A leader renews its lease, which raises the next term,
far more often than once in 2**24 events, and numbers of this century's terms stay well within 64 bits. One event per
ingress is under way at a time: an acknowledgement is cumulative, and a later event must not overtake an earlier one (a
worker lost is judged by what was placed before).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from shared.contracts.ids import IngressId, Term
from shared.contracts.messages import Placed, PlacementRefused, WorkerLost

NUMBER_SHIFT = 24
Event = Placed | PlacementRefused | WorkerLost


@dataclass(slots=True)
class _Lane:
    unseen: deque[Event] = field(default_factory=deque)
    sent_s: float | None = None


class Outbox:
    """What each ingress has still to see."""

    def __init__(self, term: Term, resend_s: float = 1.0) -> None:
        self._number = int(term) << NUMBER_SHIFT
        self._resend_s = resend_s
        self._lanes: dict[IngressId, _Lane] = {}

    def __len__(self) -> int:
        return sum(len(lane.unseen) for lane in self._lanes.values())

    def add(self, ingress: IngressId, build: Callable[[int], Event]) -> None:
        """Queue the event that `build` makes of its number."""
        self._number += 1
        self._lanes.setdefault(ingress, _Lane()).unseen.append(build(self._number))

    def due(self, now: float) -> list[tuple[IngressId, Event]]:
        """The oldest unseen event of each ingress, if it was never sent or sent `resend_s` ago; marks it sent."""
        out = []
        for ingress, lane in self._lanes.items():
            if lane.unseen and (lane.sent_s is None or now - lane.sent_s >= self._resend_s):
                lane.sent_s = now
                out.append((ingress, lane.unseen[0]))
        return out

    def seen(self, ingress: IngressId, number: int) -> None:
        """The ingress saw everything up to `number`."""
        lane = self._lanes.get(ingress)
        if lane is None:
            return
        while lane.unseen and lane.unseen[0].number <= number:
            lane.unseen.popleft()
            lane.sent_s = None

    def drop(self, ingress: IngressId) -> None:
        """The ingress is gone: nobody is left to tell."""
        self._lanes.pop(ingress, None)
