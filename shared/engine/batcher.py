"""The batcher: which tokens of which sequences the next step computes, and what a finished step means.

Pure: no clock, no tensor, no thread; the engine's planner thread owns it. A sequence is accepted with blocks for the
tokens it came with and one to grow into, and takes the others one by one; `block_room` says at whose cost.

A step may be planned while the one before is in flight. What such a step needs of an earlier one stands in it as
IN_FLIGHT; when a sequence turns out to have ended, its rows in later steps are dropped, and its blocks are freed only
when the last step that names them has ended and the last pin is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from shared.contracts.ids import BlockTag
from shared.contracts.logprobs import TokenLogprob
from shared.contracts.parts import ItlTarget, Totals
from shared.engine.batching_policy import Batching, make_policy
from shared.engine.block_room import BlockRoom, ReservationRefused, may_run, urgency
from shared.engine.fair_prefill import DeficitRoundRobin, PrefillWant
from shared.engine.prompt_budget import NO_TARGET, prompt_budget
from shared.engine.sequence import Sequence, SequenceStatus
from shared.engine.sequence_blocks import condemn, no_tables, num_lent
from shared.engine.sequence_spec import SequenceSpec
from shared.engine.sequence_update import CANCELLED, ERROR, STOP, SequenceUpdate
from shared.engine.step_plan import ScheduledSequence, StepOutput, StepPlan
from shared.engine.step_time import DEFAULT_MODEL
from shared.kv.block_pool import BlockCounts, BlockPool, TagEvents
from shared.kv.block_table import BlockTable
from shared.kv.layout import PoolLayout

SCORED_CHUNK = 64
"""Most prompt tokens in a step of a sequence that wants their log-probabilities."""


NOT_FINITE = "the logits were not finite"
STUCK = "its grammar allows no further token"


class NoSlot(ReservationRefused):
    """As many sequences are live as the engine runs at once."""


@dataclass(frozen=True, slots=True)
class BatcherConfig:
    """Raises ValueError when a full set of decodes could leave no room for a prompt."""

    token_budget: int = 512  # most tokens in a step
    lone_token_budget: int = 0  # most tokens in a step in which nothing decodes, if larger
    itl_target: ItlTarget = NO_TARGET  # how long a step may take while sequences decode; see `prompt_budget`
    max_num_seqs: int = 32  # most live sequences, waiting for KV included
    chunk_size: int = 0  # most tokens of one sequence in a step; 0 = the token budget
    depth: int = 1  # steps that may be planned while one is in flight
    quantum: int = 64  # prompt tokens a tenant of weight 1 gets in a turn
    batching: Batching = "continuous"  # see `batching_policy`
    batch_size: int = 8  # most sequences of a static or dynamic batch
    batch_window_s: float = 0.05  # how long a dynamic batch waits to become full

    def __post_init__(self) -> None:
        if self.token_budget <= self.max_num_seqs:
            raise ValueError(f"a budget of {self.token_budget} tokens must exceed {self.max_num_seqs} sequences")
        target = self.itl_target
        if min(target.least_s, target.times, target.times_each, self.lone_token_budget) < 0:
            raise ValueError("the target of a token's latency and the lone token budget must not be negative")
        if min(self.max_num_seqs, self.quantum) < 1 or min(self.depth, self.chunk_size) < 0:
            raise ValueError("sequences and quantum must be positive, depth and chunk size not negative")


@dataclass(frozen=True, slots=True)
class Reservation:
    """What an accepted sequence holds."""

    num_cached_tokens: int
    tables: tuple[BlockTable, ...]  # one per layer group


@dataclass(frozen=True, slots=True)
class Gauges:
    """A snapshot for beats and metrics."""

    running: int
    waiting: int
    ended: int  # finished, blocks still held
    queue_tokens: int  # prompt tokens to compute here that are not yet planned
    blocks: tuple[BlockCounts, ...]  # one per layer group
    held_back: tuple[int, ...]  # available blocks that no newcomer gets, per layer group
    preempted: int  # those waiting for room, among `waiting`
    preemptions: int  # so far


class Batcher:
    """Batching with chunked prefill under one token budget, by one of the policies in `batching_policy`."""

    def __init__(self, layout: PoolLayout, config: BatcherConfig) -> None:
        self.config = config
        self.pool = BlockPool(layout)
        self.step_model = DEFAULT_MODEL  # how long steps take, as far as is known; may be replaced any time
        self._sequences: dict[str, Sequence] = {}  # in order of arrival
        self._fair = DeficitRoundRobin(config.quantum)
        size = min(config.batch_size, config.max_num_seqs)
        self._policy = make_policy(config.batching, size, config.batch_window_s)
        self._room = BlockRoom(self.pool, self._sequences, lambda seq, event: self._report(seq, event=event))
        self._arrivals = 0
        self._followers: dict[str, list[Sequence]] = {}  # by whom they wait for
        self._in_flight: deque[StepPlan] = deque()
        self._last_step = 0
        self._updates: list[SequenceUpdate] = []
        self._to_zero: list[tuple[int, int]] = []  # tails of sequences that only compute
        self._zeroing: dict[tuple[int, int], str] = {}  # such a tail, pinned until it is zeroed

    # ------------------------------------------------------------------------------------- life of a sequence

    def require_possible(self, specs: Seq[SequenceSpec]) -> None:
        """Raises NeverFits when the empty pool could not hold each of `specs` to its end, or all of them to begin."""
        self._room.require_possible(specs)

    def reserve(self, spec: SequenceSpec) -> Reservation:
        """Accept a sequence with the blocks it needs to begin, or nothing.

        Room is left for each running sequence to grow by a block, and for those that were preempted.

        Raises:
            NeverFits, NoBlocks, NoSlot: not accepted.
            ValueError: `spec.seq_id` is held already.
        """
        if spec.seq_id in self._sequences:
            raise ValueError(f"sequence {spec.seq_id} is held already")
        self._room.require_possible((spec,))
        if self._num_live() >= self.config.max_num_seqs:
            raise NoSlot(f"{self.config.max_num_seqs} sequences are live")
        leader = self._leader_of(spec)
        tables, num_cached = self._room.admit(spec) if leader is None else (no_tables(self.pool), 0)
        self._arrivals += 1
        seq = Sequence(spec, self._arrivals, tables, num_cached)
        self._sequences[spec.seq_id] = seq
        if leader is not None:
            seq.wait_for(leader)
            self._followers.setdefault(leader, []).append(seq)
        if spec.compute_only:
            self._zero_tail(seq)
            seq.end_if_computed()
            if seq.finish:
                self._report(seq)
        return Reservation(num_cached, seq.tables)

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
        self._lend(seq)
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

    def cancel(self, seq_id: str, *, wipe: bool = False) -> Totals | None:
        """End a sequence where it stands; its totals, or None when it is not held.

        The pin of a sequence that only computes is dropped: a peer still pulling finds a digest that differs.

        Args:
            wipe: its own blocks lose their tags and are zeroed before any reuse: what a purge asks for.
        """
        seq = self._sequences.get(seq_id)
        if seq is None:
            return None
        if wipe:
            condemn(self.pool, seq)
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

    def outputs(self, seq_id: str) -> tuple[int, ...]:
        """Output token ids so far, for a replay; () when it is not held."""
        seq = self._sequences.get(seq_id)
        return () if seq is None else tuple(seq.tokens[len(seq.tokens) - seq.num_output_tokens :])

    # ------------------------------------------------------------------------------------- steps

    def plan(self, now: float = 0.0) -> StepPlan | None:
        """The next step, or None when depth + 1 steps are in flight or nothing can run.

        Sequences one token behind come first, one row each, the most urgent class and the oldest before others; then
        chunks of prompts, shared out among tenants.

        Args:
            now: seconds on a monotonic clock, for dynamic batches and for what is told of a sequence's start.
        """
        if len(self._in_flight) > self.config.depth:
            return None
        allowed = _Lazily(self._allowed, now)
        if self._room.has_homeless:
            self._room.let_return(allowed())
        ids = None if self._policy.admits_all else allowed()
        decodes, behind = list[Sequence](), list[tuple[Sequence, int]]()
        for seq in self._sequences.values():
            count = seq.num_pending_tokens
            if count and (ids is None or may_run(seq, ids)):
                if count == 1:
                    decodes.append(seq)
                else:
                    behind.append((seq, count))
        scheduled = self._schedule_decodes(decodes, allowed, now)
        # taking blocks for those may have ended the turn of others
        behind = [(seq, count) for seq, count in behind if seq.num_pending_tokens]
        if behind or self._fair.saves:
            scheduled += self._schedule_prompts(behind, scheduled, now)
        if not scheduled:
            return None
        self._last_step += 1
        plan = StepPlan(self._last_step, tuple(scheduled))
        self._in_flight.append(plan)
        return plan

    def _schedule_decodes(self, seqs: list[Sequence], allowed: _Lazily, now: float) -> list[ScheduledSequence]:
        seqs.sort(key=urgency)
        scheduled = []
        for seq in seqs:
            if not seq.covers(seq.num_computed_tokens + 1):
                # its turn may not come: one before may have needed its blocks, or nobody has any for it
                if seq.num_pending_tokens != 1 or not self._room.grows(seq, allowed()):
                    continue
            elif seq.leaving or seq.preempted:
                continue
            scheduled.append(seq.schedule(1, now))
        return scheduled

    def _schedule_prompts(
        self, behind: Seq[tuple[Sequence, int]], decodes: Seq[ScheduledSequence], now: float
    ) -> list[ScheduledSequence]:
        config = self.config
        budget = config.token_budget if decodes else max(config.token_budget, config.lone_token_budget)
        chunk_size = config.chunk_size or budget
        wants = [
            PrefillWant(seq.spec.seq_id, seq.spec.tenant, seq.spec.weight, min(count, _chunk(seq, chunk_size)))
            for seq, count in behind
        ]
        shares = self._fair.share(wants, self._prompt_budget(budget - len(decodes), decodes, wants))
        return [self._sequences[seq_id].schedule(count, now) for seq_id, count in shares.items()]

    def wait_s(self, now: float) -> float:
        """Seconds after which `plan` may find something although nothing happened meanwhile; infinity: never."""
        return self._policy.wait_s(now)

    def commit(self, output: StepOutput) -> list[SequenceUpdate]:
        """Take the result of the oldest step in flight; answers all updates there are.

        Raises:
            ValueError: not the output of that step; nothing was changed.
        """
        plan = self._oldest(output.step)
        _require_fit(plan, output)
        self._in_flight.popleft()
        token_s = output.duration_s / plan.num_tokens
        bad_rows, told = output.bad_rows, output.logprobs
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

    def forget(self, group: int, tags: Iterable[BlockTag]) -> int:
        """Purge tagged blocks; see `GroupPool.forget`."""
        return self.pool.groups[group].forget(tags)

    def drain_events(self) -> tuple[TagEvents, ...]:
        """Tags stored and removed since the last call, per layer group."""
        return self.pool.drain_events()

    def take_blocks_to_zero(self) -> tuple[tuple[int, int], ...]:
        """(group, block id) to overwrite with zeros before any step planned from now on; held until `zeroed`.

        They are blocks of sequences whose logits were not finite, purged blocks, and partly filled tails that will be
        handed over.
        """
        if not (self._to_zero or self.pool.is_dirty):
            return ()
        blocks = (*self._to_zero, *self.pool.take_dirty())
        self._to_zero = []
        return blocks

    def zeroed(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Blocks of `take_blocks_to_zero` are overwritten."""
        for group, block_id in blocks:
            seq_id = self._zeroing.pop((group, block_id), None)
            if seq_id is None:
                self.pool.cleaned([(group, block_id)])
            else:
                seq = self._sequences[seq_id]
                seq.cleaning -= 1
                self._let_go(seq)

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
        statuses = [seq.status for seq in self._sequences.values()]
        return Gauges(
            running=statuses.count(SequenceStatus.RUNNING),
            waiting=statuses.count(SequenceStatus.WAITING) + statuses.count(SequenceStatus.PREEMPTED),
            ended=statuses.count(SequenceStatus.FINISHED),
            queue_tokens=sum(seq.num_waiting_tokens for seq in self._sequences.values()),
            blocks=self.pool.counts,
            held_back=self._room.held_back,
            preempted=statuses.count(SequenceStatus.PREEMPTED),
            preemptions=self._room.preemptions,
        )

    def check(self) -> None:
        """Assert the invariants: cheap enough to run whenever the engine idles."""
        in_flight = [row.seq_id for plan in self._in_flight for row in plan.sequences]
        for seq_id, seq in self._sequences.items():
            assert seq.steps_in_flight == in_flight.count(seq_id), f"{seq_id}: steps in flight miscounted"
            assert seq.num_placeholders <= self.config.depth + 1, f"{seq_id}: too many placeholders"
            assert seq.num_confirmed_tokens <= seq.num_computed_tokens <= seq.spec.num_slots
            assert not any(seq.missing_blocks(seq.num_computed_tokens)), f"{seq_id}: computes beyond its blocks"
            assert not (seq.leaving and not seq.steps_in_flight), f"{seq_id}: nothing keeps it from leaving"
            assert not (seq.preempted and (any(map(len, seq.tables)) or seq.steps_in_flight or seq.num_placeholders))
            assert not seq.may_be_freed, f"{seq_id}: over, but its blocks are held"
            assert not (seq.finish and seq.num_placeholders), f"{seq_id}: over, but it waits for tokens"
        for row in (row for plan in self._in_flight for row in plan.sequences):
            assert row.seq_id in self._sequences, f"{row.seq_id}: blocks freed under a step in flight"
        for group, pool in enumerate(self.pool.groups):
            references = [0] * pool.num_blocks
            for seq in self._sequences.values():
                for block_id in seq.tables[group].block_ids:
                    references[block_id] += 1
            pool.check(references)

    # ------------------------------------------------------------------------------------- parts

    def _num_live(self) -> int:
        return sum(1 for seq in self._sequences.values() if not seq.finish)

    def _prompt_budget(self, most: int, decodes: Seq[ScheduledSequence], wants: Seq[PrefillWant]) -> int:
        if not (wants and decodes):
            return most
        context = sum(row.start + 1 for row in decodes)
        start = max(self._sequences[want.seq_id].num_computed_tokens for want in wants)
        target = self.config.itl_target
        return prompt_budget(self.step_model, target, most, len(decodes), len(wants), context, start)

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
            seq.num_confirmed_tokens = row.start + len(row.token_ids)
            if self._followers:
                self._lend(seq)
            first_seq, taken = seq.num_output_tokens, seq.append(sampled)
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
        if not seq.finish:
            seq.end(ERROR)
            seq.kept_for_peer = False
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
            for follower in self._followers.pop(seq.spec.seq_id, ()):
                follower.waits_for = ""  # it computes the prompt itself

    def _leader_of(self, spec: SequenceSpec) -> str | None:
        """The sequence that is still to compute the prompt of one that follows it."""
        leader = self._sequences.get(spec.follows)
        if (
            leader is None
            or spec.num_scored
            or leader.finish
            or leader.num_confirmed_tokens >= num_lent(self.pool, spec)
        ):
            return None
        return spec.follows

    def _lend(self, leader: Sequence) -> None:
        followers = self._followers.get(leader.spec.seq_id)
        if followers and self._room.lend(leader, followers):
            del self._followers[leader.spec.seq_id]

    def _allowed(self, now: float) -> Collection[str]:
        """Who may run by the batching policy."""
        live = {i for i, seq in self._sequences.items() if not (seq.finish or seq.spec.compute_only)}
        ready = [i for i in self._sequences if i in live and not self._sequences[i].awaiting_kv]
        return frozenset(self._policy.admit(ready, live, now))

    def _zero_tail(self, seq: Sequence) -> None:
        """A partly filled block travels whole: what lies behind its last token must be nobody's."""
        for group, table in enumerate(seq.tables):
            if len(seq.tokens) % table.block_size and table.own:
                block = (group, table.block_ids[-1])
                self._to_zero.append(block)
                self._zeroing[block] = seq.spec.seq_id
                seq.cleaning += 1


class _Lazily:
    """Who may run by the batching policy: found when somebody asks, which in most steps nobody does."""

    def __init__(self, find: Callable[[float], Collection[str]], now: float) -> None:
        self._find, self._now = find, now
        self._found: Collection[str] | None = None

    def __call__(self) -> Collection[str]:
        if self._found is None:
            self._found = self._find(self._now)
        return self._found


def _chunk(seq: Sequence, most: int) -> int:
    """Most tokens of a sequence in a step: rows that are scored make logits, which take memory."""
    return min(most, SCORED_CHUNK) if seq.spec.num_scored else most


def _require_fit(plan: StepPlan, output: StepOutput) -> None:
    """Raises ValueError when a sequence that samples lacks its tokens; one with bad rows need not have any."""
    if len(output.sampled) != len(plan.sequences):
        raise ValueError(f"step {plan.step}: the output has {len(output.sampled)} of {len(plan.sequences)} sequences")
    for i, (row, sampled) in enumerate(zip(plan.sequences, output.sampled, strict=True)):
        wanted = row.num_sampled
        if len(sampled) != wanted and i not in output.bad_rows:
            raise ValueError(f"step {plan.step}: {len(sampled)} tokens where {wanted} were to be sampled")
