"""One sequence inside a worker: its tokens, how far its KV has come, and what it ends as.

There is no prefill or decode phase: a sequence only has `num_computed_tokens` catching up with its tokens.

    positions                          KV is                            written by
    [0, num_cached)                    in shared blocks                 nobody
    [num_cached, num_confirmed)        stored, final                    pulls of the hand-off, then ended steps
    [num_confirmed, num_computed)      being stored                     steps in flight
    [num_computed, len + in flight)    not yet planned
    [.., covered by its tables)        room to grow into, blocks held
    [.., spec.num_slots)               may be needed yet; blocks come one by one

A preempted sequence holds no blocks: its tokens stay, and `num_computed_tokens` begins again with what of them is still
found in the cache.
"""

from __future__ import annotations

import enum
import sys
from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from shared.contracts.parts import Totals
from shared.contracts.tokens import completion_checksum
from shared.engine.sequence_spec import SequenceSpec
from shared.engine.sequence_update import COMPUTED, LENGTH, STOP, CompletedBlock
from shared.engine.step_plan import IN_FLIGHT, ScheduledSequence
from shared.engine.token_prefix import TokenPrefix
from shared.kv.block_table import BlockTable


class SequenceStatus(enum.Enum):
    WAITING = "waiting"  # no step planned yet
    RUNNING = "running"
    PREEMPTED = "preempted"  # its blocks were taken; it goes on when there is room
    FINISHED = "finished"  # its blocks may still be held: steps in flight, pins


