"""The decode worker's side of a hand-off: which blocks to pull next, and when to stop waiting. Pure.

`handoff.py` tells the whole exchange.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.contracts.attempt import Attempt
from shared.contracts.ids import Incarnation, WorkerId
from shared.contracts.messages import HandoffAck, HandoffCommit, HandoffRelease
from shared.contracts.parts import UNKNOWN_END, BlockRef, KvEnd

ASK_AGAIN_S = 1.0
PULL_BLOCKS = 64
"""Most blocks in one pull: bounds how long a lost hand-off keeps its blocks busy."""


@dataclass(frozen=True, slots=True)
class PullItem:
    """One block to copy: from the source's span `block` into the sequence's block at `position` of the group."""

    group: int
    position: int
    block: BlockRef
    valid_tokens: int  # fewer than the block size only in the tail; the rest is zeroed


@dataclass(frozen=True, slots=True)
class Pull:
    """Copy the items, digest the destinations, then answer `Sink.pulled(ticket, ...)`. One at a time per sink."""

    ticket: int
    attempt: Attempt  # as mixed into the digests
    source: WorkerId
    source_incarnation: Incarnation
    pool: str
    items: tuple[PullItem, ...]
    kv: KvEnd = UNKNOWN_END  # where the source's pool lies
    lease_token: bytes = b""  # of the attempt, by which its blocks are read over TCP
    fingerprint: str = ""  # of both pools


@dataclass(frozen=True, slots=True)
class SendAck:
    source: WorkerId
    message: HandoffAck


@dataclass(frozen=True, slots=True)
class SendRelease:
    source: WorkerId
    message: HandoffRelease


@dataclass(frozen=True, slots=True)
class Received:
    """KV of [0, num_tokens) lies checked in own blocks; `done` when that is all but the last prompt token."""

    attempt: Attempt
    num_tokens: int
    done: bool


@dataclass(frozen=True, slots=True)
class TurnLocal:
    """Prefill here from `num_tokens` on. `bad` names (group, position) of own blocks that failed their digest."""

    attempt: Attempt
    num_tokens: int
    reason: str
    bad: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Closed:
    """No pull touches the blocks any more: they may be freed."""

    attempt: Attempt


SinkEffect = Pull | SendAck | SendRelease | Received | TurnLocal | Closed


@dataclass(slots=True)
class _Offer:
    """The newest commit taken, cut down to what is wanted."""

    commit: HandoffCommit
    wanted: list[PullItem] = field(default_factory=list)


class Sink:
    """One attempt's reservation at the decode worker, being filled."""

    def __init__(
        self,
        worker: WorkerId,
        attempt: Attempt,
        source: WorkerId,
        lease_token: bytes,
        fingerprint: str,
        block_sizes: tuple[int, ...],
        first_token: int,
        num_tokens: int,
    ) -> None:
        """KV of [0, first_token) is there; [first_token, num_tokens) is awaited from `source` (num_tokens = n - 1)."""
        self.attempt = attempt
        self.source = source
        self.num_tokens = num_tokens
        self.state = "waiting"  # waiting | done | local | closed
        self._worker = worker
        self._token = lease_token
        self._fingerprint = fingerprint
        self._sizes = block_sizes
        self._front = [first_token // size for size in block_sizes]  # per group: every block below is here
        self._beyond: list[set[int]] = [set() for _ in block_sizes]  # blocks that came before the front did
        self._offer: _Offer | None = None
        self._pulling: Pull | None = None
        self._tickets = 0
        self._ending = ""  # reason to go local, or "closed", once the pull in flight is answered
        self._bad: list[tuple[int, int]] = []
        self._asked_at = float("-inf")
        self._superseded: list[SendRelease] = []  # of older attempts' sources that a pull still reads

    @property
    def waiting(self) -> bool:
        """True while KV of the source is still of use."""
        return self.state == "waiting" and not self._ending

    @property
    def contiguous(self) -> int:
        """Tokens from position 0 on whose KV lies checked in own blocks, in every group."""
        return min(self.num_tokens, *(front * size for front, size in zip(self._front, self._sizes, strict=True)))

    @property
    def known(self) -> int:
        """Tokens the newest commit taken calls final."""
        return self._offer.commit.num_tokens if self._offer is not None else 0

    def restamp(self, attempt: Attempt, source: WorkerId, lease_token: bytes) -> list[SinkEffect]:
        """A newer attempt goes on with what has come; a pull in flight still counts, since its digests are checked.

        The source of the attempt before is released: at once, or when the pull in flight is answered.
        """
        self._superseded.append(self.release("superseded"))
        self.attempt, self.source, self._token = attempt, source, lease_token
        self._offer = None
        self._asked_at = float("-inf")
        return self._release_superseded()

    def commit(self, message: HandoffCommit) -> list[SinkEffect]:
        """Take a commit, in any order; what is older than the newest, fenced or not for this lease is dropped."""
        if message.attempt != self.attempt or message.lease_token != self._token or message.source != self.source:
            return []
        if self.state == "done":
            return [self._ack(done=True)]  # the final ack was lost
        if self.state != "waiting" or self._ending:
            return [self.release(self.state)]
        if self._offer is not None and message.number <= self._offer.commit.number:
            return [self._ack()] if self._settled else []
        fault = self._fault(message)
        if fault:
            return self.go_local(fault)
        self._offer = _Offer(message, list(self._missing(message)))
        return self._next()

    def pulled(self, ticket: int, bad: Iterable[tuple[int, int]], error: str = "") -> list[SinkEffect]:
        """The pull's answer: which (group, position) failed their digest; `error` when it could not be done at all."""
        pull = self._pulling
        if pull is None or pull.ticket != ticket:
            return []
        self._pulling = None
        return [*self._release_superseded(), *self._answered(pull, set(bad), error)]

    def go_local(self, reason: str) -> list[SinkEffect]:
        """Give the hand-off up: at once, or when the pull in flight is answered."""
        if self.state != "waiting":
            return []
        self._ending = reason
        if self._pulling is not None:
            return []
        self.state = "local"
        return [self.release(reason), TurnLocal(self.attempt, self.contiguous, reason, tuple(self._bad))]

    def close(self) -> list[SinkEffect]:
        """The attempt is over: `Closed` comes at once, or when the pull in flight is answered."""
        if self.state == "closed":
            return []
        self._ending = "closed"
        return [] if self._pulling is not None else self._close()

    def beat(self, computed_tokens: int, now: float) -> list[SinkEffect]:
        """The source's beat says how far it is: when that is more than its commits said, ask for the newest again."""
        behind = min(computed_tokens, self.num_tokens) - self.known
        enough = behind >= max(self._sizes) or (behind > 0 and computed_tokens >= self.num_tokens)
        if self.state != "waiting" or self._ending or not enough or now - self._asked_at < ASK_AGAIN_S:
            return []
        self._asked_at = now
        return [self._ack(resend=True)]

    def release(self, reason: str) -> SendRelease:
        """The source may drop its blocks."""
        return SendRelease(self.source, HandoffRelease(attempt=self.attempt, worker=self._worker, reason=reason))

    # -------------------------------------------------------------------------------------------- inside

    def _answered(self, pull: Pull, failed: set[tuple[int, int]], error: str) -> list[SinkEffect]:
        if not error:
            for item in pull.items:
                if (item.group, item.position) not in failed:
                    self._store(item.group, item.position)
        if self._ending == "closed":
            return self._close()
        self._bad += sorted(failed)
        if self._ending:
            return self.go_local(self._ending)
        if pull.attempt != self.attempt:
            # The attempt before this one asked for it. What came is kept; what did not is wanted from the new source.
            if self._offer is not None:
                self._offer.wanted = list(self._missing(self._offer.commit))
        elif error or failed:
            return self.go_local(error or "digest_mismatch")
        return self._next()

    def _release_superseded(self) -> list[SinkEffect]:
        if self._pulling is not None:
            return []
        effects: list[SinkEffect] = [*self._superseded]
        self._superseded = []
        return effects

    @property
    def _settled(self) -> bool:
        return self._pulling is None and not (self._offer and self._offer.wanted)

    def _store(self, group: int, position: int) -> None:
        beyond = self._beyond[group]
        beyond.add(position)
        while self._front[group] in beyond:
            beyond.remove(self._front[group])
            self._front[group] += 1

    def _has(self, group: int, position: int) -> bool:
        return position < self._front[group] or position in self._beyond[group]

    def _fault(self, message: HandoffCommit) -> str:
        """Why the commit ends the hand-off; empty when it is good."""
        if message.error is not None:
            return f"prefill_failed:{message.error.code}"
        if message.fingerprint != self._fingerprint:
            return "fingerprint_mismatch"
        if message.num_tokens > self.num_tokens or (message.last and message.num_tokens != self.num_tokens):
            return "wrong_length"
        if sorted(g.group for g in message.groups) != list(range(len(self._sizes))):
            return "wrong_groups"
        for group in message.groups:
            size = self._sizes[group.group]
            end = -(-message.num_tokens // size) if message.last else message.num_tokens // size
            if not 0 <= group.first_position <= self._front[group.group]:
                return "gap"
            if group.first_position + len(group.blocks) < end:
                return "gap"
        return ""

    def _missing(self, message: HandoffCommit) -> Iterable[PullItem]:
        """Blocks of the commit that are final, and neither here nor on their way."""
        coming = {(i.group, i.position) for i in self._pulling.items} if self._pulling is not None else set()
        for group in message.groups:
            size = self._sizes[group.group]
            for position, block in enumerate(group.blocks, start=group.first_position):
                valid = min(size, message.num_tokens - position * size)
                final = valid == size or (message.last and valid > 0)
                if final and not self._has(group.group, position) and (group.group, position) not in coming:
                    yield PullItem(group.group, position, block, valid)

    def _next(self) -> list[SinkEffect]:
        """Pull more, or report that everything the newest commit named is here."""
        offer = self._offer
        if self._pulling is not None or offer is None:
            return []
        if offer.wanted:
            items, offer.wanted = tuple(offer.wanted[:PULL_BLOCKS]), offer.wanted[PULL_BLOCKS:]
            self._tickets += 1
            c = offer.commit
            self._pulling = Pull(
                self._tickets,
                c.attempt,
                c.source,
                c.source_incarnation,
                c.pool,
                items,
                c.kv,
                c.lease_token,
                c.fingerprint,
            )
            return [self._pulling]
        done = offer.commit.last
        if done:
            self.state = "done"
        return [self._ack(done=done), Received(self.attempt, self.contiguous, done)]

    def _ack(self, *, done: bool = False, resend: bool = False) -> SendAck:
        number = self._offer.commit.number if self._offer is not None else 0
        message = HandoffAck(
            attempt=self.attempt,
            worker=self._worker,
            number=number,
            num_tokens=self.contiguous,
            done=done,
            resend=resend,
        )
        return SendAck(self.source, message)

    def _close(self) -> list[SinkEffect]:
        waiting, self.state = self.state == "waiting", "closed"
        effects: list[SinkEffect] = [self.release("closed")] if waiting else []
        return [*effects, Closed(self.attempt)]
