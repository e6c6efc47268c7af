"""What refused requests were told: come back then. Their places are kept, so that coming back then is worth it. Pure.

Who is turned away is told a time by which those of its tenant and class that were told before it have been served too;
newcomers are judged behind all of them. A request that comes back is known by its content, of which a keyed digest is
kept, and judged without the promises given after its own. A promise nobody comes back to lapses `GRACE_S` after its
time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from shared.contracts.ids import TenantId

GRACE_S = 10.0
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
    number: int
    at_s: float
    own_s: float


class Promises:
    """Open promises of one pool. At most `limit`: beyond that the oldest is forgotten."""

    def __init__(self, limit: int = MAX_PROMISES) -> None:
        self._limit = limit
        self._number = 0
        self._open: dict[bytes, Promise] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, digest: object) -> bool:
        return digest in self._open

    def ahead_s(self, now: float, line: Line, digest: bytes) -> float:
        """How much longer the request waits for those of its line that were told before it."""
        for lapsed in [d for d, promise in self._open.items() if promise.at_s + GRACE_S <= now]:
            del self._open[lapsed]
        own = self._open.get(digest)
        return sum(p.own_s for p in self._of(line) if own is None or p.number < own.number)

    def _of(self, line: Line) -> Iterator[Promise]:
        return (promise for promise in self._open.values() if promise.line == line)

    def give(self, now: float, line: Line, digest: bytes, wait_s: float, own_s: float) -> None:
        """The request was told to come back in `wait_s`. One that came too early keeps its place."""
        old = self._open.pop(digest, None)
        self._number += old is None
        number = self._number if old is None else old.number
        self._open[digest] = Promise(line, number, now + wait_s, own_s)
        while len(self._open) > self._limit:
            del self._open[next(iter(self._open))]

    def keep(self, digest: bytes) -> None:
        """The request has been taken."""
        self._open.pop(digest, None)