@dataclass(slots=True)
class Sequence:
    """Mutable state; owned by the batcher, so by the planner thread."""

    spec: SequenceSpec
    order: int  # of arrival
    tables: tuple[BlockTable, ...]  # one per layer group; empty ones while it is preempted
    num_cached_tokens: int  # found in the cache when it began
    tokens: list[int] = field(init=False)
    num_shared_tokens: int = field(init=False)  # KV of [0, here) stands in blocks shared with others
    num_computed_tokens: int = field(init=False)  # advances when a step is planned
    num_confirmed_tokens: int = field(init=False)  # advances when it has ended
    num_received_tokens: int = 0  # KV of [0, here) is cached or was pulled
    num_scheduled_tokens: int = 0  # every position ever given to a step
    num_redone_tokens: int = 0  # those given to a step before, and lost by a preemption
    num_preemptions: int = 0
    started_at: float = 0.0  # when its first step was planned
    passed_over: int = 0  # newcomers that took free room while it waited for some
    overtaken: int = 0  # prompt tokens of its tenant's later arrivals that were computed before its own
    num_placeholders: int = 0  # tokens that steps in flight will sample, at least
    num_drafted: int = 0  # tokens of its step in flight that are a guess; nothing is planned behind them
    num_verified: int = 0  # guessed tokens of steps that have ended
    num_accepted: int = 0  # those of them that were right and became text
    num_predicted: int = 0  # guessed tokens that came from the request's prediction
    predicted_right: list[int] = field(default_factory=list)  # where those of them that were right stand in the text
    steps_in_flight: int = 0
    pins: int = 0  # readers and writers outside the steps
    cleaning: int = 0  # own blocks the cleaner has not zeroed yet
    kept_for_peer: bool = field(init=False)  # a peer will pull its blocks
    awaiting_kv: bool = field(init=False)
    leaving: bool = False  # to be preempted once its steps in flight have ended
    preempted: bool = False  # holds no blocks
    arriving: bool = False  # holds none yet: they are on their way, taken from lower classes
    placed: bool = True  # counts among those that run at once; False: it waits for room, its place is another's
    finish: str = ""
    prefill_s: float = 0.0  # its share, by tokens, of the steps that computed tokens it came with
    decode_s: float = 0.0  # the same for tokens sampled here
    former: tuple[BlockTable, ...] = ()  # of a preempted sequence: what of these is still cached is shared again
    waits_for: str = ""  # holds no blocks yet: this sequence computes its prompt
    lent: tuple[BlockTable, ...] = ()  # full blocks of that sequence, to be shared
    urgency: tuple[int, int] = field(init=False)  # for sorting: higher classes first, and in each the oldest
    _ending: frozenset[int] = field(init=False)
    _looks_back: bool = field(init=False)
    _plain: bool = field(init=False)  # its draws ask for nothing but the logits
    _num_scored: int = field(init=False)
    _most: int = field(init=False)  # tokens it can come to have
    _reported: list[int] = field(init=False)  # blocks per group named in updates so far
    _nothing: tuple[tuple[CompletedBlock, ...], ...] = field(init=False)
    _complete_at: int = 0  # confirmed tokens from which on there may be a block to name
    _known: tuple[BlockTable, ...] = ()  # tables that the two below were found from
    _covered: int = 0
    _block_ids: tuple[tuple[int, ...], ...] = ()
    _catch_up: int = field(init=False)  # tokens it has to compute before it samples
    _furthest: int = field(init=False)  # KV of [0, here) was had once
    _spared_until: int = 0  # not preempted before so many tokens are computed
    _scored: int = 0  # rows of the prompt given to a step that scores them

    def __post_init__(self) -> None:
        self.tokens = list(self.spec.token_ids)
        self.num_computed_tokens = self.num_confirmed_tokens = self.num_cached_tokens
        self.num_shared_tokens = self._furthest = self.num_cached_tokens
        self._catch_up = len(self.tokens)
        self.awaiting_kv = self.spec.await_kv
        self.kept_for_peer = self.spec.compute_only
        self._reported = [table.num_shared for table in self.tables]
        # what each step asks for anew, found once
        spec = self.spec
        self.urgency = (spec.rank, self.order)
        self._ending, self._looks_back, self._num_scored = spec.ending_ids, spec.sampling.looks_back, spec.num_scored
        asks = spec.sampling.adjusts or spec.sampling.logprobs >= 0 or spec.num_scored
        self._plain = not (asks or spec.compute_only)
        self._most = sys.maxsize if spec.compute_only else spec.num_prompt_tokens + spec.sampling.max_tokens
        self._nothing = ((),) * len(self.tables)

    @property
    def status(self) -> SequenceStatus:
        if self.finish:
            return SequenceStatus.FINISHED
        if self.preempted and not (self.waits_for or self.arriving):
            return SequenceStatus.PREEMPTED
        return SequenceStatus.RUNNING if self.num_scheduled_tokens else SequenceStatus.WAITING

    @property
    def num_output_tokens(self) -> int:
        """Committed output tokens over all attempts; 0 when it only computes."""
        return 0 if self.spec.compute_only else len(self.tokens) - self.spec.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Tokens the next step could compute."""
        if self.finish or self.awaiting_kv or self.leaving or self.preempted or self.num_drafted:
            return 0
        num_tokens = len(self.tokens) + self.num_placeholders
        return num_tokens - self.num_computed_tokens if num_tokens < self._most else 0

    @property
    def _is_wholly_planned(self) -> bool:
        """True when steps in flight sample all the tokens that are still to come."""
        return len(self.tokens) + self.num_placeholders >= self._most

    @property
    def may_be_freed(self) -> bool:
        """True when nothing reads or writes its blocks any more."""
        return bool(self.finish) and self.gives_back and not self.steps_in_flight

    @property
    def gives_back(self) -> bool:
        """True when at most steps in flight keep its blocks from being free."""
        ending = bool(self.finish) or self._is_wholly_planned
        return self.leaving or (ending and not (self.pins or self.cleaning or self.kept_for_peer))

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens known beforehand that this worker has still to compute, as far as can be said: those it came with,
        and after a preemption its output too."""
        if self.finish or self.awaiting_kv or self.waits_for:
            return 0
        return max(0, self._catch_up - self.num_computed_tokens)

    @property
    def started(self) -> bool:
        """True when KV was computed or pulled for it: taking its blocks costs work."""
        return self.num_scheduled_tokens > 0 or self.num_received_tokens > self.num_cached_tokens

    @property
    def max_match(self) -> int:
        """Most tokens a prefix match may cover when it comes back: rows that are still to be scored are computed."""
        return len(self.tokens) - 1 if self._scored >= self._num_scored else self._scored

    @property
    def has_place(self) -> bool:
        """True when it is one of those that run at once. One that leaves has given its place up."""
        return self.placed and not (self.finish or self.leaving)

    @property
    def spared(self) -> bool:
        """True between a preemption and the next block it makes: so each preemption is paid for with progress."""
        return self.num_computed_tokens < self._spared_until

    @property
    def may_grow(self) -> bool:
        """True when it holds blocks and may come to need more."""
        if self.finish or self.preempted or self.spec.compute_only:
            return False
        return any(len(table) * table.block_size < self.spec.num_slots for table in self.tables)

    def covers(self, num_tokens: int) -> bool:
        """True when its tables hold [0, num_tokens)."""
        return num_tokens <= self.num_covered_tokens

    @property
    def num_covered_tokens(self) -> int:
        """Tokens that its tables hold."""
        if self._known is not self.tables:
            self._look_at_tables()
        return self._covered

    def _look_at_tables(self) -> None:
        self._known = self.tables
        self._covered = min(len(table) * table.block_size for table in self.tables)
        self._block_ids = tuple(table.block_ids for table in self.tables)

    def missing_blocks(self, num_tokens: int) -> tuple[int, ...]:
        """Blocks per group that its tables lack to hold [0, num_tokens)."""
        return tuple(max(0, -(-num_tokens // table.block_size) - len(table)) for table in self.tables)

    def received(self) -> None:
        """The hand-off is over: go on behind the KV that came."""
        self.awaiting_kv = False
        if not self.preempted:
            self.num_computed_tokens = max(self.num_cached_tokens, self.num_received_tokens)
            self.num_confirmed_tokens = self._furthest = self.num_computed_tokens

    def vacate(self) -> None:
        """Let go of all blocks; its steps have ended, so no token is on its way. The tokens stay."""
        self.former = self.tables
        self.tables = tuple(BlockTable(table.block_size, (), (), num_shared=0) for table in self.former)
        self.num_computed_tokens = self.num_confirmed_tokens = self.num_shared_tokens = 0
        self._catch_up = len(self.tokens)
        self._reported, self._complete_at = [0] * len(self.tables), 0
        self.leaving, self.preempted, self.placed = False, True, False

    def wait_for(self, leader: str) -> None:
        """Begin without blocks, until `leader` has computed the prompt that both have."""
        self.preempted, self.waits_for, self.former = True, leader, self.tables

    def arrive_later(self) -> None:
        """Begin without blocks, with a place: they come when others' steps in flight have ended."""
        self.preempted, self.arriving, self.former = True, True, self.tables

    def return_to(self, tables: tuple[BlockTable, ...], num_shared_tokens: int) -> None:
        """Go on in new blocks, of which the first hold [0, num_shared_tokens) already."""
        if not self.started:
            self.num_cached_tokens = self._furthest = num_shared_tokens
        self.tables, self.former, self.lent = tables, (), ()
        self.num_computed_tokens = self.num_confirmed_tokens = self.num_shared_tokens = num_shared_tokens
        self._furthest = max(self._furthest, num_shared_tokens)
        self._reported, self._complete_at = [table.num_shared for table in tables], 0
        # The blocks it comes back to have room for this much more, so it needs nobody else's until then.
        self._spared_until = len(self.tokens) + min(table.block_size for table in tables)
        self.preempted, self.arriving, self.placed, self.passed_over = False, False, True, 0

    @property
    def most_steps(self) -> int:
        """Steps it could go through with nobody planning in between; 0: its next step is not a plain decode."""
        known = max(len(self.spec.token_ids), self._furthest)
        if not self._plain or self.num_pending_tokens != 1 or self.num_computed_tokens < known:
            return 0
        return self._most - len(self.tokens) - self.num_placeholders

    @property
    def most_drafts(self) -> int:
        """Tokens that may be guessed behind its last one; 0: its next step is no decode, or it does not speculate.

        What a grammar allows is not asked of guesses, and where some tokens may not be drawn yet, that goes for the
        rows of a step alike.
        """
        sampling = self.spec.sampling
        if self.spec.compute_only or sampling.grammar or self.num_output_tokens < sampling.min_tokens:
            return 0
        if self.num_pending_tokens != 1 or self.num_computed_tokens < max(len(self.spec.token_ids), self._furthest):
            return 0
        return self._most - len(self.tokens) - self.num_placeholders - 1

    def settle_draft(self, num_sampled: int) -> None:
        """Its step in flight drew so many tokens that count: KV of guessed tokens behind them was never stored."""
        accepted = num_sampled - 1
        rejected = self.num_drafted - accepted
        self.num_redone_tokens += rejected
        self.num_computed_tokens -= rejected
        self._furthest -= rejected
        self.num_placeholders += accepted
        self.num_drafted = 0

    def unplan(self, steps: int) -> None:
        """So many steps of its stretch in flight, the last ones, were not computed."""
        self.num_computed_tokens -= steps
        self.num_scheduled_tokens -= steps
        self.num_placeholders -= steps
        self._furthest -= steps

    def schedule(
        self, num_tokens: int, now: float = 0.0, repeats: int = 1, draft: tuple[int, ...] = ()
    ) -> ScheduledSequence:
        """Plan the next `num_tokens` and advance; samples if they reach the end of its tokens.

        Args:
            repeats: steps of a stretch, each computing the token that the one before drew.
            draft: guesses of the tokens behind its last one, at most `most_drafts`, to be computed with it.

        Raises:
            IndexError: its tables do not hold them.
        """
        spec, params, start = self.spec, self.spec.sampling, self.num_computed_tokens
        end = start + num_tokens + len(draft) + repeats - 1
        if not self.covers(end):
            raise IndexError(f"{spec.seq_id}: {end} tokens, and blocks for {self._covered}")
        if not self.num_scheduled_tokens:
            self.started_at = now
        known = tuple(self.tokens[start : start + num_tokens])
        samples = start + num_tokens == len(self.tokens) + self.num_placeholders and not spec.compute_only
        self.num_computed_tokens = end
        self.num_scheduled_tokens += end - start
        if start < self._furthest:
            self.num_redone_tokens += min(end, self._furthest) - start
        if end > self._furthest:
            self._furthest = end
        self.num_placeholders += samples * repeats
        self.steps_in_flight += 1
        self.num_drafted = len(draft)
        scored = self._take_scored(start, end) if start < self._num_scored else ()
        return ScheduledSequence(
            seq_id=spec.seq_id,
            start=start,
            token_ids=known + (IN_FLIGHT,) * (num_tokens - len(known)) + draft,
            block_tables=self._block_ids,
            num_logits=len(scored) + samples + len(draft),
            sampling=params if samples else None,
            stored_from=self.num_shared_tokens,
            num_prompt_tokens=spec.num_prompt_tokens,
            history=TokenPrefix(self.tokens, min(start, len(self.tokens))) if samples and self._looks_back else (),
            banned=self._banned(end) if samples and params.min_tokens else (),
            scored=scored,
            score_top=params.prompt_logprobs,
            drafted=len(draft),
        )

    def _take_scored(self, start: int, end: int) -> tuple[int, ...]:
        """Tokens behind those rows of [start, end) that are to be scored and were not yet."""
        first, last = max(start, self._scored), min(end, self._num_scored)
        if first >= last:
            return ()
        self._scored = last
        return tuple(self.tokens[first + 1 : last + 1])

    def _banned(self, position: int) -> tuple[int, ...]:
        """What may not be drawn at an absolute position: nothing ends a choice before its `min_tokens`."""
        if position - self.spec.num_prompt_tokens >= self.spec.sampling.min_tokens:
            return ()
        return tuple(sorted(self._ending))

    def spent(self, start: int, seconds: float) -> None:
        """A step that computed the tokens from position `start` on has ended; `seconds` is this sequence's share."""
        if start < len(self.spec.token_ids):
            self.prefill_s += seconds
        else:
            self.decode_s += seconds

    def append(self, sampled: Seq[int]) -> tuple[int, ...]:
        """Take tokens of a step that has ended, up to the first that finishes; returns those taken.

        A sequence that only computes ends here too, when the step was its last.
        """
        taken = 0
        for token_id in sampled:
            self.num_placeholders -= 1
            self.tokens.append(token_id)
            taken += 1
            if token_id in self._ending:
                self.end(STOP)
                break
            if len(self.tokens) >= self._most:
                self.end(LENGTH)
                break
        if self.spec.compute_only:
            self.end_if_computed()
        return tuple(sampled[:taken])

    def end_if_computed(self) -> None:
        """A sequence that only computes ends when the KV of all its tokens is stored."""
        if self.spec.compute_only and self.num_confirmed_tokens == len(self.tokens):
            self.end(COMPUTED)

    def truncate(self, num_output_tokens: int) -> None:
        """Forget output tokens behind the first `num_output_tokens`. Raises ValueError when that is negative."""
        if num_output_tokens < 0:
            raise ValueError("a sequence cannot be cut inside its prompt")
        if not self.spec.compute_only:
            # a new list: steps in flight look at the old one, see `TokenPrefix`
            self.tokens = self.tokens[: self.spec.num_prompt_tokens + num_output_tokens]

    def end(self, finish: str) -> None:
        """Finish: rows of steps in flight no longer count."""
        self.finish = finish
        self.num_placeholders = 0
        self.leaving = False

    def take_completed(self) -> tuple[tuple[CompletedBlock, ...], ...]:
        """Own blocks that have become full and final since the last call, per layer group."""
        if self.num_confirmed_tokens < self._complete_at:
            return self._nothing
        found = tuple(self._take_completed(group, table) for group, table in enumerate(self.tables))
        nexts = ((count + 1) * table.block_size for count, table in zip(self._reported, self.tables, strict=True))
        self._complete_at = min(nexts)
        return found

    def _take_completed(self, group: int, table: BlockTable) -> tuple[CompletedBlock, ...]:
        size = table.block_size
        first, end = self._reported[group], self.num_confirmed_tokens // size
        self._reported[group] = max(first, end)
        return tuple(
            CompletedBlock(
                position=i,
                block_id=table.block_ids[i],
                generation=table.generations[i],
                token_ids=tuple(self.tokens[i * size : (i + 1) * size]),
            )
            for i in range(first, end)
        )

    def totals(self) -> Totals:
        """The account so far. Completion tokens count over all attempts, everything else in this one.

        Wasted are planned positions that the kept output did not need: rows in flight behind an end, tokens behind a
        stop match, guesses that were wrong, and what was computed again after a preemption.
        """
        outputs = self.num_output_tokens
        needed = len(self.tokens) - (1 if outputs else 0)
        completion = () if self.spec.compute_only else self.tokens[self.spec.num_prompt_tokens :]
        return Totals(
            prompt_tokens=self.spec.num_prompt_tokens,
            cached_tokens=self.num_cached_tokens,
            completion_tokens=outputs,
            computed_tokens=self.num_scheduled_tokens,
            received_tokens=max(0, self.num_received_tokens - self.num_cached_tokens),
            wasted_tokens=min(self.num_scheduled_tokens, self.num_redone_tokens + max(0, self._furthest - needed)),
            checksum=completion_checksum(completion),
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            preemptions=self.num_preemptions,
            drafted_tokens=self.num_verified,
            accepted_tokens=self.num_accepted,
            predicted_tokens=self.num_predicted,
            predicted_right_tokens=bisect_left(self.predicted_right, len(self.tokens)),
        )
