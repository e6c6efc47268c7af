"""The queue: first in first out inside a class, classes in order, and no class starves.

The rule: interactive before analysis before batch; but a class whose head was passed over `PASSES` times in a row by
higher classes has the next turn. So of any `PASSES + 1` placements a waiting class gets at least one (the highest
starving class first). Only placements count: a head that waits for blocks does not use up others' turns.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from shared.contracts.grants import CLASSES
from shared.contracts.ids import RequestId

PASSES = 8


class FairQueue:
    """Request ids in the order they are to be tried. Does not know what a request is."""

    def __init__(self, passes: int = PASSES) -> None:
        self._passes = passes
        self._lanes: dict[str, list[tuple[float, int, RequestId]]] = {klass: [] for klass in CLASSES}
        self._where: dict[RequestId, tuple[str, tuple[float, int, RequestId]]] = {}
        self._passed: dict[str, int] = dict.fromkeys(CLASSES, 0)

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._where

    def __iter__(self) -> Iterator[RequestId]:
        """Every queued request, by class and arrival."""
        for klass in CLASSES:
            for _, _, request_id in self._lanes[klass]:
                yield request_id

    def push(self, request_id: RequestId, klass: str, arrival_s: float, order: int) -> None:
        """Queue at the place `arrival_s` gives, ties by `order`: a request put back stands where it stood.

        A class nobody knows is queued as batch. Pushing a queued request again changes nothing.
        """
        if request_id in self._where:
            return
        lane = klass if klass in self._lanes else CLASSES[-1]
        entry = (arrival_s, order, request_id)
        insort(self._lanes[lane], entry)
        self._where[request_id] = (lane, entry)

    def remove(self, request_id: RequestId) -> bool:
        """Take a request out, placed or not. Returns whether it was queued."""
        found = self._where.pop(request_id, None)
        if found is None:
            return False
        lane, entry = found
        self._lanes[lane].remove(entry)
        if not self._lanes[lane]:
            self._passed[lane] = 0
        return True

    def head(self) -> RequestId | None:
        """Whose turn it is."""
        waiting = [klass for klass in CLASSES if self._lanes[klass]]
        if not waiting:
            return None
        starving = [klass for klass in waiting[1:] if self._passed[klass] >= self._passes]
        return self._lanes[(starving or waiting)[0]][0][2]

    def count_placed(self, klass: str) -> None:
        """One of `klass` was placed: every waiting lower class has been passed over once more."""
        lane = klass if klass in self._lanes else CLASSES[-1]
        self._passed[lane] = 0
        for lower in CLASSES[CLASSES.index(lane) + 1 :]:
            if self._lanes[lower]:
                self._passed[lower] += 1

    def ahead(self, klass: str) -> Iterator[RequestId]:
        """Who stands before a newcomer of `klass`: lower classes do not."""
        lane = klass if klass in self._lanes else CLASSES[-1]
        for higher in CLASSES[: CLASSES.index(lane) + 1]:
            for _, _, request_id in self._lanes[higher]:
                yield request_id
