"""When blocks that nobody uses are to be overwritten, because their tenant lets KV be kept for so long only. Pure."""

from __future__ import annotations

import heapq
import math

NEVER = math.inf


def lasts_s(retention_s: int) -> float:
    """Seconds after its last use for which KV of a grant with this `retention_s` may be kept; NEVER: no limit."""
    return NEVER if retention_s < 0 else float(retention_s)


class Retention:
    """Blocks by the time at which they end. Times are seconds on the clock that `now` is told by."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._ends: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def let_go(self, block_id: int, ends: float) -> None:
        """Nobody uses the block; it ends then."""
        if ends == NEVER:
            return
        self._ends[block_id] = ends
        heapq.heappush(self._heap, (ends, block_id))
        if len(self._heap) > 2 * len(self._ends) + 64:
            self._heap = [(ends, block_id) for block_id, ends in self._ends.items()]
            heapq.heapify(self._heap)

    def taken(self, block_id: int) -> float:
        """Somebody uses the block again, or it is overwritten: when it would have ended."""
        return self._ends.pop(block_id, NEVER) if self._ends else NEVER

    def ended(self, now: float) -> list[int]:
        """Blocks whose time is over; each is told once."""
        over: list[int] = []
        while self._heap and self._heap[0][0] <= now:
            ends, block_id = heapq.heappop(self._heap)
            if self._ends.get(block_id) == ends:
                del self._ends[block_id]
                over.append(block_id)
        return over
