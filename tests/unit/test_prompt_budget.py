"""Prompt tokens beside decodes: by the step-time model and the target; without decodes, as many as there may be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shared.contracts.parts import ItlTarget
from shared.contracts.sampling import SamplingParams
from shared.engine.batcher import Batcher
from shared.engine.batcher_config import BatcherConfig
from shared.engine.prompt_budget import AUTO_TARGET, LEAST, NO_TARGET, prompt_budget, step_limit_s
from shared.engine.sequence_spec import SequenceSpec
from shared.engine.step_plan import StepOutput, StepPlan
from shared.engine.step_time import StepTimeModel
from shared.kv.layout import LayerGroup, PoolLayout

MODEL = StepTimeModel(base_s=0.010, token_s=0.0005, sequence_s=0.0, context_s=1e-7)


def budget(model: StepTimeModel, target: ItlTarget | float, most: int, decodes: int, context: int, start: int) -> int:
    target = target if isinstance(target, ItlTarget) else ItlTarget(least_s=target)
    return prompt_budget(model, target, most, decodes, 1, context, start)


def test_the_budget_is_what_the_target_leaves() -> None:
    # 10 ms, 8 decodes of half a millisecond and their context leave 45.9 ms
    assert budget(MODEL, 0.060, 500, 8, 1000, 0) == 91
    assert budget(MODEL, 0.060, 80, 8, 1000, 0) == 80
    # a token far along sees more: a third of a millisecond here
    assert budget(MODEL, 0.060, 500, 8, 1000, 3000) < 91


@pytest.mark.parametrize(("target", "decodes"), [(NO_TARGET, 8), (ItlTarget(0.060), 0), (AUTO_TARGET, 0)])
def test_without_a_target_or_anybody_who_waits_there_is_no_limit(target: ItlTarget, decodes: int) -> None:
    assert budget(MODEL, target, 500, decodes, 0, 0) == 500


@pytest.mark.parametrize("target_s", [0.001, 0.014, 0.020])
def test_prompts_go_on_where_the_target_cannot_be_kept(target_s: float) -> None:
    assert budget(MODEL, target_s, 500, 8, 1000, 0) == LEAST
    assert budget(MODEL, target_s, 10, 8, 1000, 0) == 10


def test_rows_that_cost_nothing_are_taken_whatever_the_target() -> None:
    floor = replace(MODEL, floor_s=0.040)
    # 10 ms and 8 decodes leave 26 ms of the floor
    assert budget(floor, 0.001, 500, 8, 1000, 0) == 52
    assert floor.predict(8 + 52, 9, 1000) == floor.predict(8, 8, 1000)


def test_a_model_that_knows_no_cost_sets_no_limit() -> None:
    assert budget(StepTimeModel(0.0, 0.0, 0.0, 0.0), 0.060, 500, 8, 1000, 0) == 500


@pytest.mark.parametrize("floor_s", [0.0, 0.030])
@pytest.mark.parametrize("decodes", [1, 3, 8, 31])
def test_the_step_keeps_the_target_and_one_token_more_would_not(decodes: int, floor_s: float) -> None:
    model = replace(MODEL, floor_s=floor_s)
    for target_ms in range(50, 150, 7):
        tokens = budget(model, target_ms / 1000, 500, decodes, 1000, 200)
        if tokens > LEAST:
            took = [model.predict(decodes + n, decodes + 1, 1000 + 200 * n) for n in (tokens, tokens + 1)]
            assert took[0] <= target_ms / 1000 + 1e-9
            assert took[1] >= target_ms / 1000 - 1e-9


def test_the_automatic_target_follows_the_model_and_the_load() -> None:
    small, large = StepTimeModel(1e-3, 1e-4, 0.0, 0.0), StepTimeModel(0.0, 2e-2, 0.0, 0.0, floor_s=0.4)
    assert step_limit_s(small, AUTO_TARGET, 8, 0) == AUTO_TARGET.least_s
    assert step_limit_s(large, AUTO_TARGET, 1, 0) == pytest.approx(1.075 * 0.4)
    assert step_limit_s(large, AUTO_TARGET, 32, 0) == pytest.approx(3.4 * 0.64)
    # a large model's prompts go on beside decodes in what the floor leaves and more, not by the least
    assert budget(large, AUTO_TARGET, 500, 8, 0, 0) > LEAST


def make_batcher(**config: Any) -> Batcher:
    group = LayerGroup(name="full", layers=(0,), num_kv_heads=1, head_dim=8, block_size=32, dtype="float32")
    defaults = {"token_budget": 128, "lone_token_budget": 512, "itl_target": ItlTarget(0.060), "max_num_seqs": 8}
    batcher = Batcher(PoolLayout((group,), (200,)), BatcherConfig(**{"depth": 0} | defaults | config))
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
    batcher = make_batcher(lone_token_budget=0, itl_target=NO_TARGET)
    reserve(batcher, "a", 200)
    assert [sizes(batcher) for _ in range(2)] == [{"a": 128}, {"a": 72}]
    reserve(batcher, "b", 1000)
    assert sizes(batcher) == {"a": 1, "b": 127}


NEGATIVE = [{"lone_token_budget": -1}, {"itl_target": ItlTarget(-1)}, {"itl_target": ItlTarget(0, -1)}]


@pytest.mark.parametrize("field", [*NEGATIVE, {"itl_target": ItlTarget(0, 0, -1)}])
def test_negative_settings_are_refused(field: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        make_batcher(**field)
