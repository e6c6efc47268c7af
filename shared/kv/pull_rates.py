"""How fast KV came from each peer of late, for estimates of what a hand-off costs. Pure.

A rate is bytes over seconds, both summed with older pulls fading: small pulls, in which the round trip shows, weigh
little. `now` is seconds on a monotonic clock.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from shared.contracts.ids import WorkerId
from shared.contracts.parts import KvLink

FADE = 0.8
"""Of what came before, at each pull."""
AVOID_S = 30.0
"""How long a peer that could not be reached is named as such."""
MAX_PEERS = 64


@dataclass(slots=True)
class _Rate:
    path: str
    num_bytes: float = 0.0
    seconds: float = 0.0
    failed_at: float | None = None


class PullRates:
    """The last `MAX_PEERS` peers pulled from."""

    def __init__(self) -> None:
        self._rates: OrderedDict[WorkerId, _Rate] = OrderedDict()

    def came(self, source: WorkerId, path: str, num_bytes: int, seconds: float) -> None:
        """A pull brought so many bytes, digests included in its time."""
        rate = self._of(source, path)
        rate.num_bytes = FADE * rate.num_bytes + num_bytes
        rate.seconds = FADE * rate.seconds + seconds
        rate.failed_at = None

    def failed(self, source: WorkerId, path: str, now: float) -> None:
        """Nothing could be read from it."""
        self._of(source, path).failed_at = now

    def links(self, now: float) -> tuple[KvLink, ...]:
        """As beats carry them, the least recent first."""
        return tuple(
            KvLink(
                source,
                rate.path,
                round(rate.num_bytes / rate.seconds) if rate.seconds > 0 else 0.0,
                rate.failed_at is not None and now - rate.failed_at < AVOID_S,
            )
            for source, rate in self._rates.items()
        )

    def _of(self, source: WorkerId, path: str) -> _Rate:
        rate = self._rates.get(source)
        if rate is None or rate.path != path:
            rate = self._rates[source] = _Rate(path)
        self._rates.move_to_end(source)
        if len(self._rates) > MAX_PEERS:
            self._rates.popitem(last=False)
        return rate
