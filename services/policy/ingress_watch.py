"""Which ingresses live and what they run, as policy sees it: by their beats, and by whether anybody listens for them.
Pure: times are passed in, monotonic seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shared.contracts.ids import IngressId, RequestId

QUIET_S = 1.5
"""An ingress beats once a second; one silent for longer is asked whether it is there."""
LEASE_S = 10.0
"""One silent for so long is lost, whatever the bus says: it is frozen, or cut off."""
GONE_S = 3.0
"""One that nobody listens for is lost after so long: until then the bus itself may have been restarted."""
FORGET_S = 3600.0


@dataclass(slots=True)
class _Seen:
    heard: float
    gone: float = -1.0  # when nobody first listened for it, since it was last heard; negative: not so
    beat: float = -1.0  # when its last beat came; negative: none did
    requests: frozenset[RequestId] = frozenset()  # that it named


class IngressWatch:
    """Every ingress that was heard of. Times in seconds, as above."""

    def __init__(self, quiet_s: float = QUIET_S, lease_s: float = LEASE_S, gone_s: float = GONE_S) -> None:
        self._quiet_s = quiet_s
        self._lease_s = lease_s
        self._gone_s = gone_s
        self._seen: dict[IngressId, _Seen] = {}

    def heard(self, ingress: IngressId, now: float) -> None:
        """An answer, or any other sign of life."""
        before = self._seen.get(ingress, _Seen(now))
        self._seen[ingress] = _Seen(now, beat=before.beat, requests=before.requests)

    def beat(self, ingress: IngressId, requests: Iterable[RequestId], now: float) -> None:
        """A beat, in which it names what it runs."""
        self._seen[ingress] = _Seen(now, beat=now, requests=frozenset(requests))

    def names(self, ingress: IngressId, request_id: RequestId, now: float) -> bool | None:
        """Whether it names this request; None when it is too silent to tell."""
        seen = self._seen.get(ingress)
        if seen is None or seen.beat < 0 or now - seen.beat > self._quiet_s:
            return None
        return request_id in seen.requests

    def heard_of(self, ingress: IngressId, now: float) -> None:
        """Something names it: from now on it has its lease."""
        self._seen.setdefault(ingress, _Seen(now))

    def nobody_listens(self, ingress: IngressId, now: float) -> None:
        """The bus knows nobody by that name."""
        seen = self._seen.setdefault(ingress, _Seen(now))
        if seen.gone < 0:
            seen.gone = now

    def quiet(self, now: float) -> list[IngressId]:
        """Those to be asked: silent, and not lost yet."""
        silent = (name for name, seen in self._seen.items() if now - seen.heard > self._quiet_s)
        return [name for name in silent if not self.lost(name, now)]

    def lost(self, ingress: IngressId, now: float) -> bool:
        """True if it is gone. One never heard of is not."""
        seen = self._seen.get(ingress)
        if seen is None:
            return False
        return now - seen.heard > self._lease_s or (seen.gone >= 0 and now - seen.gone >= self._gone_s)

    def may_live(self, now: float) -> list[IngressId]:
        """Those that may hold something in memory: heard of, and not known to have ended."""
        return [name for name, seen in self._seen.items() if not (seen.gone >= 0 and now - seen.gone >= self._gone_s)]

    def all_lost(self, now: float) -> set[IngressId]:
        """Those that are gone; one that was lost for an hour is forgotten."""
        self._seen = {name: seen for name, seen in self._seen.items() if now - seen.heard < FORGET_S}
        return {name for name in self._seen if self.lost(name, now)}
