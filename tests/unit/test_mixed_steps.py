"""Prompts and decodes in one step: a stream has a token in each, prompts go on, and nobody starves of the budget."""

from __future__ import annotations

from collections import Counter

import pytest

from shared.contracts.ids import TenantId
from shared.contracts.parts import ItlTarget
from shared.engine.batcher import Batcher
from shared.engine.batcher_config import BatcherConfig
from shared.engine.prompt_budget import LEAST, step_limit_s
from shared.engine.step_plan import StepPlan
from shared.engine.step_time import StepTimeModel
from tests.unit.batcher_support import fifty, make_batcher, make_spec, output_of

CHUNK = 16


def steps_of(batcher: Batcher, most: int = 10_000) -> list[StepPlan]:
    """Every step until nothing runs, as the engine goes through them: depth + 1 in flight."""
    done, flying = list[StepPlan](), list[StepPlan]()
    while len(done) < most:
        while (plan := batcher.plan()) is not None:
            flying.append(plan)
        if not flying:
            return done
        done.append(flying.pop(0))
        batcher.commit(output_of(done[-1], fifty))
        batcher.check()
    raise AssertionError(f"not at an end after {most} steps")


def rows(plan: StepPlan) -> dict[str, int]:
    return {row.seq_id: len(row.token_ids) for row in plan.sequences}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("tenants", [1, 5])
def test_op36_a_stream_has_a_token_in_each_step_while_long_prompts_come(depth: int, tenants: int) -> None:
    """So no gap of a live stream is longer than one mixed step, however many prompts wait and whoever sends them."""
    batcher = make_batcher(num_blocks=900, depth=depth, token_budget=64, chunk_size=CHUNK)
    batcher.reserve(make_spec("stream", prompt=4, max_tokens=400))
    plan = batcher.plan()
    assert plan is not None
    batcher.commit(output_of(plan, fifty))
    for i in range(5):
        tenant = TenantId(f"t{i % tenants}")
        batcher.reserve(make_spec(f"p{i}", prompt=20 * CHUNK, max_tokens=2, tenant=tenant))
    steps = steps_of(batcher)
    last = max(i for i, step in enumerate(steps) if any(name[0] == "p" for name in rows(step)))
    assert last < 399
    for step in steps[: last + 1]:
        assert rows(step)["stream"] == 1
        assert step.num_tokens <= 64
    # the prompts have what the stream leaves, as long as there are enough of them, and none more than a chunk
    assert all(step.num_tokens == 1 + 3 * CHUNK + 15 for step in steps[1:20])
    assert max(count for step in steps for name, count in rows(step).items() if name != "stream") == CHUNK


def test_op36_beside_a_target_a_step_takes_no_longer_than_it_says() -> None:
    model = StepTimeModel(base_s=0.004, token_s=0.001, sequence_s=0.0001, context_s=0.0, floor_s=0.005)
    target = ItlTarget(least_s=0.040)
    batcher = make_batcher(num_blocks=900, depth=1, token_budget=256, itl_target=target)
    batcher.step_model = model
    batcher.reserve(make_spec("stream", prompt=4, max_tokens=600))
    plan = batcher.plan()
    assert plan is not None
    batcher.commit(output_of(plan, fifty))
    for i in range(5):
        batcher.reserve(make_spec(f"p{i}", prompt=20 * CHUNK, max_tokens=2))
    mixed = [step for step in steps_of(batcher) if any(name[0] == "p" for name in rows(step))]
    assert len(mixed) < 400
    for step in mixed:
        took_s = model.predict(step.num_tokens, len(step.sequences), 0)
        assert took_s <= step_limit_s(model, target, len(step.sequences), 0) + 1e-9
        assert "stream" in rows(step)


def test_op36_prompts_go_on_whatever_the_target_says() -> None:
    batcher = make_batcher(num_blocks=900, token_budget=256, itl_target=ItlTarget(least_s=1e-6))
    batcher.reserve(make_spec("stream", prompt=4, max_tokens=100))
    plan = batcher.plan()
    assert plan is not None
    batcher.commit(output_of(plan, fifty))
    batcher.reserve(make_spec("long", prompt=20 * LEAST, max_tokens=2))
    steps = steps_of(batcher)
    assert [rows(step).get("long") for step in steps[:20]] == [LEAST] * 20


def test_decodes_never_exceed_the_budget_as_there_are_fewer_places_than_tokens() -> None:
    with pytest.raises(ValueError, match="must exceed"):
        BatcherConfig(token_budget=8, max_num_seqs=8)


@pytest.mark.parametrize("depth", [0, 1])
def test_with_as_many_decodes_as_the_budget_bears_all_have_a_token_in_each_step_and_a_prompt_one_too(
    depth: int,
) -> None:
    batcher = make_batcher(num_blocks=200, depth=depth, token_budget=9, max_num_seqs=8)
    for i in range(7):
        batcher.reserve(make_spec(f"s{i}", prompt=1, max_tokens=60, klass="batch" if i % 2 else "interactive"))
    plan = batcher.plan()
    assert plan is not None
    batcher.commit(output_of(plan, fifty))
    batcher.reserve(make_spec("long", prompt=40, max_tokens=2, klass="batch"))
    steps = steps_of(batcher)
    for step in steps[:20]:
        assert set(rows(step)) == {f"s{i}" for i in range(7)} | {"long"}
        assert rows(step)["long"] == 2
    tokens = Counter(name for step in steps for name in rows(step))
    assert all(tokens[f"s{i}"] == 59 for i in range(7))


def test_displaced_sequences_leave_no_step_over_its_budget() -> None:
    """Who lost its place decodes no more, though its last step is still in flight."""
    batcher = make_batcher(num_blocks=200, depth=1, token_budget=5, max_num_seqs=4)
    for i in range(4):
        batcher.reserve(make_spec(f"low{i}", prompt=1, max_tokens=30, klass="batch"))
    flying = [batcher.plan(), batcher.plan()]
    for i in range(4):
        batcher.reserve(make_spec(f"high{i}", prompt=6, max_tokens=5))
    for plan in flying:
        assert plan is not None
        batcher.commit(output_of(plan, fifty))
    steps = steps_of(batcher)
    assert all(step.num_tokens <= 5 and len(step.sequences) <= 4 for step in steps)
    ended = Counter(name for step in steps for name in rows(step))
    assert set(ended) == {f"low{i}" for i in range(4)} | {f"high{i}" for i in range(4)}
