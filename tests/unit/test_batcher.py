"""The batcher: planning, committing, ending, and its invariants under random use."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import FlakyFailure
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from shared.contracts.ids import BlockTag, TenantId
from shared.contracts.sampling import SamplingParams
from shared.contracts.tokens import completion_checksum
from shared.engine.batcher import Batcher, NoSlot
from shared.engine.batcher_config import BatcherConfig
from shared.engine.block_room import NeverFits, NoBlocks
from shared.engine.sequence import Sequence
from shared.engine.sequence_spec import SequenceSpec
from shared.engine.sequence_update import SequenceUpdate
from shared.engine.step_plan import IN_FLIGHT, StepOutput, StepPlan
from shared.kv.layout import LayerGroup, PoolLayout

EOS = 7
Tokens = Callable[[str, int], int]
BLOCK = 4


def make_batcher(num_blocks: int = 64, groups: int = 1, **config: Any) -> Batcher:
    group = LayerGroup(name="full", layers=(0,), num_kv_heads=1, head_dim=8, block_size=BLOCK, dtype="float32")
    defaults: dict[str, Any] = {"token_budget": 32, "max_num_seqs": 8, "depth": 0}
    return Batcher(PoolLayout((group,) * groups, (num_blocks,) * groups), BatcherConfig(**defaults | config))


def make_spec(seq_id: str = "a", prompt: int = 6, max_tokens: int = 4, **fields: Any) -> SequenceSpec:
    fields.setdefault("token_ids", tuple(range(100, 100 + prompt)))
    fields.setdefault("num_prompt_tokens", prompt)
    sampling = fields.pop("sampling", SamplingParams(max_tokens=max_tokens))
    return SequenceSpec(seq_id=seq_id, sampling=sampling, eos_token_ids=frozenset({EOS}), **fields)


def next_token(seq_id: str, position: int) -> int:
    """A made-up model whose token depends on the sequence and the position only; now and then it ends."""
    return 8 + (sum(seq_id.encode()) + position * 5) % 11 if (sum(seq_id.encode()) + position) % 9 else EOS


def output_of(
    plan: StepPlan, tokens: Tokens = next_token, bad_rows: frozenset[int] = frozenset(), repeats: int = 1
) -> StepOutput:
    """What a runner answers: a token where one is sampled, none after a bad row. A stretch ends where a row does."""
    steps = [
        tuple(tokens(row.seq_id, row.start + len(row.token_ids) + n) for row in plan.sequences) for n in range(repeats)
    ]
    over = next((n for n, drawn in enumerate(steps, start=1) if not plan.ending.isdisjoint(drawn)), repeats)
    sampled = tuple(
        tuple(drawn[i] for drawn in steps[:over]) if row.sampling is not None and i not in bad_rows else ()
        for i, row in enumerate(plan.sequences)
    )
    return StepOutput(plan.step, sampled, bad_rows, repeats=over)


def constant(token_id: int) -> Tokens:
    return lambda seq_id, position: token_id


fifty = constant(50)


def shape(plan: StepPlan | None) -> list[tuple[str, int, int]]:
    """(sequence, start, tokens) per row."""
    return [(row.seq_id, row.start, len(row.token_ids)) for row in plan.sequences] if plan else []


def step(batcher: Batcher, tokens: Tokens = fifty) -> list[SequenceUpdate]:
    plan = batcher.plan()
    assert plan is not None
    return batcher.commit(output_of(plan, tokens))


def run_dry(batcher: Batcher, tokens: Tokens = fifty) -> list[SequenceUpdate]:
    """Drive the batcher as the engine does, keeping depth + 1 steps in flight, until nothing runs."""
    updates: list[SequenceUpdate] = []
    flying: list[StepPlan] = []
    while True:
        while (plan := batcher.plan()) is not None:
            flying.append(plan)
        batcher.zeroed(batcher.take_blocks_to_zero())
        if not flying:
            return updates + batcher.take_updates()
        updates += batcher.commit(output_of(flying.pop(0), tokens))
        batcher.check()


def tag_all(batcher: Batcher, updates: list[SequenceUpdate]) -> list[list[BlockTag]]:
    """Tag completed blocks with their position and content, as an index would for one prompt."""
    tags: list[list[BlockTag]] = [[] for _ in batcher.pool.groups]
    for update in updates:
        for group, blocks in enumerate(update.completed):
            for block in blocks:
                tag = BlockTag(repr((block.position, block.token_ids)).encode())
                batcher.tag(group, block.block_id, block.generation, tag, block.token_ids)
                tags[group].append(tag)
    return tags


def used(batcher: Batcher) -> list[int]:
    return [counts.used for counts in batcher.pool.counts]


# ------------------------------------------------------------------------------------------ planning


def test_a_prompt_is_chunked_and_then_decoded() -> None:
    batcher = make_batcher(chunk_size=4)
    batcher.reserve(make_spec(prompt=10, max_tokens=3))
    rows = []
    while (plan := batcher.plan()) is not None:
        rows.append((plan.sequences[0].start, len(plan.sequences[0].token_ids), plan.sequences[0].num_logits))
        [update] = batcher.commit(output_of(plan, constant(50)))
    assert rows == [(0, 4, 0), (4, 4, 0), (8, 2, 1), (10, 1, 1), (11, 1, 1)]
    assert update.finish == "length"
    assert update.first_seq == 2
    assert update.token_ids == (50,)
    assert batcher.is_idle
    batcher.check()


def test_decodes_come_first_and_chunks_fill_the_rest_of_the_budget() -> None:
    batcher = make_batcher(token_budget=9)
    batcher.reserve(make_spec("a", prompt=3))
    step(batcher)
    batcher.reserve(make_spec("b", prompt=5))
    batcher.reserve(make_spec("c", prompt=9))
    plan = batcher.plan()
    assert shape(plan) == [("a", 3, 1), ("b", 0, 5), ("c", 0, 3)]
    assert plan is not None
    assert plan.num_tokens == 9


def test_one_step_ahead_uses_a_placeholder_and_stops_at_max_tokens() -> None:
    batcher = make_batcher(depth=1)
    batcher.reserve(make_spec(prompt=4, max_tokens=2))
    first, second = batcher.plan(), batcher.plan()
    assert first is not None
    assert second is not None
    assert second.sequences[0].token_ids == (IN_FLIGHT,)
    assert second.sequences[0].start == 4
    batcher.commit(output_of(first, constant(50)))
    # both tokens are on their way: nothing to plan although one step slot is free
    assert batcher.plan() is None
    [update] = batcher.commit(output_of(second, constant(51)))
    assert (update.first_seq, update.token_ids, update.finish) == (1, (51,), "length")
    assert update.totals is not None
    assert update.totals.wasted_tokens == 0
    assert batcher.is_idle


def test_depth_bounds_the_steps_in_flight() -> None:
    for depth in (0, 1, 2):
        batcher = make_batcher(depth=depth)
        batcher.reserve(make_spec(max_tokens=9))
        plans = list(iter(batcher.plan, None))
        assert len(plans) == depth + 1
        assert [plan.step for plan in plans] == list(range(1, depth + 2))
        batcher.check()


def test_tenants_share_prompt_tokens_by_weight_and_each_is_first_come_first_served() -> None:
    batcher = make_batcher(num_blocks=1000, token_budget=12, max_num_seqs=8, quantum=4)
    for i in range(3):
        batcher.reserve(make_spec(f"big-{i}", prompt=200, tenant=TenantId("big")))
    batcher.reserve(make_spec("small", prompt=200, tenant=TenantId("small")))
    batcher.reserve(make_spec("paid", prompt=200, tenant=TenantId("paid"), weight=2.0))
    computed: dict[str, int] = {}
    for _ in range(16):
        plan = batcher.plan()
        assert plan is not None
        assert plan.num_tokens == 12
        for seq_id, _start, count in shape(plan):
            computed[seq_id] = computed.get(seq_id, 0) + count
        batcher.commit(output_of(plan))
    # 192 tokens over weights 1 : 1 : 2, within one turn
    assert computed["big-0"] == pytest.approx(48, abs=8)
    assert computed["small"] == pytest.approx(48, abs=8)
    assert computed["paid"] == pytest.approx(96, abs=8)
    assert "big-1" not in computed


def test_a_late_tenant_is_not_starved_by_a_flood() -> None:
    batcher = make_batcher(num_blocks=4000, token_budget=70, max_num_seqs=64, quantum=32)
    for i in range(60):
        batcher.reserve(make_spec(f"flood-{i}", prompt=64, tenant=TenantId("flood")))
    step(batcher, next_token)
    batcher.reserve(make_spec("late", prompt=40, tenant=TenantId("late")))
    steps = 0
    while not any(u.seq_id == "late" and u.token_ids for u in step(batcher, next_token)):
        steps += 1
        assert steps < 4


# ------------------------------------------------------------------------------------------ reserving


def test_refusals_are_typed_and_reserve_nothing() -> None:
    batcher = make_batcher(num_blocks=5, max_num_seqs=2)
    with pytest.raises(NeverFits):
        batcher.reserve(make_spec("a", prompt=18, max_tokens=4))
    batcher.reserve(make_spec("a", prompt=9, max_tokens=4))  # 12 slots, 3 blocks
    with pytest.raises(NoBlocks):
        batcher.reserve(make_spec("b", prompt=9, max_tokens=4))
    with pytest.raises(ValueError, match="held already"):
        batcher.reserve(make_spec("a"))
    batcher.reserve(make_spec("b", prompt=5, max_tokens=4))
    with pytest.raises(NoSlot):
        batcher.reserve(make_spec("c", prompt=1, max_tokens=1))
    assert used(batcher) == [5]
    batcher.check()


def test_the_last_sampled_token_needs_no_slot() -> None:
    batcher = make_batcher(num_blocks=2)
    batcher.reserve(make_spec(prompt=5, max_tokens=4))  # 8 slots for 9 tokens
    assert len(run_dry(batcher)) == 4


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": ()},
        {"weight": 0.0},
        {"max_tokens": 0},
        {"num_prompt_tokens": 2, "max_tokens": 4},
        {"num_prompt_tokens": 7},
        {"compute_only": True, "await_kv": True},
    ],
)
def test_impossible_specs_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"token|weight|wait|sample"):
        make_spec(**fields)


def test_a_config_without_room_for_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match="budget"):
        BatcherConfig(token_budget=8, max_num_seqs=8)
    with pytest.raises(ValueError, match="depth"):
        BatcherConfig(depth=-1)


def test_a_cached_prefix_is_shared_but_never_the_last_token() -> None:
    batcher = make_batcher(groups=2)
    batcher.reserve(make_spec("a", prompt=8, max_tokens=2))
    [tags, same] = tag_all(batcher, run_dry(batcher))
    assert len(tags) == len(same) == 2
    for prompt, cached in ((8, 4), (9, 8), (4, 0), (5, 4)):
        spec = make_spec(f"p{prompt}", prompt=prompt, max_tokens=1, tags=(tuple(tags),) * 2)
        reservation = batcher.reserve(spec)
        assert reservation.num_cached_tokens == cached
        assert [table.num_shared for table in reservation.tables] == [cached // BLOCK] * 2
        plan = batcher.plan()
        assert shape(plan) == [(spec.seq_id, cached, prompt - cached)]
        assert plan is not None
        assert plan.sequences[0].stored_from == cached
        [update] = batcher.commit(output_of(plan))
        # shared blocks are nobody's news
        assert all(block.position >= cached // BLOCK for block in update.completed[0])
    assert batcher.is_idle


def test_resume_goes_on_counting() -> None:
    batcher = make_batcher()
    batcher.reserve(make_spec(token_ids=(1, 2, 3, 50, 51), num_prompt_tokens=3, max_tokens=4))
    updates = run_dry(batcher)
    assert [(u.first_seq, u.token_ids) for u in updates] == [(2, (50,)), (3, (50,))]
    totals = updates[-1].totals
    assert totals is not None
    assert (totals.prompt_tokens, totals.completion_tokens, totals.computed_tokens) == (3, 4, 6)
    assert totals.checksum == completion_checksum((50, 51, 50, 50))


# ------------------------------------------------------------------------------------------ ends


def test_eos_ends_with_stop_and_the_row_in_flight_is_dropped() -> None:
    batcher = make_batcher(depth=1)
    batcher.reserve(make_spec(prompt=4, max_tokens=8))
    first, second = batcher.plan(), batcher.plan()
    assert first is not None
    assert second is not None
    [update] = batcher.commit(output_of(first, constant(EOS)))
    assert (update.token_ids, update.finish) == ((EOS,), "stop")
    assert update.totals is not None
    assert (update.totals.completion_tokens, update.totals.computed_tokens, update.totals.wasted_tokens) == (1, 5, 1)
    assert used(batcher) == [2]  # fenced behind the second step
    assert batcher.plan() is None
    assert batcher.commit(output_of(second, constant(50))) == []
    assert batcher.is_idle
    assert used(batcher) == [0]


def test_ignore_eos_runs_to_max_tokens() -> None:
    batcher = make_batcher()
    batcher.reserve(make_spec(sampling=SamplingParams(max_tokens=3, ignore_eos=True)))
    assert run_dry(batcher, constant(EOS))[-1].finish == "length"


def test_finish_truncates_and_books_the_rest_as_waste() -> None:
    batcher = make_batcher(depth=1)
    batcher.reserve(make_spec(prompt=4, max_tokens=20))
    flying = [batcher.plan(), batcher.plan()]
    for token_id in (50, 51, 52, 53):
        plan = flying.pop(0)
        assert plan is not None
        batcher.commit(output_of(plan, constant(token_id)))
        flying.append(batcher.plan())
    assert batcher.outputs("a") == (50, 51, 52, 53)
    totals = batcher.finish("a", 2)
    assert totals is not None
    assert totals.completion_tokens == 2
    assert totals.checksum == completion_checksum((50, 51))
    # computed: 4 prompt + 5 decode rows, two of them in flight; needed for two tokens: 4 + 1
    assert (totals.computed_tokens, totals.wasted_tokens) == (9, 4)
    assert not batcher.is_idle
    for plan in flying:
        assert plan is not None
        assert batcher.commit(output_of(plan)) == []
    assert batcher.is_idle
    assert batcher.finish("a", 1) is None


def test_cancel_frees_at_once_when_nothing_is_in_flight_and_is_fenced_otherwise() -> None:
    batcher = make_batcher()
    batcher.reserve(make_spec())
    assert batcher.cancel("a") is not None
    assert batcher.is_idle
    assert batcher.cancel("a") is None
    batcher.reserve(make_spec())
    plan = batcher.plan()
    assert plan is not None
    batcher.cancel("a")
    assert used(batcher) == [3]
    batcher.check()
    batcher.commit(output_of(plan))
    assert batcher.is_idle


def test_a_purge_zeroes_what_was_cached_and_what_was_running() -> None:
    batcher = make_batcher(num_blocks=8)
    batcher.reserve(make_spec("a", prompt=8, max_tokens=2))
    [tags] = tag_all(batcher, run_dry(batcher))
    batcher.reserve(make_spec("b", prompt=9, max_tokens=4, tags=(tuple(tags),)))
    assert batcher.forget(0, tags) == 2
    assert batcher.take_blocks_to_zero() == ()  # b still reads them
    batcher.cancel("b", wipe=True)
    dirty = batcher.take_blocks_to_zero()
    assert len(dirty) == 3
    batcher.zeroed(dirty)
    assert [counts.free for counts in batcher.pool.counts] == [8]
    assert set(batcher.drain_events()[0].removed) == set(tags)


def test_breaking_the_fence_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # mutation: blocks are freed at once, although a step in flight still names them
    monkeypatch.setattr(Sequence, "may_be_freed", property(lambda self: bool(self.finish)))
    batcher = make_batcher()
    batcher.reserve(make_spec())
    batcher.plan()
    batcher.cancel("a")
    with pytest.raises(AssertionError, match="freed under a step in flight"):
        batcher.check()


def test_rows_that_are_not_finite_end_with_error_and_their_blocks_are_zeroed_first() -> None:
    batcher = make_batcher(num_blocks=8, depth=1)
    batcher.reserve(make_spec("bad", prompt=8, max_tokens=4))
    batcher.reserve(make_spec("good", prompt=4, max_tokens=4))
    first, second = batcher.plan(), batcher.plan()
    assert first is not None
    assert second is not None
    row = [r.seq_id for r in first.sequences].index("bad")
    updates = batcher.commit(output_of(first, constant(50), bad_rows=frozenset({row})))
    ends = {u.seq_id: u for u in updates}
    assert ends["bad"].finish == "error"
    assert ends["bad"].completed == ((),)
    assert ends["good"].finish == ""
    assert batcher.take_blocks_to_zero() == ()  # the second step still names them
    batcher.commit(output_of(second, constant(50)))
    dirty = batcher.take_blocks_to_zero()
    assert len(dirty) == 3
    with pytest.raises(NoBlocks):
        batcher.reserve(make_spec("next", prompt=21, max_tokens=4))
    batcher.check()
    batcher.zeroed(dirty)
    batcher.reserve(make_spec("next", prompt=21, max_tokens=4))
    batcher.check()


def test_a_shared_prefix_outlives_the_bad_rows_of_one_reader() -> None:
    batcher = make_batcher()
    batcher.reserve(make_spec("a", prompt=8, max_tokens=2))
    [tags] = tag_all(batcher, run_dry(batcher))
    batcher.reserve(make_spec("bad", prompt=9, max_tokens=2, tags=(tuple(tags),)))
    plan = batcher.plan()
    assert plan is not None
    batcher.commit(output_of(plan, bad_rows=frozenset({0})))
    assert len(batcher.take_blocks_to_zero()) == 1
    assert batcher.reserve(make_spec("c", prompt=9, tags=(tuple(tags),))).num_cached_tokens == 8


def test_a_failed_step_ends_its_sequences_only() -> None:
    batcher = make_batcher(token_budget=9, quantum=4)
    batcher.reserve(make_spec("a", prompt=9, tenant=TenantId("x")))
    plan = batcher.plan()
    assert plan is not None
    batcher.reserve(make_spec("b", prompt=9, tenant=TenantId("y")))
    [update] = batcher.fail_step(plan.step, "boom")
    assert (update.seq_id, update.finish, update.detail) == ("a", "error", "boom")
    assert {u.seq_id for u in run_dry(batcher)} == {"b"}
    assert batcher.is_idle


def test_an_output_that_does_not_fit_changes_nothing() -> None:
    batcher = make_batcher()
    batcher.reserve(make_spec())
    plan = batcher.plan()
    assert plan is not None
    for wrong in (StepOutput(1, ()), StepOutput(1, ((),)), StepOutput(2, ((5,),))):
        with pytest.raises(ValueError, match="step"):
            batcher.commit(wrong)
    batcher.check()
    assert batcher.commit(output_of(plan))


def test_what_was_cancelled_under_a_step_is_leaving_until_that_is_done() -> None:
    batcher = make_batcher()
    batcher.reserve(make_spec())
    plan = batcher.plan()
    assert plan is not None
    assert batcher.gauges().leaving == 0
    batcher.cancel("a")
    found = batcher.gauges()
    assert (found.leaving, found.ended, used(batcher) != [0]) == (1, 1, True)
    batcher.commit(output_of(plan))
    assert (batcher.gauges().leaving, used(batcher)) == (0, [0])


# ------------------------------------------------------------------------------------------ hand-off


def test_compute_only_reports_blocks_chunk_by_chunk_and_keeps_them_until_unpinned() -> None:
    batcher = make_batcher(chunk_size=6, depth=1)
    reservation = batcher.reserve(make_spec(prompt=10, compute_only=True))
    zero = batcher.take_blocks_to_zero()
    assert zero == ((0, reservation.tables[0].block_ids[2]),)  # the tail of two tokens
    batcher.zeroed(zero)
    updates = run_dry(batcher)
    assert [[block.position for block in u.completed[0]] for u in updates] == [[0], [1]]
    assert [u.num_computed_tokens for u in updates] == [6, 10]
    assert [u.finish for u in updates] == ["", "computed"]
    assert updates[0].completed[0][0].token_ids == (100, 101, 102, 103)
    assert used(batcher) == [3]
    assert batcher.gauges().ended == 1
    assert batcher.unpin("a")
    assert not batcher.unpin("a")
    assert batcher.is_idle


def test_compute_only_of_what_is_cached_ends_at_once() -> None:
    batcher = make_batcher()
    batcher.reserve(make_spec("a", prompt=8, max_tokens=2))
    [tags] = tag_all(batcher, run_dry(batcher))
    reservation = batcher.reserve(make_spec("b", prompt=8, compute_only=True, tags=(tuple(tags),)))
    assert reservation.num_cached_tokens == 8
    [update] = batcher.take_updates()
    assert (update.finish, update.num_computed_tokens) == ("computed", 8)
    assert batcher.plan() is None
    assert batcher.unpin("b")


def test_cancel_and_failure_release_a_source() -> None:
    batcher = make_batcher()
    for end in ("cancel", "fail", "late"):
        batcher.reserve(make_spec(prompt=8, compute_only=True))
        if end == "fail":
            plan = batcher.plan()
            assert plan is not None
            batcher.fail_step(plan.step, "boom")
        else:
            if end == "late":
                run_dry(batcher)
            batcher.cancel("a")
        assert batcher.is_idle


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_tail_is_held_until_it_is_zeroed(groups: int, together: bool) -> None:
    batcher = make_batcher(groups=groups)
    batcher.reserve(make_spec(prompt=6, compute_only=True))
    blocks = batcher.take_blocks_to_zero()
    assert len(blocks) == groups
    batcher.cancel("a")
    for part in [blocks] if together else [(block,) for block in blocks]:
        assert used(batcher) == [2] * groups
        batcher.check()
        batcher.zeroed(part)
    assert batcher.is_idle
    batcher.check()


def test_handed_off_kv_is_not_computed_again() -> None:
    batcher = make_batcher()
    batcher.reserve(make_spec(prompt=10, max_tokens=2, await_kv=True))
    assert batcher.plan() is None
    assert batcher.gauges().queue_tokens == 0
    assert batcher.kv_received("a", 4)
    assert batcher.kv_received("a", 9)
    with pytest.raises(ValueError, match="at most 9"):
        batcher.kv_received("a", 10)
    assert batcher.release("a")
    assert not batcher.release("a")
    assert not batcher.kv_received("a", 9)
    [pulled] = batcher.take_updates()
    assert [block.position for block in pulled.completed[0]] == [0, 1]
    plan = batcher.plan()
    assert shape(plan) == [("a", 9, 1)]
    assert plan is not None
    assert plan.sequences[0].num_logits == 1
    batcher.commit(output_of(plan, constant(50)))
    totals = run_dry(batcher)[-1].totals
    assert totals is not None
    assert (totals.received_tokens, totals.cached_tokens, totals.computed_tokens) == (9, 0, 2)


def test_a_hand_off_that_stops_half_way_is_finished_here() -> None:
    batcher = make_batcher()
    batcher.reserve(make_spec(prompt=10, max_tokens=1, await_kv=True))
    batcher.kv_received("a", 4)
    batcher.release("a")
    assert shape(batcher.plan()) == [("a", 4, 6)]


def test_a_pull_in_flight_holds_the_blocks_of_a_cancelled_sequence() -> None:
    batcher = make_batcher()
    batcher.reserve(make_spec(await_kv=True))
    assert batcher.pin("a")
    batcher.cancel("a")
    assert used(batcher) == [3]
    assert not batcher.release("a")
    assert batcher.unpin("a")
    assert batcher.is_idle
    assert not batcher.pin("a")


# ------------------------------------------------------------------------------------------ random use


class BatcherMachine(RuleBasedStateMachine):
    """Random arrivals, steps, ends and hand-offs; each sequence must see exactly its own tokens, and all must end."""

    DEPTH, STRETCH_S, NUM_BLOCKS = 1, 0.0, 13

    def __init__(self) -> None:
        super().__init__()
        self.batcher = make_batcher(
            num_blocks=self.NUM_BLOCKS,
            groups=2,
            depth=self.DEPTH,
            max_num_seqs=6,
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
                if update.finish == "error":
                    self.sources.discard(seq_id)
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
        klass=st.sampled_from(["interactive", "batch"]),
        tenant=st.sampled_from(["x", "y"]),
    )
    def reserve(self, prompt: int, max_tokens: int, kind: str, klass: str, tenant: str) -> None:
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
        )
        try:
            self.batcher.reserve(spec)
        except (NeverFits, NoBlocks, NoSlot):
            return
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
                break
            plan = self.flying.pop(0)
            self.take(self.batcher.commit(output_of(plan, repeats=plan.repeats)))


class EagerBatcherMachine(BatcherMachine):
    DEPTH = 0


class StretchingBatcherMachine(BatcherMachine):
    STRETCH_S, NUM_BLOCKS = 1.0, 40


_SETTINGS = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
for _machine in (BatcherMachine, EagerBatcherMachine, StretchingBatcherMachine):
    _machine.TestCase.settings = _SETTINGS
TestOneStepAhead = BatcherMachine.TestCase
TestNoStepAhead = EagerBatcherMachine.TestCase
TestStretches = StretchingBatcherMachine.TestCase


def test_the_machine_finds_a_broken_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    # mutation: a step in flight no longer holds blocks
    monkeypatch.setattr(Sequence, "may_be_freed", property(lambda self: bool(self.finish)))
    mutated = settings(_SETTINGS, database=None, print_blob=False, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises((AssertionError, KeyError, ValueError, FlakyFailure)):
        run_state_machine_as_test(BatcherMachine, settings=mutated)


def test_a_step_is_shared_out_by_tokens_into_seconds_of_prompt_and_of_output() -> None:
    batcher = make_batcher()
    batcher.reserve(make_spec("a", prompt=6, max_tokens=2))
    plan = batcher.plan()
    assert plan is not None
    batcher.commit(replace(output_of(plan, fifty), duration_s=1.0))
    batcher.reserve(make_spec("b", prompt=3, max_tokens=1))
    plan = batcher.plan()
    assert shape(plan) == [("a", 6, 1), ("b", 0, 3)]
    assert plan is not None
    ended = {u.seq_id: u.totals for u in batcher.commit(replace(output_of(plan, fifty), duration_s=8.0))}
    assert ended["a"] is not None
    assert (ended["a"].prefill_s, ended["a"].decode_s) == (1.0, 2.0)
    assert ended["b"] is not None
    assert (ended["b"].prefill_s, ended["b"].decode_s) == (6.0, 0.0)
