"""Who leads a model pool, by a lease in NATS KV. Pure: the shell asks for the lease and reports what came of it.

The holder stops `margin_s` before the lease can end, counted from when it *asked*, so that two never lead at once by
their own clocks; workers refuse a lower term in any case. A term that was stopped is never taken up
again: its requests are forgotten, and only a higher term makes the ingresses send them anew.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from shared.contracts.ids import Term


class Change(enum.Enum):
    STARTED = "started"
    STOPPED = "stopped"
    RELEASE = "release"  # give the lease up, so that the next ask begins a new term


@dataclass(slots=True)
class Leadership:
    """One scheduler's view of the lease. Times in seconds, monotonic."""

    ttl_s: float = 6.0
    margin_s: float = 1.0
    term: Term | None = None  # set while leading
    _until_s: float = 0.0
    _ended: int = 0  # the highest term that was stopped here

    @property
    def renew_every_s(self) -> float:
        return self.ttl_s / 3

    def answered(self, asked_s: float, term: int | None) -> list[Change]:
        """What `acquire_lease`, asked at `asked_s`, returned. A new term is a new leadership: stop, then start."""
        if term is None:
            return self.give_up()
        if term <= self._ended:
            return [Change.RELEASE]
        self._until_s = asked_s + self.ttl_s - self.margin_s
        if self.term == term:
            return []
        changes = self.give_up()
        self.term = Term(term)
        return [*changes, Change.STARTED]

    def seen(self, term: Term) -> list[Change]:
        """A message showed a leader of `term`."""
        return self.give_up() if self.term is not None and term > self.term else []

    def tick(self, now: float) -> list[Change]:
        return self.give_up() if now >= self._until_s else []

    def give_up(self) -> list[Change]:
        """Stop leading, if we do: the term is over for good."""
        if self.term is None:
            return []
        self._ended = max(self._ended, self.term)
        self.term = None
        return [Change.STOPPED]
