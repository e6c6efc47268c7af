"""When a sequence may begin: at once, or with a batch that runs until all of it has ended. Pure, clock passed in.

    continuous   at once: steps are formed anew from whatever is ready
    static       with the next batch: up to `batch_size` of those that wait when the one before has ended
    dynamic      likewise, but a batch waits until it is full, or `window_s` after the first of it arrived

The last two are here to be measured against the first.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Batching = Literal["continuous", "static", "dynamic"]
BATCHING: tuple[Batching, ...] = ("continuous", "static", "dynamic")


class BatchingPolicy(Protocol):
    """Says who may compute. Knows ids and times; neither tokens nor blocks."""

    admits_all: bool
    """True when it lets every sequence run as soon as it can."""

    def admit(self, ready: Sequence[str], live: Collection[str], now: float) -> Collection[str]:
        """Those that may run now.

        Args:
            ready: sequences that could compute or have begun to, earliest arrival first.
            live: all that have not ended, those ready among them.
            now: seconds on a monotonic clock.
        """
        ...

    def wait_s(self, now: float) -> float:
        """Seconds after which `admit` wants to be asked again although nothing happened; infinity: never."""
        ...


class Continuous:
    """Everybody runs."""

    admits_all = True

    def admit(self, ready: Sequence[str], live: Collection[str], now: float) -> Collection[str]:
        return ready

    def wait_s(self, now: float) -> float:
        return math.inf


@dataclass(slots=True)
class WholeBatches:
    """One batch after the other. `window_s` 0: a batch is whoever waits when the one before has ended."""

    batch_size: int  # most sequences of a batch
    window_s: float = 0.0
    admits_all: bool = field(init=False, default=False)
    _batch: set[str] = field(default_factory=set)
    _seen: dict[str, float] = field(default_factory=dict)  # those that wait, since when

    def admit(self, ready: Sequence[str], live: Collection[str], now: float) -> Collection[str]:
        self._batch.intersection_update(live)
        waiting = [seq_id for seq_id in ready if seq_id not in self._batch]
        self._seen = {seq_id: self._seen.get(seq_id, now) for seq_id in waiting}
        if waiting and not self._batch and (len(waiting) >= self.batch_size or self.wait_s(now) == 0):
            self._batch.update(waiting[: self.batch_size])
        return self._batch

    def wait_s(self, now: float) -> float:
        if self._batch or not self._seen:
            return math.inf
        return max(0.0, min(self._seen.values()) + self.window_s - now)


def make_policy(batching: Batching, batch_size: int, window_s: float) -> BatchingPolicy:
    """The policy of that name. Raises ValueError for an unknown one, and for sizes that make no batch."""
    if batching not in BATCHING:
        raise ValueError(f"batching is one of {', '.join(BATCHING)}, not {batching!r}")
    if batch_size < 1 or window_s < 0:
        raise ValueError("a batch needs at least one sequence, and its window cannot be negative")
    if batching == "continuous":
        return Continuous()
    return WholeBatches(batch_size, window_s if batching == "dynamic" else 0.0)
