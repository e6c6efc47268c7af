"""Which ingresses are alive, by their beats and submits. Clock passed in (seconds, monotonic)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.contracts.ids import IngressId, RequestId
from shared.contracts.messages import GatewayBeat

UNLISTED_BEATS = 2
"""A beat may have left before the submit it does not list; two in a row mean the ingress has dropped the request."""


@dataclass(slots=True)
class _Ingress:
    expires_s: float
    number: int = -1
    misses: dict[RequestId, int] = field(default_factory=dict)


@dataclass(slots=True)
class IngressRegistry:
    """One that was heard of and then not for `lease_s` is gone, and with it every client it had."""

    lease_s: float = 10.0
    _entries: dict[IngressId, _Ingress] = field(default_factory=dict)

    def heard(self, ingress: IngressId, now: float) -> None:
        entry = self._entries.get(ingress)
        if entry is None:
            self._entries[ingress] = _Ingress(now + self.lease_s)
        else:
            entry.expires_s = now + self.lease_s

    def known(self) -> list[IngressId]:
        return sorted(self._entries)

    def expire(self, now: float) -> list[IngressId]:
        """Those whose lease ended; forgotten until heard of again."""
        late = [ingress for ingress, entry in self._entries.items() if entry.expires_s <= now]
        for ingress in late:
            del self._entries[ingress]
        return late

    def unlisted(self, beat: GatewayBeat, request_ids: Iterable[RequestId]) -> set[RequestId]:
        """Which of `request_ids` it has not listed in UNLISTED_BEATS beats in a row. Stale beats say nothing."""
        entry = self._entries.get(beat.ingress_id)
        if entry is None or beat.number <= entry.number:
            return set()
        entry.number = beat.number
        listed = set(beat.requests)
        entry.misses = {r: entry.misses.get(r, 0) + 1 for r in request_ids if r not in listed}
        return {r for r, misses in entry.misses.items() if misses >= UNLISTED_BEATS}
