"""What refused requests were told: come back then. Their places are kept, so that coming back then is worth it. Pure.

Who is turned away is told a time by which those of its tenant and class that were told before it have been served too;
newcomers are judged behind all of them. A request that comes back is known by its content, of which a keyed digest is
kept, and judged without the promises given after its own; so who asks again and again has one place and not many. A
promise nobody comes back to lapses `GRACE_S` after its time.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass

from shared.contracts.ids import TenantId

GRACE_S = 10.0
EARLY_S = 1.0
"""A request that comes back so long before its time has come in time."""
MAX_PROMISES = 4096
DIGEST_BYTES = 16

Line = tuple[TenantId, str]
"""Tenant and class: promises of one say nothing about another's."""


def digest_of(key: bytes, tenant: TenantId, token_ids: bytes) -> bytes:
    """Names a request's content; tells nothing of it without `key`, which is one process's own."""
    return hashlib.blake2b(tenant.encode() + b"\0" + token_ids, key=key, digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Promise:
    """`own_s`: seconds by which the request lengthens the wait of those of its line that were told later."""

    line: Line
    digest: bytes
    at_s: float
    own_s: float


class Promises:
    """Open promises of one pool, by number. At most `limit`: beyond that the line that has most loses its oldest."""

    def __init__(self, limit: int = MAX_PROMISES) -> None:
        self._limit = limit
        self._number = 0
        self._open: dict[int, Promise] = {}

    def __len__(self) -> int:
        return len(self._open)

    def due(self, now: float, digest: bytes) -> int | None:
        """The promise that a request comes back to; None when it was told nothing, or comes before its time."""
        self._lapse(now)
        kept = (n for n, promise in self._open.items() if promise.digest == digest and promise.at_s - EARLY_S <= now)
        return min(kept, default=None)

    def known(self, line: Line, digest: bytes) -> int | None:
        """The promise that the same request was given, whether its time has come or not."""
        given = (n for n, promise in self._open.items() if promise.line == line and promise.digest == digest)
        return min(given, default=None)

    def ahead_s(self, line: Line, place: int | None) -> float:
        """How much longer a request waits for those of its line that were told before it."""
        return sum(p.own_s for n, p in self._open.items() if p.line == line and (place is None or n < place))

    def give(
        self, now: float, line: Line, digest: bytes, wait_s: float, own_s: float, place: int | None = None
    ) -> None:
        """The request was told to come back in `wait_s`. `place`: the promise it had, which it keeps."""
        self._number += place is None
        number = self._number if place is None else place
        self._open[number] = Promise(line, digest, now + wait_s, own_s)
        if len(self._open) > self._limit:
            del self._open[self._oldest_of_longest()]

    def keep(self, place: int | None) -> None:
        """The request has been taken."""
        if place is not None:
            del self._open[place]

    def _oldest_of_longest(self) -> int:
        longest, _ = Counter(promise.line for promise in self._open.values()).most_common(1)[0]
        return min(number for number, promise in self._open.items() if promise.line == longest)

    def _lapse(self, now: float) -> None:
        for number in [n for n, promise in self._open.items() if promise.at_s + GRACE_S <= now]:
            del self._open[number]
