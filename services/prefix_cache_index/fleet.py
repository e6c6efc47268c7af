"""Which workers are alive, in which model pool, and what KV format that pool has. Pure: hears beats, is told the time.

A pool's format is that of the first worker heard; one with another format is ignored until every worker of the first
format is gone: mixing them would offer blocks nobody can use.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shared.contracts.ids import Incarnation, WorkerId
from shared.contracts.messages import WorkerBeat
from shared.security.scope import KvFormat

log = logging.getLogger("baton.index")


MAX_WARNED = 256


class Heard(enum.Enum):
    """What a beat means: a worker's first beat of this incarnation, one more, or one that does not count."""

    FIRST = "first"
    AGAIN = "again"
    IGNORED = "ignored"


@dataclass(slots=True)
class Member:
    """A worker that counts."""

    pool: str
    incarnation: Incarnation
    heard_s: float


class Fleet:
    """The live workers of all pools.

    Args:
        timeout_s: silence after which a worker is gone.
        pools: model → the pool that serves it; none: every model is served by the only pool there is.
    """

    def __init__(self, timeout_s: float = 10.0, pools: Mapping[str, str] | None = None) -> None:
        self._timeout_s = timeout_s
        self._pools = dict(pools or {})
        self._members: dict[WorkerId, Member] = {}
        self._formats: dict[str, KvFormat] = {}
        self._warned: dict[WorkerId, Incarnation] = {}

    def beat(self, beat: WorkerBeat, now: float) -> Heard:
        """Take one beat at `now` (monotonic seconds)."""
        known = self._members.get(beat.worker)
        if known is not None and beat.incarnation < known.incarnation:
            return Heard.IGNORED
        if known is not None and (beat.incarnation > known.incarnation or beat.pool != known.pool):
            self.remove(beat.worker)
            known = None
        found = _format(beat)
        expected = self._formats.setdefault(beat.pool, found)
        if found != expected:
            self._warn(beat, expected, found)
            self.remove(beat.worker)
            return Heard.IGNORED
        if known is not None:
            known.heard_s = now
            return Heard.AGAIN
        self._members[beat.worker] = Member(beat.pool, beat.incarnation, now)
        return Heard.FIRST

    def expire(self, now: float) -> list[WorkerId]:
        """Remove and name the workers not heard for `timeout_s`."""
        gone = [worker for worker, member in self._members.items() if now - member.heard_s > self._timeout_s]
        for worker in gone:
            self.remove(worker)
        return gone

    def remove(self, worker: WorkerId) -> None:
        """Forget a worker; the last one of a pool takes the pool's format along."""
        member = self._members.pop(worker, None)
        if member is not None and not any(other.pool == member.pool for other in self._members.values()):
            del self._formats[member.pool]

    def member(self, worker: WorkerId) -> Member | None:
        """The worker, if it counts."""
        return self._members.get(worker)

    def workers(self, pool: str) -> Iterable[WorkerId]:
        """The workers of a pool."""
        return [worker for worker, member in self._members.items() if member.pool == pool]

    def format_of(self, pool: str) -> KvFormat:
        """The KV format of a pool that has a worker."""
        return self._formats[pool]

    def pool_for(self, model: str) -> str | None:
        """The pool that serves a model. None: it has no live worker, or nobody serves the model."""
        if not self._pools:
            return next(iter(self._formats)) if len(self._formats) == 1 else None
        pool = self._pools.get(model)
        return pool if pool in self._formats else None

    def _warn(self, beat: WorkerBeat, expected: KvFormat, found: KvFormat) -> None:
        if self._warned.get(beat.worker) == beat.incarnation:
            return
        self._warned[beat.worker] = beat.incarnation
        if len(self._warned) > MAX_WARNED:  # a worker's id is new at every start
            del self._warned[next(iter(self._warned))]
        log.warning("worker %s ignored: pool %s has KV format %s, it has %s", beat.worker, beat.pool, expected, found)


def _format(beat: WorkerBeat) -> KvFormat:
    return KvFormat(
        fingerprint=beat.fingerprint,
        model_digest=beat.model_digest,
        numerics=beat.numerics,
        block_sizes=beat.block_sizes,
    )
