"""Choices of one request: one computes the prompt, the others begin behind its full blocks. And prompts that score."""

from __future__ import annotations

import random
from typing import Any

import pytest

from shared.contracts.logprobs import TokenLogprob
from shared.contracts.sampling import SamplingParams
from shared.engine.batcher import Batcher
from shared.engine.block_room import NeverFits
from shared.engine.sequence_update import SequenceUpdate
from shared.engine.step_plan import StepOutput, StepPlan
from tests.unit.batcher_support import BLOCK, fifty, make_batcher, make_spec, output_of, run_dry, tag_all

PROMPT = 3 * BLOCK + 2


def reserve_choices(batcher: Batcher, count: int, prompt: int = PROMPT, **fields: Any) -> None:
    specs = [make_spec(str(i), prompt, follows="" if i == 0 else "0", **fields) for i in range(count)]
    batcher.require_possible(specs)
    for spec in specs:
        batcher.reserve(spec)


def ends(updates: list[SequenceUpdate]) -> dict[str, SequenceUpdate]:
    return {update.seq_id: update for update in updates if update.finish}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("max_tokens", [1, 6])
def test_a_prompt_is_computed_once(groups: int, depth: int, max_tokens: int) -> None:
    batcher = make_batcher(groups=groups, depth=depth, token_budget=9, max_num_seqs=8)
    reserve_choices(batcher, 4, max_tokens=max_tokens)
    ended = ends(run_dry(batcher))
    assert {seq_id: update.finish for seq_id, update in ended.items()} == dict.fromkeys("0123", "length")
    for seq_id, update in ended.items():
        assert update.totals is not None
        shared = 0 if seq_id == "0" else 3 * BLOCK
        assert update.totals.cached_tokens == shared
        assert update.totals.completion_tokens == max_tokens
        # depth 1 may plan a row more behind the end
        assert 0 <= update.totals.computed_tokens - (PROMPT - shared + max_tokens - 1) <= depth
    assert batcher.is_idle


def test_choices_that_share_need_less_room() -> None:
    # three blocks of the prompt once; each choice its tail and one to grow into
    batcher = make_batcher(num_blocks=3 + 4 * 2)
    reserve_choices(batcher, 4)
    assert len(ends(run_dry(batcher))) == 4
    with pytest.raises(NeverFits):
        reserve_choices(make_batcher(num_blocks=3 + 4 * 2 - 1), 4)


def test_a_short_prompt_has_nothing_to_share() -> None:
    batcher = make_batcher()
    reserve_choices(batcher, 3, prompt=BLOCK)
    assert [row.seq_id for row in (batcher.plan() or StepPlan(0, ())).sequences] == ["0", "1", "2"]


def test_followers_of_a_cancelled_choice_compute_the_prompt_themselves() -> None:
    batcher = make_batcher(token_budget=9)
    reserve_choices(batcher, 3)
    plan = batcher.plan()
    assert plan is not None
    assert [row.seq_id for row in plan.sequences] == ["0"]
    batcher.cancel("0")
    batcher.commit(output_of(plan, fifty))
    ended = ends(run_dry(batcher))
    assert {seq_id: (u.totals.cached_tokens if u.totals else None) for seq_id, u in ended.items()} == {"1": 0, "2": 0}


def test_a_follower_can_be_cancelled_before_it_begins() -> None:
    batcher = make_batcher(token_budget=9)
    reserve_choices(batcher, 3)
    totals = batcher.cancel("1")
    assert totals is not None
    assert totals.completion_tokens == 0
    assert set(ends(run_dry(batcher))) == {"0", "2"}


def test_followers_wait_for_kv_that_is_handed_over() -> None:
    batcher = make_batcher()
    batcher.reserve(make_spec("0", PROMPT, await_kv=True))
    batcher.reserve(make_spec("1", PROMPT, follows="0"))
    assert batcher.plan() is None
    batcher.kv_received("0", PROMPT - 1)
    batcher.release("0")
    ended = ends(run_dry(batcher))
    assert ended["1"].totals is not None
    assert ended["1"].totals.cached_tokens == 3 * BLOCK


@pytest.mark.parametrize("seed", range(25))
def test_whatever_happens_blocks_add_up_and_all_end(seed: int) -> None:
    rng = random.Random(seed)
    batcher = make_batcher(num_blocks=rng.choice([12, 16, 30]), depth=rng.choice([0, 1]), token_budget=9)
    reserve_choices(batcher, rng.choice([2, 4]), max_tokens=rng.randint(1, 12))
    if batcher.pool.counts[0].free > 8:
        batcher.reserve(make_spec("x", 5, max_tokens=8))
    flying: list[StepPlan] = []
    for _ in range(400):
        while (plan := batcher.plan()) is not None:
            flying.append(plan)
        batcher.zeroed(batcher.take_blocks_to_zero())
        if rng.random() < 0.1:
            batcher.preempt(rng.choice("0123x"))
        if rng.random() < 0.05:
            batcher.cancel(rng.choice("0123x"))
        if flying:
            plan = flying.pop(0)
            bad = frozenset({0}) if rng.random() < 0.03 else frozenset[int]()
            batcher.commit(output_of(plan, fifty, bad))
        batcher.check()
    assert batcher.is_idle


@pytest.mark.parametrize("budget", [9, 32])
@pytest.mark.parametrize("preempted", [False, True])
def test_every_token_of_a_prompt_but_the_first_is_scored_once(budget: int, preempted: bool) -> None:
    sampling = SamplingParams(max_tokens=3, logprobs=0, prompt_logprobs=2)
    batcher = make_batcher(token_budget=budget)
    batcher.reserve(make_spec("a", 30, sampling=sampling))
    scored: list[float] = []
    own: list[float] = []
    for _ in range(30):
        plan = batcher.plan()
        if plan is None:
            break
        row = plan.sequences[0]
        assert row.num_logits == len(row.scored) + (row.sampling is not None)
        assert row.scored == () or row.score_top == 2
        sampled = (50,) * row.num_sampled
        found = tuple(TokenLogprob(-float(token)) for token in (*row.scored, *sampled))
        updates = batcher.commit(StepOutput(plan.step, (sampled,), logprobs={0: found}))
        scored += [entry.logprob for update in updates for entry in update.prompt_logprobs]
        own += [entry.logprob for update in updates for entry in update.logprobs]
        if preempted and len(scored) >= 9 and not own:
            preempted = not batcher.preempt("a")
    assert scored == [-float(token) for token in range(101, 130)]
    assert own == [-50.0] * 3


@pytest.mark.parametrize("after", [0, 9])
def test_a_prompt_that_others_computed_is_scored_after_a_preemption_too(after: int) -> None:
    batcher = make_batcher(token_budget=9)
    batcher.reserve(make_spec("w", 30))
    tags = tuple(tuple(group) for group in tag_all(batcher, run_dry(batcher)))
    sampling = SamplingParams(max_tokens=3, logprobs=0, prompt_logprobs=2)
    batcher.reserve(make_spec("a", 30, sampling=sampling, tags=tags))
    scored, taken = list[float](), False
    for _ in range(30):
        if len(scored) >= after and not taken:
            taken = batcher.preempt("a")
        if (plan := batcher.plan()) is None:
            break
        sampled = (50,) * plan.sequences[0].num_sampled
        found = tuple(TokenLogprob(-float(token)) for token in (*plan.sequences[0].scored, *sampled))
        updates = batcher.commit(StepOutput(plan.step, (sampled,), logprobs={0: found}))
        scored += [entry.logprob for update in updates for entry in update.prompt_logprobs]
    assert taken
    assert scored == [-float(token) for token in range(101, 130)]
