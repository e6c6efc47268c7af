"""Growth block by block, and who gives way when there is none: choices, accounts, and that everything always ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.contracts.ids import BlockTag, ScopeGeneration, TenantId
from shared.contracts.sampling import SamplingParams
from shared.contracts.tokens import completion_checksum
from shared.engine.batcher import Batcher
from shared.engine.batching_policy import BATCHING
from shared.engine.block_room import BlockRoom, NeverFits, NoBlocks, NoSlot
from shared.engine.preemption import PASSES, Holder, choose_victim, may_enter
from shared.engine.sequence import Sequence
from shared.engine.sequence_spec import SequenceSpec
from shared.engine.sequence_update import SequenceUpdate
from shared.engine.step_plan import StepPlan
from tests.unit.batcher_support import (
    BLOCK,
    fifty,
    make_batcher,
    make_spec,
    next_token,
    output_of,
    run_dry,
    shape,
    step,
    tag_all,
    used,
)

# ------------------------------------------------------------------------------------------ the choice


def holder(seq_id: str, rank: int = 0, order: int = 0, **facts: bool) -> Holder:
    defaults = {"started": True, "spared": False, "pinned": False, "can_run": True}
    return Holder(seq_id, rank, order, **defaults | facts)


@pytest.mark.parametrize(
    ("holders", "victim"),
    [
        ([holder("me", order=0), holder("b", order=1), holder("c", order=2)], "c"),
        ([holder("b", order=1), holder("me", order=2)], "me"),
        ([holder("me", order=9), holder("low", rank=2, order=1), holder("mid", rank=1, order=5)], "low"),
        ([holder("me"), holder("run", order=2), holder("idle", order=1, started=False)], "idle"),
        ([holder("me", rank=1), holder("b", rank=1, order=2), holder("up", order=3, started=False)], "b"),
        ([holder("me"), holder("b", order=1), holder("c", order=2, spared=True)], "b"),
        ([holder("me"), holder("b", order=1), holder("c", order=2, pinned=True)], "b"),
        ([holder("me", order=1), holder("c", order=2, spared=True)], "me"),
        ([holder("me", order=1), holder("c", order=2, pinned=True, can_run=False)], None),
        ([holder("me", rank=2), holder("up", order=1, started=False, can_run=False)], "up"),
        ([holder("me")], None),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_who_gives_way(holders: list[Holder], victim: str | None) -> None:
    assert choose_victim("me", holders) == victim
    assert choose_victim("me", holders[::-1]) == victim


def test_newcomers_pass_only_lower_classes_and_only_so_often() -> None:
    assert may_enter(2, [])
    assert may_enter(0, [(1, 0), (2, PASSES - 1)])
    assert not may_enter(0, [(1, 0), (2, PASSES)])
    assert not may_enter(1, [(1, 0)])
    assert not may_enter(2, [(1, 0)])


# ------------------------------------------------------------------------------------------ growth


def test_a_sequence_begins_with_its_prompt_and_one_block_and_takes_the_others_as_it_goes() -> None:
    batcher = make_batcher(groups=2)
    batcher.reserve(make_spec(prompt=5, max_tokens=20))
    assert used(batcher) == [3, 3]
    seen = []
    while not batcher.is_idle:
        step(batcher)
        seen.append(used(batcher)[0])
    # 5 + 19 slots are six blocks; 8 blocks of room were there from the beginning for the first 12
    assert seen == [3] * 8 + [4] * 4 + [5] * 4 + [6] * 3 + [0]


@pytest.mark.parametrize(("prompt", "max_tokens", "blocks"), [(4, 1, 1), (4, 2, 2), (5, 4, 2), (5, 5, 3), (1, 1, 1)])
def test_nothing_is_reserved_that_cannot_be_needed(prompt: int, max_tokens: int, blocks: int) -> None:
    batcher = make_batcher()
    batcher.reserve(make_spec(prompt=prompt, max_tokens=max_tokens))
    assert used(batcher) == [blocks]


def test_admission_leaves_a_block_for_each_that_runs() -> None:
    batcher = make_batcher(num_blocks=7)
    batcher.reserve(make_spec("a", prompt=4, max_tokens=20))  # 2 blocks, may grow
    batcher.reserve(make_spec("b", prompt=4, max_tokens=4))  # 2 blocks, all it can need
    assert batcher.gauges().held_back == (1,)
    with pytest.raises(NoBlocks):
        batcher.reserve(make_spec("c", prompt=12, max_tokens=1))
    batcher.reserve(make_spec("c", prompt=8, max_tokens=1))
    assert used(batcher) == [6]


def test_what_can_never_fit_is_refused_at_once_alone_and_together() -> None:
    batcher = make_batcher(num_blocks=5)
    with pytest.raises(NeverFits):
        batcher.reserve(make_spec(prompt=4, max_tokens=18))  # 21 slots
    batcher.reserve(make_spec(prompt=4, max_tokens=17))
    with pytest.raises(NeverFits):
        batcher.require_possible([make_spec(f"c{i}", prompt=5, max_tokens=8) for i in range(2)])
    batcher.require_possible([make_spec("c0", prompt=5, max_tokens=8), make_spec("c1", prompt=4, max_tokens=1)])


# ------------------------------------------------------------------------------------------ taking blocks


def two_that_need_six_of_five(depth: int = 0, **second: Any) -> Batcher:
    """`a` and `b` of 4 + 8 tokens each, three blocks each at the end."""
    batcher = make_batcher(num_blocks=5, depth=depth)
    batcher.reserve(make_spec("a", prompt=4, max_tokens=9))
    batcher.reserve(make_spec("b", prompt=4, max_tokens=9, **second))
    return batcher


def test_the_newest_gives_way_and_goes_on_by_itself() -> None:
    batcher = two_that_need_six_of_five()
    updates = run_dry(batcher, next_token)
    assert [(u.seq_id, u.event) for u in updates if u.event] == [("b", "preempted"), ("b", "resumed")]
    for seq_id in "ab":
        own = [u for u in updates if u.seq_id == seq_id and u.token_ids]
        # every token once and in order
        assert [u.first_seq for u in own] == list(range(len(own)))
        tokens = [t for u in own for t in u.token_ids]
        assert tokens == [next_token(seq_id, 4 + i) for i in range(len(tokens))]
    ends = {u.seq_id: u.totals for u in updates if u.finish}
    assert ends["a"] is not None
    assert ends["b"] is not None
    assert (ends["a"].preemptions, ends["a"].wasted_tokens) == (0, 0)
    assert ends["b"].preemptions == 1
    # computed twice: its prompt and the outputs fed back in before
    assert ends["b"].wasted_tokens == 8
    needed = 4 + ends["b"].completion_tokens - 1
    assert ends["b"].computed_tokens == needed + ends["b"].wasted_tokens
    assert batcher.gauges().preemptions == 1
    assert batcher.is_idle


def test_a_lower_class_gives_way_before_a_newer_sequence() -> None:
    batcher = make_batcher(num_blocks=5)
    batcher.reserve(make_spec("old", prompt=4, max_tokens=9, klass="batch"))
    batcher.reserve(make_spec("new", prompt=4, max_tokens=9, klass="interactive"))
    events = [(u.seq_id, u.event) for u in run_dry(batcher) if u.event]
    assert events == [("old", "preempted"), ("old", "resumed")]


def test_the_tokens_of_steps_in_flight_still_count() -> None:
    batcher = two_that_need_six_of_five(depth=1)
    flying = [batcher.plan(), batcher.plan()]
    seen: list[SequenceUpdate] = []
    while batcher.gauges().preemptions == 0:
        plan = flying.pop(0)
        assert plan is not None
        held = used(batcher)[0]
        seen += batcher.commit(output_of(plan, fifty))
        batcher.check()
        if held == 5 and batcher.gauges().preemptions == 0:
            assert used(batcher) == [5]  # not before its last step has ended
        flying.append(batcher.plan())
        flying = [p for p in flying if p is not None]
    made = [u.first_seq for u in seen if u.seq_id == "b" and u.token_ids]
    # four prompt tokens, then one token per slot that was there: eight slots make five tokens
    assert made == [0, 1, 2, 3, 4]
    assert batcher.outputs("b") == (50,) * 5


def test_reservations_that_have_not_begun_go_first_and_cost_nothing() -> None:
    batcher = make_batcher(num_blocks=6, token_budget=9, max_num_seqs=8)
    batcher.reserve(make_spec("a", prompt=4, max_tokens=17))
    step(batcher)
    batcher.reserve(make_spec("w", prompt=8, max_tokens=1, await_kv=True))  # waits for a hand-off nobody has begun
    while not (updates := [u for u in step(batcher) if u.event]):
        pass
    assert [(u.seq_id, u.event) for u in updates] == [("w", "revoked")]
    assert batcher.gauges().preemptions == 0
    assert not batcher.kv_received("w", 4), "there is nowhere to put it"
    assert batcher.release("w")
    end = next(u for u in run_dry(batcher) if u.seq_id == "w" and u.finish)
    assert end.totals is not None
    assert (end.totals.preemptions, end.totals.wasted_tokens, end.totals.computed_tokens) == (0, 0, 8)


def test_one_that_has_not_begun_counts_as_cached_what_it_finds_when_it_begins() -> None:
    batcher = make_batcher(num_blocks=8, token_budget=9, max_num_seqs=8)
    batcher.reserve(make_spec("first", prompt=8, max_tokens=1, tenant=TenantId("t")))
    [tags] = tag_all(batcher, run_dry(batcher))
    batcher.reserve(make_spec("w", prompt=9, max_tokens=1, await_kv=True, tags=(tuple(tags),)))
    assert batcher.preempt("w")
    assert not batcher.preempt("w")
    assert batcher.gauges().preemptions == 0
    batcher.purge(TenantId("t"), ScopeGeneration(1))
    batcher.zeroed(batcher.take_blocks_to_zero())
    batcher.release("w")
    end = next(u for u in run_dry(batcher) if u.finish)
    assert end.totals is not None
    assert (end.totals.cached_tokens, end.totals.computed_tokens, end.totals.wasted_tokens) == (0, 9, 0)


def test_pinned_blocks_are_never_taken_and_the_last_that_could_run_waits_for_them() -> None:
    batcher = make_batcher(num_blocks=5)
    batcher.reserve(make_spec("a", prompt=4, max_tokens=17))
    batcher.reserve(make_spec("h", prompt=5, max_tokens=1, await_kv=True))
    assert batcher.pin("h")
    run_dry(batcher)
    assert not batcher.is_idle
    assert batcher.gauges().preemptions == 0
    assert used(batcher) == [5]
    # the pull ends, and its sequence is one like the others
    batcher.kv_received("h", 4)
    batcher.release("h")
    batcher.unpin("h")
    ended = [u.seq_id for u in run_dry(batcher) if u.finish]
    assert sorted(ended) == ["a", "h"]
    assert batcher.is_idle


@pytest.mark.parametrize("end", ["length", "cancel"])
def test_blocks_that_come_back_when_steps_end_are_waited_for(end: str) -> None:
    batcher = make_batcher(num_blocks=4, depth=1)
    batcher.reserve(make_spec("a", prompt=4, max_tokens=5))  # two blocks, all it can need
    batcher.reserve(make_spec("b", prompt=4, max_tokens=9))  # three in the end
    plans: list[StepPlan] = []
    updates: list[SequenceUpdate] = []
    while batcher._sequences["b"].num_computed_tokens < 8:
        while (plan := batcher.plan()) is not None:
            plans.append(plan)
        if batcher._sequences["b"].num_computed_tokens < 8:
            updates += batcher.commit(output_of(plans.pop(0), fifty))
    if end == "cancel":
        batcher.cancel("a")
    assert used(batcher) == [4]
    while plans:
        updates += batcher.commit(output_of(plans.pop(0), fifty))
        plans += [plan for plan in iter(batcher.plan, None) if plan is not None]
        batcher.check()
    assert [u.event for u in updates if u.event] == []
    assert {u.seq_id for u in updates if u.finish} == ({"a", "b"} if end == "length" else {"b"})
    assert batcher.is_idle


def test_what_is_still_cached_is_shared_again_with_generated_blocks_among_it() -> None:
    batcher = two_that_need_six_of_five()
    seen: list[SequenceUpdate] = []
    while batcher.gauges().preemptions == 0:
        news = step(batcher)
        tag_all(batcher, [u for u in news if u.seq_id == "b"])
        seen += news
    before = len(batcher.outputs("b"))
    batcher.cancel("a")
    plan = batcher.plan()
    # both full blocks of four prompt tokens and four outputs were found; the newest token is computed anew
    assert shape(plan) == [("b", 8, before - 4)]
    assert plan is not None
    assert plan.sequences[0].stored_from == 8
    end = next(u for u in [*batcher.commit(output_of(plan)), *run_dry(batcher)] if u.finish)
    assert end.totals is not None
    assert (end.totals.cached_tokens, end.totals.wasted_tokens) == (0, 0)


def test_purged_blocks_are_not_found_again_and_a_purge_reaches_those_that_were_taken() -> None:
    batcher = two_that_need_six_of_five(tenant=TenantId("t"))
    tags: list[BlockTag] = []
    while batcher.gauges().preemptions == 0:
        tags += tag_all(batcher, [u for u in step(batcher) if u.seq_id == "b"])[0]
    assert len(tags) == 2
    blocks = batcher.purge(TenantId("t"), ScopeGeneration(1))
    dirty = batcher.take_blocks_to_zero()
    assert len(dirty) == 2
    batcher.zeroed(dirty)
    assert batcher.pool.num_purged(blocks) == 0
    assert batcher.pool.groups[0].match(tags, range(99)) == []
    batcher.check()


def test_a_preempted_sequence_can_be_cancelled_finished_and_replayed() -> None:
    for how in ("cancel", "finish"):
        batcher = two_that_need_six_of_five()
        while batcher.gauges().preemptions == 0:
            step(batcher)
        assert batcher.gauges().preempted == 1
        tokens = batcher.outputs("b")
        assert len(tokens) == 5
        totals = batcher.cancel("b") if how == "cancel" else batcher.finish("b", 2)
        assert totals is not None
        kept = tokens if how == "cancel" else tokens[:2]
        assert (totals.completion_tokens, totals.checksum) == (len(kept), completion_checksum(kept))
        assert not batcher.holds("b")
        run_dry(batcher)
        assert batcher.is_idle


def test_newcomers_wait_behind_preempted_ones_of_their_class_and_are_counted_when_they_pass_lower_ones() -> None:
    batcher = make_batcher(num_blocks=6)
    batcher.reserve(make_spec("a", prompt=4, max_tokens=13, klass="analysis"))
    batcher.reserve(make_spec("b", prompt=8, max_tokens=9, klass="batch"))
    while batcher.gauges().preemptions == 0:
        step(batcher)
    assert batcher.gauges().held_back == (1 + 4,)  # one for `a` to grow into, four for `b` to come back to
    with pytest.raises(NoBlocks, match="wait"):
        batcher.reserve(make_spec("c", prompt=1, max_tokens=1, klass="batch"))
    for i in range(PASSES):
        batcher.reserve(make_spec(f"i{i}", prompt=1, max_tokens=1))
        batcher.cancel(f"i{i}")
    with pytest.raises(NoBlocks, match="wait"):
        batcher.reserve(make_spec("late", prompt=1, max_tokens=1))


def test_a_step_that_fails_ends_what_was_leaving() -> None:
    batcher = two_that_need_six_of_five(depth=1)
    plans: list[StepPlan | None] = [batcher.plan(), batcher.plan()]
    while not any(seq.leaving for seq in batcher._sequences.values()):
        plan = plans.pop(0)
        assert plan is not None
        batcher.commit(output_of(plan))
        plans.append(batcher.plan())
        plans = [p for p in plans if p is not None]
    assert plans[0] is not None
    updates = batcher.fail_step(plans[0].step, "boom")
    assert {u.seq_id for u in updates if u.finish == "error"} >= {"b"}
    assert batcher.gauges().preemptions == 0
    batcher.check()


# ------------------------------------------------------------------------------------------ everything ends


@dataclass
class Run:
    """Serve `specs` in order, each as soon as it is let in, until all have ended."""

    batcher: Batcher
    specs: list[SequenceSpec]
    tokens: dict[str, list[int]] = field(default_factory=dict)
    preemptions: dict[str, int] = field(default_factory=dict)
    revoked: int = 0
    ended: list[str] = field(default_factory=list)

    def take(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            tokens = self.tokens.setdefault(update.seq_id, [])
            if update.token_ids:
                assert update.first_seq == len(tokens), "a token came twice, or was lost"
            tokens += update.token_ids
            self.revoked += update.event == "revoked"
            tag_all(self.batcher, [update] if sum(update.seq_id.encode()) % 2 else [])
            if update.finish:
                assert update.totals is not None
                assert update.totals.completion_tokens == len(tokens)
                assert update.totals.checksum == completion_checksum(tokens)
                self.preemptions[update.seq_id] = update.totals.preemptions
                self.ended.append(update.seq_id)

    def serve(self, limit: int = 5000) -> None:
        waiting, flying = list(self.specs), list[StepPlan]()
        for turn in range(limit):
            while waiting:
                try:
                    self.batcher.reserve(waiting[0])
                except (NoBlocks, NoSlot):
                    break
                waiting.pop(0)
            self.take(self.batcher.take_updates())
            while (plan := self.batcher.plan(float(turn))) is not None:
                flying.append(plan)
            self.batcher.check()
            if not flying and self.batcher.wait_s(float(turn)) < 10:
                continue  # a dynamic batch gathers
            if not flying:
                assert not waiting, "newcomers wait, and nothing runs"
                assert self.batcher.is_idle, "sequences live, and nothing can run"
                return
            self.take(self.batcher.commit(output_of(flying.pop(0), next_token)))
            self.batcher.check()
        raise AssertionError(f"not at an end after {limit} steps")


shapes = st.lists(
    st.tuples(st.integers(1, 14), st.integers(1, 26), st.sampled_from(["interactive", "analysis", "batch"])),
    min_size=1,
    max_size=9,
)


def specs_of(shapes: list[tuple[int, int, str]], num_blocks: int) -> list[SequenceSpec]:
    made = []
    for i, (prompt, max_tokens, klass) in enumerate(shapes):
        max_tokens = min(max_tokens, num_blocks * BLOCK - prompt + 1)
        made.append(make_spec(f"s{i}", prompt, max_tokens, klass=klass))
    return made


@settings(max_examples=200, deadline=None)
@example([(4, 9, "batch"), (4, 9, "interactive")], 5, 1, "continuous", 1, 6)
@example([(1, 26, "batch")] * 6, 7, 1, "static", 2, 6)
# the last of a batch waits for blocks that reservations of the next batch hold
@example([(1, 1, "batch"), (5, 9, "batch"), (7, 8, "batch"), (8, 6, "batch"), (5, 9, "batch")], 7, 0, "static", 1, 6)
@example([(1, 26, "batch"), (3, 20, "batch"), (2, 9, "analysis"), (1, 9, "interactive")], 40, 1, "continuous", 1, 2)
@given(
    shapes, st.integers(4, 12), st.integers(0, 1), st.sampled_from(BATCHING), st.integers(1, 2), st.sampled_from([2, 6])
)
def test_every_sequence_makes_its_tokens_and_none_is_preempted_for_ever(
    drawn: list[tuple[int, int, str]], num_blocks: int, depth: int, batching: Any, groups: int, most: int
) -> None:
    batcher = make_batcher(
        num_blocks=num_blocks,
        groups=groups,
        depth=depth,
        max_num_seqs=most,
        token_budget=9,
        quantum=3,
        batching=batching,
        batch_size=3,
        batch_window_s=2.0,
    )
    run = Run(batcher, specs_of(drawn, num_blocks))
    run.serve()
    assert sorted(run.ended) == sorted(spec.seq_id for spec in run.specs)
    for spec in run.specs:
        tokens = run.tokens[spec.seq_id]
        assert tokens == [next_token(spec.seq_id, spec.num_prompt_tokens + i) for i in range(len(tokens))]
    check_bound(run)
    assert used(batcher) == [0] * groups


def crowd() -> Run:
    """Long decodes, and prompts of a lower class that take many steps to compute and to compute again."""
    batcher = make_batcher(num_blocks=9, depth=1, token_budget=9, chunk_size=1)
    low, high = "batch", "interactive"
    shapes = [(4, 15, high), (2, 18, low), (16, 3, low), (8, 21, high), (7, 12, low), (13, 8, high), (4, 5, high)]
    return Run(
        batcher,
        [
            make_spec(f"s{i}", prompt, sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True), klass=klass)
            for i, (prompt, max_tokens, klass) in enumerate(shapes)
        ],
    )


def check_bound(run: Run) -> None:
    """Each stay but the first makes a block."""
    for seq_id, count in run.preemptions.items():
        assert count <= 1 + len(run.tokens[seq_id]) // BLOCK, f"{seq_id}: preempted {count} times"


def test_a_crowd_in_a_small_pool_preempts_often_and_still_ends() -> None:
    run = crowd()
    run.serve()
    assert len(run.ended) == 7
    assert sum(run.preemptions.values()) >= 3
    check_bound(run)


@pytest.mark.parametrize("mutation", ["never spared", "blocks kept", "tokens lost", "left under a step"])
def test_a_rule_taken_away_is_noticed(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Sequence.vacate

    def keep(self: Sequence) -> None:
        tables = self.tables
        real(self)
        self.tables = tables

    def lose(self: Sequence) -> None:
        real(self)
        del self.tokens[self.spec.num_prompt_tokens :]

    def at_once(self: BlockRoom, seq: Sequence) -> bool:
        flying, seq.steps_in_flight = seq.steps_in_flight, 0
        over = real_let_go(self, seq)
        seq.steps_in_flight = flying
        return over

    real_let_go = BlockRoom.let_go
    if mutation == "never spared":
        monkeypatch.setattr(Sequence, "spared", property(lambda self: False))
    elif mutation == "blocks kept":
        monkeypatch.setattr(Sequence, "vacate", keep)
    elif mutation == "tokens lost":
        monkeypatch.setattr(Sequence, "vacate", lose)
    else:
        monkeypatch.setattr(BlockRoom, "let_go", at_once)

    def serve() -> None:
        run = crowd()
        run.serve()
        check_bound(run)

    with pytest.raises((AssertionError, ValueError, KeyError)):
        serve()
