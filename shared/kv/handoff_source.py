"""The prefill worker's side of a hand-off: which blocks are named when, resent how long, and freed why. Pure.

`handoff.py` tells the whole exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.contracts.attempt import Attempt
from shared.contracts.errors import ErrorInfo
from shared.contracts.ids import Incarnation, WorkerId
from shared.contracts.messages import HandoffAck, HandoffCommit
from shared.contracts.parts import UNKNOWN_END, BlockRef, GroupBlocks, KvEnd
from shared.kv.lease import ProgressLease

RESEND_FIRST_S = 0.5
RESEND_MAX_S = 4.0


@dataclass(frozen=True, slots=True)
class SourceIdentity:
    """What every commit of one prefill worker says about itself."""

    worker: WorkerId
    incarnation: Incarnation
    fingerprint: str
    pool: str  # file name of the pool
    block_sizes: tuple[int, ...]  # per layer group
    kv: KvEnd = UNKNOWN_END  # where the pool lies


@dataclass(frozen=True, slots=True)
class SendCommit:
    """Publish `message` to the decode worker."""

    decode_worker: WorkerId
    message: HandoffCommit


@dataclass(frozen=True, slots=True)
class Free:
    """Give the blocks back, once no step in flight touches them. The source is over."""

    attempt: Attempt
    reason: str  # done | released:<reason> | lease | decode_restarted | decode_died | cancelled


SourceEffect = SendCommit | Free


class Source:
    """One attempt's blocks at the prefill worker, until the decode worker has them or is gone."""

    def __init__(
        self,
        identity: SourceIdentity,
        attempt: Attempt,
        decode_worker: WorkerId,
        decode_incarnation: Incarnation,
        lease_token: bytes,
        first_token: int,
        num_tokens: int,
        lease_s: float,
        now: float,
    ) -> None:
        """KV of [first_token, num_tokens) is to be handed over; a block that straddles `first_token` is named too."""
        self.attempt = attempt
        self.decode_worker = decode_worker
        self.num_tokens = num_tokens
        self.computed = 0
        self.freed = False
        self.lease_token = lease_token
        self._identity = identity
        self._first = tuple(first_token // size for size in identity.block_sizes)
        self._named: list[list[BlockRef]] = [[] for _ in identity.block_sizes]
        self._lease = ProgressLease.start(lease_s, now, int(decode_incarnation))
        self._newest: HandoffCommit | None = None
        self._acked = 0
        self._resend_at = 0.0
        self._backoff_s = RESEND_FIRST_S

    @property
    def complete(self) -> bool:
        """True once everything is named."""
        return self._newest is not None and self._newest.last

    def due(self, computed: int) -> tuple[range, ...]:
        """Per group, the positions of blocks that are final at `computed` tokens and not named yet."""
        whole = computed >= self.num_tokens
        sizes = self._identity.block_sizes
        ends = (-(-self.num_tokens // size) if whole else computed // size for size in sizes)
        starts = (first + len(named) for first, named in zip(self._first, self._named, strict=True))
        return tuple(range(start, max(start, end)) for start, end in zip(starts, ends, strict=True))

    def name(self, computed: int, blocks: Sequence[Sequence[BlockRef]], cached_tokens: int, now: float) -> SendCommit:
        """Name the blocks of `due(computed)`, with generations and digests, in a new commit."""
        for named, new in zip(self._named, blocks, strict=True):
            named.extend(new)
        self.computed = min(computed, self.num_tokens)
        groups = tuple(
            GroupBlocks(g, first, tuple(named))
            for g, (first, named) in enumerate(zip(self._first, self._named, strict=True))
        )
        return self._commit(groups, now, last=self.computed == self.num_tokens, cached_tokens=cached_tokens)

    def fail(self, error: ErrorInfo, now: float) -> SendCommit:
        """Prefill can't go on: tell the decode worker to do it alone."""
        return self._commit((), now, last=True, error=error)

    def ack(self, message: HandoffAck, now: float) -> list[SourceEffect]:
        """Take the decode worker's acknowledgement."""
        if self.freed or message.attempt != self.attempt:
            return []
        self._lease.renew(now)
        self._acked = max(self._acked, message.number)
        if message.done:
            return [self.free("done")]
        if message.resend and self._newest is not None:
            return [self._again(self._newest, now)]
        return []

    def beat(self, incarnation: int, progress: int | None, now: float) -> list[SourceEffect]:
        """A beat of the decode worker; `progress` is None when it does not list the attempt."""
        if self.freed or self._lease.beat(incarnation, progress, now):
            return []
        return [self.free("decode_restarted")]

    def tick(self, now: float) -> list[SourceEffect]:
        """Resend what is not acknowledged; end with the lease."""
        if self.freed:
            return []
        if self._lease.expired(now):
            return [self.free("lease")]
        newest = self._newest
        if newest is not None and newest.number > self._acked and now >= self._resend_at:
            self._backoff_s = min(RESEND_MAX_S, 2 * self._backoff_s)
            return [self._again(newest, now)]
        return []

    def free(self, reason: str) -> Free:
        """End the source; further news is ignored."""
        self.freed = True
        return Free(self.attempt, reason)

    def _commit(
        self,
        groups: tuple[GroupBlocks, ...],
        now: float,
        *,
        last: bool,
        cached_tokens: int = 0,
        error: ErrorInfo | None = None,
    ) -> SendCommit:
        me = self._identity
        self._newest = HandoffCommit(
            attempt=self.attempt,
            source=me.worker,
            source_incarnation=me.incarnation,
            number=(self._newest.number if self._newest is not None else 0) + 1,
            lease_token=self.lease_token,
            fingerprint=me.fingerprint,
            pool=me.pool,
            num_tokens=self.computed,
            groups=groups,
            last=last,
            cached_tokens=cached_tokens,
            error=error,
            kv=me.kv,
        )
        self._backoff_s = RESEND_FIRST_S
        return self._again(self._newest, now)

    def _again(self, commit: HandoffCommit, now: float) -> SendCommit:
        self._resend_at = now + self._backoff_s
        return SendCommit(self.decode_worker, commit)
