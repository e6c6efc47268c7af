"""Who takes part in a step, and with how much: prompts whose tokens are scored."""

from __future__ import annotations

from shared.contracts.ids import TenantId
from shared.contracts.sampling import SamplingParams
from shared.engine.batcher import Batcher
from shared.engine.batcher_config import BatcherConfig
from shared.engine.sequence_spec import SequenceSpec
from shared.engine.step_composer import SCORED_CHUNK
from shared.engine.step_plan import StepOutput, StepPlan
from shared.kv.layout import LayerGroup, PoolLayout

GROUP = LayerGroup(name="full", layers=(0,), num_kv_heads=1, head_dim=8, block_size=8, dtype="float32")


def batcher_with(*specs: tuple[str, int, SamplingParams], **config: int) -> Batcher:
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


def test_a_tenants_prompts_that_are_scored_keep_nobody_elses_out() -> None:
    scored = SamplingParams(max_tokens=1, prompt_logprobs=1, ignore_eos=True)
    batcher = batcher_with(token_budget=512, depth=0)

    def reserve(name: str, prompt: int) -> None:
        spec = SequenceSpec(name, tuple(range(prompt)), prompt, scored, tenant=TenantId(name[0]))
        batcher.reserve(spec)

    reserve("b", 3 * SCORED_CHUNK)
    for number in range(6):
        reserve(f"a{number}", SCORED_CHUNK)
        plan = planned(batcher)
        assert {row.seq_id: len(row.token_ids) for row in plan.sequences}["b"] == SCORED_CHUNK // 2
        assert sum(len(row.scored) for row in plan.sequences) <= SCORED_CHUNK
        commit(batcher, plan)
    assert not batcher.holds("b")
