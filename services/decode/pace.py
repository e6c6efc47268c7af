"""When tokens go out: gathered, so that one message tells of several steps. Pure."""

from __future__ import annotations

import math


class Pace:
    """Of all sequences of a worker at once, so that what is due goes in one message to each ingress.

    Tokens wait for those of the next step while that is expected, by how long the last one took, to end no later than
    `interval_s` behind the last publication. So streams come in pieces at most so far apart where steps are even, each
    token by itself where steps take longer, and a token waits for no more than the interval and one step.

    Args:
        interval_s: seconds; 0: no token waits.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._published_at = -math.inf
        self._step_at = -math.inf

    def due(self, now: float) -> bool:
        """A step has ended at `now`: whether its tokens go out at once."""
        step_s, self._step_at = now - self._step_at, now
        return self._is_due(now, step_s)

    def next_at(self, ended_at: float, step_s: float) -> float:
        """When the tokens behind those of a step are due: one that ended at `ended_at` and took `step_s`."""
        return (ended_at if self._is_due(ended_at, step_s) else self._published_at) + self._interval_s

    def published(self, now: float) -> None:
        """All there was has gone out."""
        self._published_at = now

    def is_late(self, told_at: float, now: float) -> bool:
        """True when tokens of `told_at` still wait because the step behind them takes longer than expected."""
        return now - told_at > self._interval_s

    def _is_due(self, now: float, step_s: float) -> bool:
        return not self._interval_s or now + step_s > self._published_at + self._interval_s
