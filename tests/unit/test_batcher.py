"""The batcher: planning, reserving, and what ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shared.contracts.ids import ScopeGeneration, TenantId
from shared.contracts.sampling import SamplingParams
from shared.contracts.tokens import completion_checksum
from shared.engine.batcher_config import BatcherConfig
from shared.engine.block_room import NeverFits, NoBlocks, NoSlot
from shared.engine.sequence import Sequence
from shared.engine.step_plan import IN_FLIGHT, StepOutput
from tests.unit.batcher_support import (
    BLOCK,
    EOS,
    constant,
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
    batcher.reserve(make_spec("a", prompt=8, max_tokens=2, tenant=TenantId("t")))
    [tags] = tag_all(batcher, run_dry(batcher))
    batcher.reserve(make_spec("b", prompt=9, max_tokens=4, tags=(tuple(tags),), tenant=TenantId("t")))
    plan = batcher.plan()
    assert plan is not None
    blocks = batcher.purge(TenantId("t"), ScopeGeneration(1))
    tail = batcher.take_blocks_to_zero()
    assert len(tail) == 1  # what the step in flight still reads or writes comes when it has ended
    batcher.zeroed(tail)
    assert batcher.pool.num_purged(blocks) == 3
    batcher.commit(output_of(plan))
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


def test_nobody_finds_the_prefix_of_bad_rows_again_and_who_reads_it_goes_on() -> None:
    batcher = make_batcher()
    batcher.reserve(make_spec("a", prompt=8, max_tokens=2))
    [tags] = tag_all(batcher, run_dry(batcher))
    batcher.reserve(make_spec("bad", prompt=9, max_tokens=2, tags=(tuple(tags),)))
    batcher.reserve(make_spec("other", prompt=9, max_tokens=2, tags=(tuple(tags),)))
    plan = batcher.plan()
    assert plan is not None
    row = [r.seq_id for r in plan.sequences].index("bad")
    ends = {u.seq_id: u.finish for u in batcher.commit(output_of(plan, bad_rows=frozenset({row})))}
    assert ends == {"bad": "error", "other": ""}
    assert len(batcher.take_blocks_to_zero()) == 1, "its own; the prefix is still read"
    assert batcher.reserve(make_spec("c", prompt=9, tags=(tuple(tags),))).num_cached_tokens == 0
    batcher.cancel("c")
    batcher.cancel("other")
    assert len(batcher.take_blocks_to_zero()) == 2, "the prefix, now that nobody reads it"
    batcher.check()


def test_a_sequence_that_is_distrusted_ends_and_its_blocks_are_zeroed() -> None:
    batcher = make_batcher(depth=1)
    batcher.reserve(make_spec("bad", prompt=8, max_tokens=4))
    plan = batcher.plan()
    assert plan is not None
    batcher.distrust("bad")
    [update] = batcher.take_updates()
    assert (update.seq_id, update.finish, update.completed) == ("bad", "error", ((),))
    assert batcher.take_blocks_to_zero() == (), "a step in flight still names them"
    batcher.commit(output_of(plan, constant(50)))
    assert len(batcher.take_blocks_to_zero()) == 3
    batcher.distrust("bad")
    assert batcher.is_idle
    batcher.check()


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
