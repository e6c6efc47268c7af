"""Which waiting prompt is computed first, and that none waits for ever."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.contracts.ids import TenantId
from shared.contracts.sampling import SamplingParams
from shared.engine.batcher import Batcher
from shared.engine.batcher_config import BatcherConfig
from shared.engine.prompt_order import OVERTAKING, count_overtaking, least_first
from shared.engine.sequence import Sequence
from shared.engine.sequence_spec import SequenceSpec
from shared.engine.step_plan import StepOutput, StepPlan
from shared.kv.layout import LayerGroup, PoolLayout


def sequence(name: str, prompt: int, output: int = 0, klass: str = "interactive") -> Sequence:
    """A sequence of the tenant named by the first letter."""
    tokens = tuple(range(prompt + output))
    spec = SequenceSpec(name, tokens, prompt, SamplingParams(max_tokens=50), klass=klass, tenant=TenantId(name[0]))
    return Sequence(spec, 0, (), 0)


def order(*prompts: Sequence) -> list[str]:
    return [seq.spec.seq_id for seq, _ in least_first([(seq, len(seq.tokens)) for seq in prompts])]


def test_least_comes_first_and_of_equals_the_earliest() -> None:
    assert order(sequence("a1", 90), sequence("a2", 20), sequence("a3", 40), sequence("a4", 20)) == [
        "a2",
        "a4",
        "a3",
        "a1",
    ]


def test_what_is_left_counts_not_what_there_was() -> None:
    long, short = sequence("a1", 400), sequence("a2", 100)
    assert [seq.spec.seq_id for seq, _ in least_first([(long, 30), (short, 100)])] == ["a1", "a2"]


def test_an_output_that_was_interrupted_comes_before_beginnings() -> None:
    assert order(sequence("a1", 10), sequence("a2", 300, output=5)) == ["a2", "a1"]


def test_higher_classes_come_before_shorter_prompts() -> None:
    batch, long, short = sequence("a1", 10, klass="batch"), sequence("a2", 300), sequence("a3", 200)
    assert order(batch, long, short) == ["a3", "a2", "a1"]
    batch.overtaken = OVERTAKING
    assert order(batch, long, short) == ["a1", "a3", "a2"]


def test_who_was_overtaken_enough_comes_first_and_of_several_the_earliest() -> None:
    first, second, short = sequence("a1", 500), sequence("a2", 400), sequence("a3", 5)
    first.overtaken = second.overtaken = OVERTAKING
    assert order(first, second, short) == ["a1", "a2", "a3"]
    first.overtaken = OVERTAKING - 1
    assert order(first, second, short) == ["a2", "a3", "a1"]


def test_only_later_arrivals_of_the_same_tenant_overtake() -> None:
    seqs = [sequence(name, 100) for name in ("a1", "b1", "a2", "b2")]
    count_overtaking([(seq, 100) for seq in seqs], {"a1": 1, "b1": 2, "a2": 4, "b2": 8})
    assert [seq.overtaken for seq in seqs] == [4, 8, 0, 0]


def batcher_of(budget: int, slots: int) -> Batcher:
    group = LayerGroup(name="full", layers=(0,), num_kv_heads=1, head_dim=8, block_size=32, dtype="float32")
    return Batcher(PoolLayout((group,), (4000,)), BatcherConfig(token_budget=budget, max_num_seqs=slots, depth=0))


def reserve(batcher: Batcher, name: str, prompt: int) -> None:
    batcher.reserve(SequenceSpec(name, tuple(range(prompt)), prompt, SamplingParams(max_tokens=1, ignore_eos=True)))


def step(batcher: Batcher) -> dict[str, int]:
    plan = batcher.plan()
    assert isinstance(plan, StepPlan)
    batcher.commit(StepOutput(plan.step, tuple((1,) * row.num_logits for row in plan.sequences)))
    return {row.seq_id: len(row.token_ids) for row in plan.sequences}


def test_a_step_begins_with_the_shortest_and_finishes_what_it_began() -> None:
    batcher = batcher_of(100, 8)
    for name, prompt in (("long", 300), ("short", 40), ("middle", 90)):
        reserve(batcher, name, prompt)
    assert step(batcher) == {"short": 40, "middle": 60}
    assert step(batcher) == {"middle": 30, "long": 70}


def test_a_long_prompt_is_not_kept_waiting_by_short_ones_that_never_cease() -> None:
    batcher, served, short = batcher_of(64, 16), 0, 64
    reserve(batcher, "long", 700)
    steps = 0
    while served < 700:
        steps += 1
        reserve(batcher, f"short-{steps}", short)
        served += step(batcher).get("long", 0)
    # first those that may go before it, then its own
    assert steps == OVERTAKING // 64 + -(-700 // 64)


@settings(deadline=None, max_examples=40)
@given(prompts=st.lists(st.tuples(st.integers(2, 300), st.sampled_from("ab")), min_size=1, max_size=40))
def test_nobody_is_overtaken_by_more_than_the_bound_and_two_steps(prompts: list[tuple[int, str]]) -> None:
    budget, batcher, waiting = 64, batcher_of(64, 63), list(enumerate(prompts))
    live: dict[str, Sequence] = {}
    while waiting or not batcher.is_idle:
        for number, (prompt, tenant) in waiting[:3]:
            name = f"{tenant}{number}"
            sampling = SamplingParams(max_tokens=1, ignore_eos=True)
            batcher.reserve(SequenceSpec(name, tuple(range(prompt)), prompt, sampling, tenant=TenantId(tenant)))
            live[name] = batcher._sequences[name]
        del waiting[:3]
        step(batcher)
    # beyond the bound: by the step that reaches it, and by what was left of the one that computed its last token
    assert all(seq.overtaken < OVERTAKING + 2 * budget for seq in live.values())
