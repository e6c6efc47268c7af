"""How fast KV came from each peer of late, for estimates of what a hand-off costs. Pure.

A rate is bytes over seconds, both summed with older pulls fading. Small pulls do not count: their time is that of the
round trip. Nor do old ones: a peer that was slow once would not be asked again. `now` is seconds on a monotonic clock.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from shared.contracts.ids import WorkerId
from shared.contracts.parts import KvLink

FADE = 0.8
"""Of what came before, at each pull."""
LEAST_BYTES = 1 << 20
FRESH_S = 60.0
"""How long a rate is told after its last pull."""
AVOID_S = 30.0
"""How long a peer that could not be reached is named as such."""
MAX_PEERS = 64


@dataclass(slots=True)
class _Rate:
    path: str
    num_bytes: float = 0.0
    seconds: float = 0.0
    came_at: float = -math.inf
    failed_at: float = -math.inf

    def link(self, source: WorkerId, now: float) -> KvLink:
        measured = self.seconds > 0 and now - self.came_at < FRESH_S
        bytes_s = float(round(self.num_bytes / self.seconds)) if measured else 0.0
        return KvLink(source, self.path, bytes_s, failed=now - self.failed_at < AVOID_S)


class PullRates:
    """The last `MAX_PEERS` peers pulled from."""

    def __init__(self) -> None:
        self._rates: OrderedDict[WorkerId, _Rate] = OrderedDict()

    def came(self, source: WorkerId, path: str, num_bytes: int, seconds: float, now: float) -> None:
        """A pull brought so many bytes, digests included in its time."""
        rate = self._of(source, path)
        rate.failed_at = -math.inf
        if num_bytes < LEAST_BYTES:
            return
        rate.num_bytes = FADE * rate.num_bytes + num_bytes
        rate.seconds = FADE * rate.seconds + seconds
        rate.came_at = now

    def failed(self, source: WorkerId, path: str, now: float) -> None:
        """Nothing could be read from it."""
        self._of(source, path).failed_at = now

    def links(self, now: float) -> tuple[KvLink, ...]:
        """As beats carry them: what is known at `now`, the least recent first."""
        links = [rate.link(source, now) for source, rate in self._rates.items()]
        return tuple(link for link in links if link.failed or link.bytes_s)

    def _of(self, source: WorkerId, path: str) -> _Rate:
        rate = self._rates.get(source)
        if rate is None or rate.path != path:
            rate = self._rates[source] = _Rate(path)
        self._rates.move_to_end(source)
        if len(self._rates) > MAX_PEERS:
            self._rates.popitem(last=False)
        return rate
