"""Who takes part in a step: sequences with a grammar that wait for their token, prompts whose tokens are scored."""

from __future__ import annotations

from shared.contracts.sampling import SamplingParams
from shared.engine.batcher import Batcher
from shared.engine.batcher_config import BatcherConfig
from shared.engine.sequence_spec import SequenceSpec
from shared.engine.step_composer import SCORED_CHUNK
from shared.engine.step_plan import IN_FLIGHT, StepOutput, StepPlan
from shared.kv.layout import LayerGroup, PoolLayout

GROUP = LayerGroup(name="full", layers=(0,), num_kv_heads=1, head_dim=8, block_size=8, dtype="float32")


def batcher_with(*specs: tuple[str, int, SamplingParams], **config: int | bool) -> Batcher:
    batcher = Batcher(PoolLayout((GROUP,), (99,)), BatcherConfig(max_num_seqs=8, **config))  # type: ignore[arg-type]
    for seq_id, prompt, sampling in specs:
        batcher.reserve(SequenceSpec(seq_id, tuple(range(100, 100 + prompt)), prompt, sampling))
    return batcher


def planned(batcher: Batcher) -> StepPlan:
    plan = batcher.plan()
    assert plan is not None
    return plan


def commit(batcher: Batcher, plan: StepPlan) -> None:
    batcher.commit(StepOutput(plan.step, tuple((50,) * row.num_sampled for row in plan.sequences)))


def ids(plan: StepPlan) -> list[str]:
    return [row.seq_id for row in plan.sequences]


def test_a_sequence_with_a_grammar_waits_for_its_token_while_others_run_ahead() -> None:
    free, bound = SamplingParams(max_tokens=9), SamplingParams(max_tokens=9, grammar="{}")
    batcher = batcher_with(("free", 3, free), ("bound", 3, bound), grammars_wait=True)
    first = planned(batcher)
    assert sorted(ids(first)) == ["bound", "free"]
    second = planned(batcher)
    assert [(row.seq_id, row.token_ids) for row in second.sequences] == [("free", (IN_FLIGHT,))]
    assert batcher.plan() is None
    commit(batcher, first)
    third = planned(batcher)
    assert {row.seq_id: row.token_ids for row in third.sequences} == {"free": (IN_FLIGHT,), "bound": (50,)}
    batcher.check()
    # alone it is planned as soon as its token is there
    batcher.cancel("free")
    commit(batcher, second)
    assert batcher.plan() is None
    commit(batcher, third)
    assert ids(planned(batcher)) == ["bound"]


def test_where_tokens_are_known_in_time_a_grammar_waits_for_nothing() -> None:
    batcher = batcher_with(("bound", 3, SamplingParams(max_tokens=9, grammar="{}")))
    planned(batcher)
    assert [row.token_ids for row in planned(batcher).sequences] == [(IN_FLIGHT,)]


def test_prompts_that_are_scored_share_the_rows_of_logits_there_are() -> None:
    scored, plain = SamplingParams(max_tokens=4, prompt_logprobs=1), SamplingParams(max_tokens=4)
    prompts = [("a", 40, scored), ("b", 50, scored), ("c", 60, scored), ("d", 90, plain)]
    batcher = batcher_with(*prompts, token_budget=512, depth=0)
    tokens = dict.fromkeys("abcd", 0)
    while any(tokens[seq_id] < prompt for seq_id, prompt, _ in prompts):
        plan = planned(batcher)
        assert sum(len(row.scored) for row in plan.sequences) <= SCORED_CHUNK
        if plan.step == 1:
            assert {row.seq_id: len(row.token_ids) for row in plan.sequences} == {"a": 40, "b": 24, "d": 90}
        for row in plan.sequences:
            tokens[row.seq_id] += len(row.token_ids)
        commit(batcher, plan)
    batcher.check()
