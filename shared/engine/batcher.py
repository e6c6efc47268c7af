"""The batcher: the sequences an engine holds, its next step, and what a finished step means.

Pure: no clock, no tensor, no thread; the engine's planner thread owns it. A sequence is accepted with blocks for the
tokens it came with and one to grow into, and takes the others one by one; `block_room` says at whose cost,
`step_composer` which of them a step computes.

A step may be planned while the one before is in flight. What such a step needs of an earlier one stands in it as
IN_FLIGHT; when a sequence turns out to have ended, its rows in later steps are dropped, and its blocks are freed only
when the last step that names them has ended and the last pin is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from shared.contracts.ids import BlockTag, ScopeGeneration, TenantId
from shared.contracts.logprobs import TokenLogprob
from shared.contracts.parts import Totals
from shared.engine.batcher_config import BatcherConfig
from shared.engine.batcher_gauges import Gauges, read_gauges
from shared.engine.batcher_invariants import require_sound
from shared.engine.block_cleaning import BlockCleaning
from shared.engine.block_room import BlockRoom
from shared.engine.followers import Followers
from shared.engine.sequence import Sequence
from shared.engine.sequence_blocks import condemn, no_tables
from shared.engine.sequence_spec import SequenceSpec
from shared.engine.sequence_update import CANCELLED, ERROR, STOP, SequenceUpdate
from shared.engine.speculation import Speculation
from shared.engine.step_composer import StepComposer
from shared.engine.step_plan import ScheduledSequence, StepOutput, StepPlan, require_fit
from shared.engine.step_time import DEFAULT_MODEL
from shared.kv.block_pool import BlockPool, TagEvents
from shared.kv.block_table import BlockTable
from shared.kv.layout import PoolLayout

NOT_FINITE = "the logits were not finite"
STUCK = "its grammar allows no further token"


@dataclass(frozen=True, slots=True)
class Reservation:
    """What an accepted sequence holds."""

    num_cached_tokens: int
    tables: tuple[BlockTable, ...]  # one per layer group
    arriving: bool = False  # its blocks come when steps in flight have ended; ADMITTED tells


class Batcher:
    """Batching with chunked prefill under one token budget, by one of the policies in `batching_policy`."""

    def __init__(self, layout: PoolLayout, config: BatcherConfig) -> None:
        self.config = config
        self.pool = BlockPool(layout, config.eviction)
        self.step_model = DEFAULT_MODEL  # how long steps take, as far as is known; may be replaced any time
        self._sequences: dict[str, Sequence] = {}  # in order of arrival
        self._room = BlockRoom(
            self.pool, self._sequences, config.max_num_seqs, lambda seq, event: self._report(seq, event=event)
        )
        self._arrivals = 0
        self._speculation = Speculation(config.most_drafted)
        self._composer = StepComposer(config, self._room, self._sequences, self._speculation)
        self._followers = Followers(self.pool, self._room, self._sequences)
        self._in_flight: deque[StepPlan] = deque()
        self._last_step = 0
        self._updates: list[SequenceUpdate] = []
        self._cleaning = BlockCleaning(self.pool)

    # ------------------------------------------------------------------------------------- life of a sequence

    def require_possible(self, specs: Seq[SequenceSpec]) -> None:
        """Raises NeverFits when the empty pool could not hold each of `specs` to its end, or all of them to begin."""
        self._room.require_possible(specs)

    def require_room(self, specs: Seq[SequenceSpec]) -> None:
        """Raises NoBlocks or NoSlot when `specs`, choices of one prompt, cannot all be reserved now."""
        self._room.require_room(specs)

    def reserve(self, spec: SequenceSpec) -> Reservation:
        """Accept a sequence with a place and the blocks it needs to begin, or nothing.

        Room is left for each running sequence to grow by a block, and for those that were preempted. Sequences of lower
        classes give theirs up where that is what is missing.

        Raises:
            NeverFits, NoBlocks, NoSlot: not accepted.
            ValueError: `spec.seq_id` is held already.
        """
        if spec.seq_id in self._sequences:
            raise ValueError(f"sequence {spec.seq_id} is held already")
        self._room.require_possible((spec,))
        leader = self._followers.leader_of(spec)
        if leader is not None:
            self._room.admit_follower(spec)
        entry = self._room.admit(spec) if leader is None else None
        tables, num_cached = entry if entry is not None else (no_tables(self.pool), 0)
        self._arrivals += 1
        seq = Sequence(spec, self._arrivals, tables, num_cached)
        self._sequences[spec.seq_id] = seq
        if leader is not None:
            self._followers.add(seq, leader)
        elif entry is None:
            seq.arrive_later()
        if spec.compute_only:
            self._cleaning.add_tails(seq)
            seq.end_if_computed()
            if seq.finish:
                self._report(seq)
        return Reservation(num_cached, seq.tables, seq.arriving)

    def kv_received(self, seq_id: str, num_tokens: int) -> bool:
        """KV of [0, num_tokens) is stored in the sequence's blocks, cached or pulled. False when it no longer waits.

        Raises:
            ValueError: KV of the last token, which has to be computed here.
        """
        seq = self._sequences.get(seq_id)
        if seq is None or seq.finish or not seq.awaiting_kv or seq.preempted:
            return False
        if num_tokens > seq.spec.max_match:
            raise ValueError(f"KV of {num_tokens} tokens received, at most {seq.spec.max_match} are of use")
        seq.num_received_tokens = max(seq.num_received_tokens, num_tokens)
        return True

    def release(self, seq_id: str) -> bool:
        """Stop waiting for KV: run from what there is, computing the rest here. False when it does not wait.

        From here on steps write behind the received KV: pulls must have ended.
        """
        seq = self._sequences.get(seq_id)
        if seq is None or seq.finish or not seq.awaiting_kv:
            return False
        seq.received()
        self._followers.serve(seq)
        if seq.num_confirmed_tokens > seq.num_cached_tokens:
            self._report(seq)
        return True

    def finish(self, seq_id: str, num_output_tokens: int) -> Totals | None:
        """End a sequence at `num_output_tokens`, counted from the end of the prompt; what lies behind is waste.

        Returns its totals, or None when it is not held. Also cuts one that has ended by itself, while it is held.
        """
        seq = self._sequences.get(seq_id)
        if seq is None:
            return None
        seq.truncate(num_output_tokens)
        return self._end_from_outside(seq, STOP)

    def cancel(self, seq_id: str) -> Totals | None:
        """End a sequence where it stands; its totals, or None when it is not held.

        The pin of a sequence that only computes is dropped: a peer still pulling finds a digest that differs.
        """
        seq = self._sequences.get(seq_id)
        if seq is None:
            return None
        return self._end_from_outside(seq, CANCELLED)

    def preempt(self, seq_id: str) -> bool:
        """Take the blocks of a sequence that samples; it goes on by itself when there is room. False: not now."""
        seq = self._sequences.get(seq_id)
        return seq is not None and self._room.take_from(seq)

    def pin(self, seq_id: str) -> bool:
        """Keep the blocks although the sequence may end: something outside the steps writes or reads them."""
        seq = self._sequences.get(seq_id)
        if seq is None:
            return False
        seq.pins += 1
        return True

    def unpin(self, seq_id: str) -> bool:
        """Undo one `pin`, or the one that a sequence that only computes is born with. False when it holds none."""
        seq = self._sequences.get(seq_id)
        if seq is None or not (seq.pins or seq.kept_for_peer):
            return False
        if seq.pins:
            seq.pins -= 1
        else:
            seq.kept_for_peer = False
        self._let_go(seq)
        return True

    def reservation(self, seq_id: str) -> Reservation | None:
        """What a sequence holds by now: no blocks while it waits for them. None when it is not held."""
        seq = self._sequences.get(seq_id)
        return None if seq is None else Reservation(seq.num_cached_tokens, seq.tables, seq.arriving)

    def outputs(self, seq_id: str) -> tuple[int, ...]:
        """Output token ids so far, for a replay; () when it is not held."""
        seq = self._sequences.get(seq_id)
        return () if seq is None else tuple(seq.tokens[len(seq.tokens) - seq.num_output_tokens :])

    # ------------------------------------------------------------------------------------- steps

    def plan(self, now: float = 0.0, *, may_stretch: bool = False) -> StepPlan | None:
        """The next step, or None when depth + 1 steps or a stretch are in flight, when a stretch comes next and waits
        for the steps in flight, or nothing can run.

        Args:
            now: seconds on a monotonic clock, for dynamic batches and for what is told of a sequence's start.
            may_stretch: who runs it can go on by itself, and nobody waits to give the batcher an order.
        """
        if self.is_stretching or len(self._in_flight) > self.config.depth:
            return None
        repeats = self._composer.stretch(self.step_model) if may_stretch else 1
        if repeats > 1 and self._in_flight:
            return None
        scheduled = self._composer.compose(self.step_model, now, repeats, ahead=bool(self._in_flight))
        if not scheduled:
            return None
        self._last_step += 1
        ending = frozenset[int]()
        if repeats > 1:
            ending = ending.union(*(self._sequences[row.seq_id].spec.ending_ids for row in scheduled))
        plan = StepPlan(self._last_step, tuple(scheduled), repeats, ending)
        self._in_flight.append(plan)
        return plan

    @property
    def is_stretching(self) -> bool:
        """True while a stretch is in flight: orders wait until it has ended, as its tokens are known by then only."""
        return bool(self._in_flight) and self._in_flight[-1].repeats > 1

    def wait_s(self, now: float) -> float:
        """Seconds after which `plan` may find something although nothing happened meanwhile; infinity: never."""
        return self._composer.wait_s(now)

    def commit(self, output: StepOutput) -> list[SequenceUpdate]:
        """Take the result of the oldest step in flight; answers all updates there are.

        Raises:
            ValueError: not the output of that step; nothing was changed.
        """
        plan = self._oldest(output.step)
        require_fit(plan, output)
        self._in_flight.popleft()
        token_s = output.duration_s / plan.num_tokens
        self._speculation.took(plan, output, self.step_model)
        bad_rows, told = output.bad_rows, output.logprobs
        if left := plan.repeats - output.repeats:
            for row in plan.sequences:
                self._sequences[row.seq_id].unplan(left)
        for i, (row, sampled) in enumerate(zip(plan.sequences, output.sampled, strict=True)):
            logprobs = told.get(i, ()) if told else ()
            fault = (STUCK if i in output.stuck else NOT_FINITE) if i in bad_rows else ""
            self._commit_row(row, sampled, token_s * len(row.token_ids), logprobs, fault)
        return self.take_updates()

    def fail_step(self, step: int, detail: str) -> list[SequenceUpdate]:
        """The oldest step in flight produced nothing: its sequences end with `error`.

        Raises:
            ValueError: not that step; nothing was changed.
        """
        plan = self._oldest(step)
        self._in_flight.popleft()
        for row in plan.sequences:
            seq = self._sequences[row.seq_id]
            seq.steps_in_flight -= 1
            seq.unplan(plan.repeats - 1)
            self._fail(seq, detail)
            self._let_go(seq)
        return self.take_updates()

    def take_updates(self) -> list[SequenceUpdate]:
        """Updates that came about between steps: by `release`, by `reserve` of what is wholly cached, by `plan`."""
        updates, self._updates = self._updates, []
        return updates

    # ------------------------------------------------------------------------------------- blocks

    def tag(self, group: int, block_id: int, generation: int, tag: BlockTag, token_ids: Seq[int]) -> bool:
        """Make a completed block findable; see `GroupPool.tag` for when the answer is False."""
        return self.pool.groups[group].tag(block_id, generation, tag, token_ids)

    def purge(self, tenant: TenantId, below: ScopeGeneration) -> tuple[tuple[int, ...], ...]:
        """End the tenant's sequences of generations below `below`, and have every block overwritten that may hold bytes
        of them, whatever state it is in. Returns the blocks, per layer group; `num_purged` tells of their end."""
        for seq in list(self._sequences.values()):
            if seq.spec.tenant == tenant and seq.spec.scope_generation < below:
                self._end_from_outside(seq, CANCELLED)
        return self.pool.purge(tenant, below)

    def distrust(self, seq_id: str) -> None:
        """Its KV was found to hold what is no number: it ends with `error`, and nothing of it is used again."""
        seq = self._sequences.get(seq_id)
        if seq is None:
            return
        condemn(self.pool, seq)
        self._fail(seq, NOT_FINITE)
        self._let_go(seq)

    def expire(self, now: float) -> None:
        """Forget blocks whose time is over; see `GroupPool.expire`. `now`: seconds on a monotonic clock."""
        self.pool.expire(now)

    def drain_events(self) -> tuple[TagEvents, ...]:
        """Tags stored and removed since the last call, per layer group."""
        return self.pool.drain_events()

    def take_blocks_to_zero(self) -> tuple[tuple[int, int], ...]:
        """(group, block id) to overwrite with zeros before any step planned from now on; held until `zeroed`.

        They are blocks of sequences whose logits were not finite, purged blocks, and partly filled tails that will be
        handed over.
        """
        return self._cleaning.take()

    def zeroed(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Blocks of `take_blocks_to_zero` are overwritten."""
        for seq in self._cleaning.done(blocks):
            self._let_go(seq)

    def not_zeroed(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Blocks of `take_blocks_to_zero` could not be overwritten; they stay held."""
        self._cleaning.failed(blocks)

    # ------------------------------------------------------------------------------------- inspection

    @property
    def num_in_flight(self) -> int:
        """Steps planned and neither committed nor failed."""
        return len(self._in_flight)

    @property
    def is_idle(self) -> bool:
        """True when nothing is held and no step is in flight."""
        return not self._sequences and not self._in_flight

    def holds(self, seq_id: str) -> bool:
        """True while the sequence lives or its blocks are held."""
        return seq_id in self._sequences

    def gauges(self) -> Gauges:
        """A snapshot of now."""
        return read_gauges(self._sequences.values(), self.pool, self._room, self._speculation)

    def check(self) -> None:
        """Assert the invariants: cheap enough to run whenever the engine idles."""
        require_sound(self._sequences, self._in_flight, self.pool, self.config)

    # ------------------------------------------------------------------------------------- parts

    def _oldest(self, step: int) -> StepPlan:
        if not self._in_flight or self._in_flight[0].step != step:
            raise ValueError(f"step {step} is not the oldest in flight")
        return self._in_flight[0]

    def _commit_row(
        self, row: ScheduledSequence, sampled: Seq[int], share_s: float, logprobs: Seq[TokenLogprob], fault: str
    ) -> None:
        seq = self._sequences[row.seq_id]
        seq.steps_in_flight -= 1
        seq.spent(row.start, share_s)
        if fault:
            if fault == NOT_FINITE:
                condemn(self.pool, seq)
            self._fail(seq, fault)
        elif not seq.finish:
            if row.drafted:
                seq.settle_draft(len(sampled))
            # behind the first of a stretch each token it drew was computed too, but for the last
            seq.num_confirmed_tokens = row.start + len(row.token_ids) + len(sampled) - row.num_sampled
            if self._followers:
                self._followers.serve(seq)
            first_seq, taken = seq.num_output_tokens, seq.append(sampled)
            # a row may have ended inside a draft: behind its last token there is no text
            seq.num_confirmed_tokens = min(seq.num_confirmed_tokens, len(seq.tokens))
            if row.drafted:
                right = min(len(sampled) - 1, len(taken))
                self._speculation.verified(seq, row.drafted, right, len(seq.tokens) - len(taken))
            if logprobs:
                scored, logprobs = logprobs[: len(row.scored)], logprobs[len(row.scored) :]
                self._report(seq, first_seq, taken, logprobs=logprobs[: len(taken)], scored=scored)
            else:
                self._report(seq, first_seq, taken)
        if seq.finish or seq.leaving:
            self._let_go(seq)

    def _report(
        self,
        seq: Sequence,
        first_seq: int = -1,
        token_ids: tuple[int, ...] = (),
        detail: str = "",
        event: str = "",
        logprobs: Seq[TokenLogprob] = (),
        scored: Seq[TokenLogprob] = (),
    ) -> None:
        self._updates.append(
            SequenceUpdate(
                seq_id=seq.spec.seq_id,
                first_seq=seq.num_output_tokens if first_seq < 0 else first_seq,
                token_ids=token_ids,
                num_computed_tokens=seq.num_confirmed_tokens,
                completed=tuple(() for _ in seq.tables) if seq.finish == ERROR else seq.take_completed(),
                finish=seq.finish,
                totals=seq.totals() if seq.finish else None,
                detail=detail,
                event=event,
                started_at=seq.started_at,
                logprobs=tuple(logprobs),
                prompt_logprobs=tuple(scored),
            )
        )

    def _fail(self, seq: Sequence, detail: str) -> None:
        """End it with `error`. A peer may still be reading what it finished before: that goes when it is cancelled."""
        if not seq.finish:
            seq.end(ERROR)
            self._report(seq, detail=detail)

    def _end_from_outside(self, seq: Sequence, finish: str) -> Totals:
        if not seq.finish:
            seq.end(finish)
        seq.kept_for_peer = False
        totals = seq.totals()
        self._let_go(seq)
        return totals

    def _let_go(self, seq: Sequence) -> None:
        if self._room.let_go(seq):
            del self._sequences[seq.spec.seq_id]
            self._speculation.forget(seq.spec.seq_id)
            self._followers.leader_gone(seq.spec.seq_id)
