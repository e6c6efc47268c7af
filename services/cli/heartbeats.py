"""Which children stand still: one that moves sets the time of its ready file anew, once a second or oftener. Pure."""

from __future__ import annotations

from collections.abc import Mapping

LOOK_S = 1.0
ASLEEP_S = 5.0
"""Looks further apart than this: we stood still ourselves, or the machine slept, and know nothing of the others."""


class Heartbeats:
    """The marks children set, and since when each is the same. Times are passed in, monotonic seconds.

    Args:
        limit_s: how long a mark may stay the same.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._seen: dict[int, tuple[float, float]] = {}
        self._looked_at = float("-inf")

    def still(self, marks: Mapping[int, float], now: float) -> list[int]:
        """Take all children's marks as they are; the process ids of those that stand still."""
        if now - self._looked_at > ASLEEP_S:
            self._seen.clear()
        self._looked_at = now
        since = {pid: (mark, now) for pid, mark in marks.items()}
        for pid, (mark, at) in self._seen.items():
            if marks.get(pid) == mark:
                since[pid] = mark, at
        self._seen = since
        return sorted(pid for pid, (_, at) in since.items() if now - at >= self._limit_s)
