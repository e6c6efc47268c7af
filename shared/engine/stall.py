"""Whether an engine stands still: its progress counter has not moved for longer than any step takes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

STEPS = 4.0
"""A step may take so many times what the step-time model says of the longest one before it counts as standing still."""


@dataclass(slots=True)
class StallClock:
    """How long the counter has stood, in seconds on the caller's monotonic clock."""

    limit_s: float
    still_s: float = 0.0
    _progress: int = -1
    _moved_at: float = 0.0

    def look(self, progress: int, longest_step_s: float, now: float) -> bool:
        """Take the counter as it is now. True while the engine stands still."""
        if progress != self._progress:
            self._progress, self._moved_at = progress, now
        self.still_s = now - self._moved_at
        return self.still_s >= max(self.limit_s, STEPS * longest_step_s)
