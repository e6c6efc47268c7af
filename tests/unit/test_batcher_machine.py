"""The batcher's invariants under random use."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import FlakyFailure
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from shared.contracts.ids import BlockTag, TenantId
from shared.contracts.tokens import completion_checksum
from shared.engine.block_room import NeverFits, NoBlocks, NoSlot
from shared.engine.sequence import Sequence
from shared.engine.sequence_blocks import to_begin
from shared.engine.sequence_spec import SequenceSpec
from shared.engine.sequence_update import SequenceUpdate
from shared.engine.step_plan import StepPlan
from tests.unit.batcher_support import (
    BLOCK,
    make_batcher,
    make_spec,
    next_token,
    output_of,
    used,
)


class BatcherMachine(RuleBasedStateMachine):
    """Random arrivals, steps, ends and hand-offs; each sequence must see exactly its own tokens, and all must end."""

    DEPTH, STRETCH_S, NUM_BLOCKS, PLACES = 1, 0.0, 13, 6

    def __init__(self) -> None:
        super().__init__()
        self.batcher = make_batcher(
            num_blocks=self.NUM_BLOCKS,
            groups=2,
            depth=self.DEPTH,
            max_num_seqs=self.PLACES,
            token_budget=11,
            quantum=3,
            stretch_s=self.STRETCH_S,
        )
        self.numbers = itertools.count()
        self.specs: dict[str, SequenceSpec] = {}
        self.live: set[str] = set()
        self.sources: set[str] = set()  # compute_only, not unpinned
        self.tokens: dict[str, list[int]] = {}
        self.flying: list[StepPlan] = []
        self.zeroing: list[tuple[int, int]] = []
        self.pulling: set[str] = set()  # pinned by a hand-off
        self.now = 0.0

    def take(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            seq_id, spec = update.seq_id, self.specs[update.seq_id]
            assert seq_id in self.live, "an update after the end"
            assert update.first_seq == len(self.tokens[seq_id])
            for token_id in update.token_ids:
                position = spec.num_prompt_tokens + len(self.tokens[seq_id])
                assert token_id == next_token(seq_id, position)
                self.tokens[seq_id].append(token_id)
            for group, blocks in enumerate(update.completed):
                for block in blocks:
                    everything = [*spec.token_ids, *self.tokens[seq_id]]
                    assert block.token_ids == tuple(everything[block.position * BLOCK :][:BLOCK])
                    tag = self.tag_of(everything, block.position)
                    self.batcher.tag(group, block.block_id, block.generation, tag, block.token_ids)
            if update.finish:
                self.live.remove(seq_id)
                assert update.totals is not None
                assert update.totals.completion_tokens == len(self.tokens[seq_id])
                if update.finish == "length":
                    assert len(self.tokens[seq_id]) == spec.sampling.max_tokens

    @staticmethod
    def tag_of(tokens: list[int] | tuple[int, ...], position: int) -> BlockTag:
        return BlockTag(repr(tuple(tokens[: (position + 1) * BLOCK])).encode())

    @precondition(lambda self: not self.batcher.is_stretching)  # the engine lets orders wait
    @rule(
        prompt=st.integers(1, 22),
        max_tokens=st.integers(1, 12),
        kind=st.sampled_from(["plain", "plain", "compute", "await", "pull"]),
        klass=st.sampled_from(["interactive", "analysis", "batch"]),
        tenant=st.sampled_from(["x", "y"]),
        retention_s=st.sampled_from([-1, -1, -1, 0, 5]),
    )
    def reserve(self, prompt: int, max_tokens: int, kind: str, klass: str, tenant: str, retention_s: int) -> None:
        token_ids = tuple(range(100, 100 + prompt))
        tags = tuple(self.tag_of(token_ids, i) for i in range(prompt // BLOCK))
        spec = make_spec(
            f"s{next(self.numbers)}",
            prompt,
            max_tokens,
            tenant=TenantId(tenant),
            tags=(tags, tags),
            compute_only=kind == "compute",
            await_kv=kind in ("await", "pull"),
            klass=klass,
            retention_s=retention_s,
        )
        room = self.batcher.gauges().rooms[spec.rank]
        begin = to_begin(self.batcher.pool, spec, prompt)
        promised = room.sequences > 0 and all(n <= there for n, there in zip(begin, room.blocks, strict=True))
        try:
            reservation = self.batcher.reserve(spec)
        except NeverFits:
            return
        except (NoBlocks, NoSlot):
            # who computes for a peer takes nothing from others
            assert not promised or spec.compute_only, "there was said to be room"
            return
        assert room.sequences > 0
        assert not (reservation.arriving and spec.compute_only)
        self.specs[spec.seq_id] = spec
        self.live.add(spec.seq_id)
        self.tokens[spec.seq_id] = []
        if kind == "compute":
            self.sources.add(spec.seq_id)
        if kind == "pull":
            assert self.batcher.pin(spec.seq_id)
            self.pulling.add(spec.seq_id)
        self.take(self.batcher.take_updates())

    @rule()
    def plan(self) -> None:
        self.zeroing += self.batcher.take_blocks_to_zero()
        plan = self.batcher.plan(may_stretch=True)
        self.take(self.batcher.take_updates())
        if plan is None:
            return
        assert plan.num_tokens <= 11
        assert plan.repeats == 1 or not self.flying
        assert len({row.seq_id for row in plan.sequences}) == len(plan.sequences)
        self.flying.append(plan)
        assert len(self.flying) <= self.DEPTH + 1

    @precondition(lambda self: self.flying)
    @rule(fate=st.sampled_from(["ok"] * 8 + ["bad", "raise"]), data=st.data())
    def end_step(self, fate: str, data: Any) -> None:
        plan = self.flying.pop(0)
        if fate == "raise":
            self.take(self.batcher.fail_step(plan.step, "boom"))
            return
        bad = frozenset({data.draw(st.integers(0, len(plan.sequences) - 1))} if fate == "bad" else ())
        repeats = data.draw(st.integers(1, plan.repeats)) if plan.repeats > 1 and not bad else 1
        self.take(self.batcher.commit(output_of(plan, bad_rows=bad, repeats=repeats)))

    @precondition(lambda self: self.live and not self.batcher.is_stretching)
    @rule(data=st.data(), how=st.sampled_from(["cancel", "finish", "release"]))
    def touch(self, data: Any, how: str) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.live)))
        if how == "release":
            if self.specs[seq_id].await_kv:
                self.batcher.kv_received(seq_id, data.draw(st.integers(0, self.specs[seq_id].max_match)))
            self.batcher.release(seq_id)
            self.end_pull(seq_id)
            self.take(self.batcher.take_updates())
            return
        if how == "cancel":
            totals, kept = self.batcher.cancel(seq_id), len(self.tokens[seq_id])
        else:
            kept = data.draw(st.integers(0, len(self.tokens[seq_id])))
            totals = self.batcher.finish(seq_id, kept)
        assert totals is not None
        assert totals.completion_tokens == kept
        assert totals.checksum == completion_checksum(self.tokens[seq_id][:kept])
        assert 0 <= totals.wasted_tokens <= totals.computed_tokens
        self.live.remove(seq_id)
        self.sources.discard(seq_id)
        self.end_pull(seq_id)

    def end_pull(self, seq_id: str) -> None:
        if seq_id in self.pulling:
            self.pulling.remove(seq_id)
            self.batcher.unpin(seq_id)

    @precondition(lambda self: self.sources and not self.batcher.is_stretching)
    @rule(data=st.data())
    def unpin(self, data: Any) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.sources)))
        self.sources.remove(seq_id)
        assert self.batcher.unpin(seq_id)

    @rule(seconds=st.integers(0, 4))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        self.batcher.expire(self.now)

    @rule()
    def zero(self) -> None:
        self.batcher.zeroed(self.zeroing)
        self.zeroing = []

    @invariant()
    def sound(self) -> None:
        self.batcher.check()
        # no two steps or owners write one block: each row writes [start, end) of its table, shared blocks excluded
        writers: dict[tuple[int, int], str] = {}
        for row in (row for plan in self.flying for row in plan.sequences):
            assert row.start >= row.stored_from
            for group, table in enumerate(row.block_tables):
                for block_id in table[row.start // BLOCK :]:
                    assert writers.setdefault((group, block_id), row.seq_id) == row.seq_id

    def teardown(self) -> None:
        for seq_id in list(self.live):
            self.batcher.release(seq_id)
        for seq_id in list(self.pulling):
            self.end_pull(seq_id)
        self.run_dry()
        for seq_id in list(self.sources):
            self.batcher.unpin(seq_id)
        self.run_dry()  # who waited for blocks that peers were to pull
        self.zeroing += self.batcher.take_blocks_to_zero()
        self.zero()
        assert not self.live
        assert self.batcher.is_idle
        self.batcher.check()
        assert used(self.batcher) == [0, 0]

    def run_dry(self) -> None:
        self.take(self.batcher.take_updates())
        for _ in range(1000):
            self.zero()
            self.plan()
            if not self.flying:
                if not (self.zeroing or self.batcher.pool.is_dirty):
                    break
                continue  # blocks that somebody may wait for
            plan = self.flying.pop(0)
            self.take(self.batcher.commit(output_of(plan, repeats=plan.repeats)))


class EagerBatcherMachine(BatcherMachine):
    DEPTH = 0


class CrowdedBatcherMachine(BatcherMachine):
    """Places are what is scarce, so classes take them from one another."""

    NUM_BLOCKS, PLACES = 30, 2


class StretchingBatcherMachine(BatcherMachine):
    STRETCH_S, NUM_BLOCKS = 1.0, 40


_SETTINGS = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
for _machine in (BatcherMachine, EagerBatcherMachine, CrowdedBatcherMachine, StretchingBatcherMachine):
    _machine.TestCase.settings = _SETTINGS
TestOneStepAhead = BatcherMachine.TestCase
TestNoStepAhead = EagerBatcherMachine.TestCase
TestFewPlaces = CrowdedBatcherMachine.TestCase
TestStretches = StretchingBatcherMachine.TestCase


def test_the_machine_finds_a_broken_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    # mutation: a step in flight no longer holds blocks
    monkeypatch.setattr(Sequence, "may_be_freed", property(lambda self: bool(self.finish)))
    mutated = settings(_SETTINGS, database=None, print_blob=False, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises((AssertionError, KeyError, ValueError, FlakyFailure)):
        run_state_machine_as_test(BatcherMachine, settings=mutated)
