"""Prompt tokens beside decodes: by the step-time model and the target; without decodes, as many as there may be."""

from __future__ import annotations

import pytest

from shared.contracts.sampling import SamplingParams
from shared.engine.batcher import Batcher, BatcherConfig
from shared.engine.prompt_budget import LEAST, prompt_budget
from shared.engine.sequence import SequenceSpec
from shared.engine.step_plan import StepOutput, StepPlan
from shared.engine.step_time import StepTimeModel
from shared.kv.layout import LayerGroup, PoolLayout

MODEL = StepTimeModel(base_s=0.010, token_s=0.0005, sequence_s=0.0, context_s=1e-7)


def test_the_budget_is_what_the_target_leaves() -> None:
    # 10 ms, 8 decodes of half a millisecond and their context leave 45.9 ms
    assert prompt_budget(MODEL, 0.060, 500, 8, 1000, 0) == 88
    assert prompt_budget(MODEL, 0.060, 80, 8, 1000, 0) == 80
    # a token far along sees more: a third of a millisecond here
    assert prompt_budget(MODEL, 0.060, 500, 8, 1000, 3000) < 88


@pytest.mark.parametrize(("target_s", "decodes"), [(0.0, 8), (0.060, 0)])
def test_without_a_target_or_anybody_who_waits_there_is_no_limit(target_s: float, decodes: int) -> None:
    assert prompt_budget(MODEL, target_s, 500, decodes, 0, 0) == 500


@pytest.mark.parametrize("target_s", [0.001, 0.014, 0.020])
def test_prompts_go_on_where_the_target_cannot_be_kept(target_s: float) -> None:
    assert prompt_budget(MODEL, target_s, 500, 8, 1000, 0) == LEAST
    assert prompt_budget(MODEL, target_s, 40, 8, 1000, 0) == 40


def test_a_model_that_knows_no_cost_sets_no_limit() -> None:
    assert prompt_budget(StepTimeModel(0.0, 0.0, 0.0, 0.0), 0.060, 500, 8, 1000, 0) == 500


@pytest.mark.parametrize("decodes", [1, 3, 8, 31])
def test_the_step_keeps_the_target_and_fills_whole_rows_of_eight(decodes: int) -> None:
    for target_ms in range(50, 150, 7):
        tokens = prompt_budget(MODEL, target_ms / 1000, 500, decodes, 1000, 200)
        if tokens > LEAST:
            context = 1000 + 200 * tokens
            assert MODEL.predict(decodes + tokens, decodes + 1, context) <= target_ms / 1000 + 1e-9
            assert (decodes + tokens) % 8 == 0


def make_batcher(**config: float) -> Batcher:
    group = LayerGroup(name="full", layers=(0,), num_kv_heads=1, head_dim=8, block_size=32, dtype="float32")
    defaults = {"token_budget": 128, "lone_token_budget": 512, "itl_target_s": 0.060, "max_num_seqs": 8, "depth": 0}
    batcher = Batcher(PoolLayout((group,), (200,)), BatcherConfig(**defaults | config))  # type: ignore[arg-type]
    batcher.step_model = MODEL
    return batcher


def reserve(batcher: Batcher, seq_id: str, prompt: int) -> None:
    batcher.reserve(SequenceSpec(seq_id, tuple(range(prompt)), prompt, SamplingParams(max_tokens=50)))


def sizes(batcher: Batcher) -> dict[str, int]:
    """Run the next step; how many tokens of whom."""
    plan = batcher.plan()
    assert isinstance(plan, StepPlan)
    batcher.commit(StepOutput(plan.step, tuple((1,) * row.num_logits for row in plan.sequences)))
    return {row.seq_id: len(row.token_ids) for row in plan.sequences}


def test_a_lone_prompt_takes_large_steps_and_small_ones_beside_a_decode() -> None:
    batcher = make_batcher()
    reserve(batcher, "a", 700)
    assert [sizes(batcher) for _ in range(3)] == [{"a": 512}, {"a": 188}, {"a": 1}]
    reserve(batcher, "b", 1000)
    found = sizes(batcher)
    assert found["a"] == 1
    assert LEAST <= found["b"] < 128
    batcher.step_model = StepTimeModel(0.0, 1e-9, 0.0, 0.0)
    assert sizes(batcher) == {"a": 1, "b": 127}
    batcher.cancel("a")
    assert sizes(batcher) == {"b": 512}


def test_without_either_setting_a_step_is_as_before() -> None:
    batcher = make_batcher(lone_token_budget=0, itl_target_s=0.0)
    reserve(batcher, "a", 200)
    assert [sizes(batcher) for _ in range(2)] == [{"a": 128}, {"a": 72}]
    reserve(batcher, "b", 1000)
    assert sizes(batcher) == {"a": 1, "b": 127}


@pytest.mark.parametrize("field", ["itl_target_s", "lone_token_budget"])
def test_negative_settings_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        make_batcher(**{field: -1})
