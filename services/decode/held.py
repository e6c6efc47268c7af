"""What a decode worker knows of one request it holds: its choices, its hand-off, and its account. No I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from opentelemetry import trace
from opentelemetry.context import Context

from shared.contracts.attempt import Attempt
from shared.contracts.grants import Grant
from shared.contracts.ids import IngressId
from shared.contracts.logprobs import TokenLogprob, pack_logprobs
from shared.contracts.messages import Refusal, Reserve, Reserved
from shared.contracts.parts import Totals
from shared.contracts.tokens import completion_checksum, unpack_tokens
from shared.kv.block_table import BlockTable
from shared.kv.handoff import Sink
from shared.telemetry.token_timings import TokenTimings


@dataclass(slots=True)
class Choice:
    """One choice's sequence and the times of its tokens, in seconds on the worker's clock."""

    seq_id: str
    timings: TokenTimings
    ended: str = ""  # its finish reason
    revoked: bool = False  # its blocks were taken before it began; it waits here for others
    preemptions: int = 0
    drafted: int = 0  # tokens guessed, of an ended sequence
    accepted: int = 0  # those that were right
    started_at: float = 0.0  # when its first step was planned
    ahead: int = 0  # tokens of a stretch that were taken, and come once more in its update
    first_at: float = 0.0
    last_at: float = 0.0

    def saw(self, count: int, now: float) -> None:
        """`count` new tokens came at `now`."""
        if self.timings.count == 0:
            self.first_at = now
        self.last_at = now
        self.timings.add(now, count)


@dataclass(slots=True)
class PullStats:
    """What the hand-off came to."""

    num_bytes: int = 0
    blocks: int = 0
    seconds: float = 0.0  # in the transfer thread
    queued_s: float = 0.0  # before other pulls had let it to its turn, and on the way back
    path: str = ""  # shared_memory | cuda_ipc | tcp
    mismatches: int = 0
    span: trace.Span | None = None
    counted: bool = False  # in the metrics: a hand-off ends once


@dataclass(slots=True)
class Held:
    """One request, from its reservation to the acknowledgement of its finals."""

    attempt: Attempt
    reserve: Reserve
    grant: Grant
    token_ids: tuple[int, ...]
    choices: list[Choice]
    lease_token: bytes
    reserved_at: float
    context: Context
    span: trace.Span
    answer: asyncio.Future[Reserved | Refusal]
    kv_ready_at: float = 0.0
    tables: tuple[BlockTable, ...] = ()  # of choice 0
    num_cached_tokens: int = 0
    arrived: asyncio.Event = field(default_factory=asyncio.Event)  # choice 0 has the blocks others gave up for it
    sink: Sink | None = None
    pinned: bool = False  # the batcher keeps choice 0's blocks for the sink
    local_reason: str = ""  # why an awaited hand-off was given up
    pulls: PullStats = field(default_factory=PullStats)

    @property
    def ingress_id(self) -> IngressId:
        return self.reserve.ingress_id

    @property
    def committed(self) -> tuple[int, ...]:
        """Output tokens of earlier epochs, which came with the reservation."""
        return self.token_ids[self.reserve.num_prompt_tokens :]

    @property
    def num_generated(self) -> int:
        """Tokens made here, of all choices together."""
        return sum(choice.timings.count for choice in self.choices)

    @property
    def num_verified(self) -> int:
        """The same, and the guesses that were wrong of choices that have ended: they took as much of the steps."""
        return self.num_generated + sum(choice.drafted - choice.accepted for choice in self.choices)

    @property
    def ended(self) -> bool:
        return all(c.ended for c in self.choices)

    @property
    def running(self) -> list[Choice]:
        return [c for c in self.choices if not c.ended]

    @property
    def revoked(self) -> bool:
        """True while no choice has begun and one lacks its blocks: another worker may have them free."""
        return any(c.revoked for c in self.running) and not any(c.started_at for c in self.choices)

    @property
    def path(self) -> str:
        return "handed_off" if self.sink is not None and self.sink.state in ("waiting", "done") else "local"

    def packed(self, number: int, logprobs: Sequence[TokenLogprob]) -> bytes:
        """A choice's log-probabilities for the wire."""
        return pack_logprobs(logprobs, self.reserve.sampling[number].logprobs)

    def account(self, choice: Choice, totals: Totals) -> Totals:
        """The batcher's totals with the wall time and bytes it does not know.

        What the prompt had in the cache is the first choice's to tell: the others find it where that one put it.
        """
        first = choice is self.choices[0]
        choice.drafted, choice.accepted = totals.drafted_tokens, totals.accepted_tokens
        return msgspec.structs.replace(
            totals,
            cached_tokens=totals.cached_tokens if first else min(totals.cached_tokens, self.num_cached_tokens),
            first_token_s=max(0.0, choice.first_at - self.reserved_at) if choice.timings.count else 0.0,
            bytes_pulled=self.pulls.num_bytes if first else 0,
        )


def goes_on(held: Held, message: Reserve, generated: list[int]) -> bool:
    """True if a newer attempt at the held request can go on with what is here.

    The tokens the ingress committed meanwhile must be a beginning of those this worker has made; `generated` are
    choice 0's of this worker.
    """
    if message.sampling != held.reserve.sampling or message.num_prompt_tokens != held.reserve.num_prompt_tokens:
        return False
    tokens = tuple(unpack_tokens(message.token_ids))
    known = (*held.token_ids, *generated)
    if len(held.choices) > 1 and len(tokens) > message.num_prompt_tokens:
        return False
    return tokens == known[: len(tokens)]


def cut_totals(totals: Totals, completion: tuple[int, ...], num_tokens: int) -> Totals:
    """The account of an ended choice, cut at `num_tokens` of its `completion`; the rest is waste."""
    kept = completion[:num_tokens]
    return msgspec.structs.replace(
        totals,
        completion_tokens=len(kept),
        wasted_tokens=totals.wasted_tokens + len(completion) - len(kept),
        checksum=completion_checksum(kept),
    )
