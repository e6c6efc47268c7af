"""Placement: who is a candidate, who wins, and that it is the estimate that chooses the path."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_end

from services.scheduler.handoff_cost import HandoffCost
from services.scheduler.placement import (
    Ask,
    WorkerView,
    choose,
    chunk_of,
    handed_off_cost_s,
    local_cost_s,
    room_of_idle,
    steps_s,
    within_pools,
)
from shared.contracts.ids import WorkerId
from shared.contracts.parts import ClassRoom, ItlTarget, KvEnd, KvLink, StepModel
from shared.engine.step_time import chunk_context
from shared.settings.sections import EngineSettings
from tests.unit.scheduler_support import view

COST = HandoffCost()
DECODE, PREFILL = view("d1"), view("p1", "prefill")


def path(ask: Ask, *views: object) -> tuple[str, str]:
    choice = choose(ask, list(views), COST)  # type: ignore[arg-type]
    assert choice is not None
    return choice.path, choice.reason


def test_long_prompt_is_handed_off_and_short_one_stays_on_an_idle_pair() -> None:
    long = choose(Ask(num_tokens=600), [DECODE, PREFILL], COST)
    short = choose(Ask(num_tokens=60), [DECODE, PREFILL], COST)
    assert long is not None
    assert short is not None
    assert (long.path, long.reason, long.prefill_worker) == ("handed_off", "estimate", "p1")
    assert (short.path, short.reason, short.prefill_worker) == ("local", "estimate", "")
    assert 0 < long.handed_off_s < long.local_s
    assert 0 < short.local_s < short.handed_off_s


def test_the_estimate_decides_and_nothing_else() -> None:
    """The same 600 tokens turn local when any term of the estimate says so, and the 60 handed off likewise."""
    slow_wire = HandoffCost(bandwidth_bytes_s=1e6)
    same_budget = replace(PREFILL, token_budget=128)
    queued = replace(PREFILL, queue_tokens=2_000)
    for views, cost in (([DECODE, PREFILL], slow_wire), ([DECODE, same_budget], COST), ([DECODE, queued], COST)):
        choice = choose(Ask(num_tokens=600), views, cost)
        assert choice is not None
        assert (choice.path, choice.reason) == ("local", "estimate")
        assert choice.local_s <= choice.handed_off_s
    busy = replace(DECODE, running=6)
    fast = replace(PREFILL, step_model=StepModel(base_s=0.001, token_s=0.0001))
    assert path(Ask(num_tokens=60), busy, fast) == ("handed_off", "estimate")


def test_local_cost_counts_chunks_running_decodes_and_the_delay_to_them() -> None:
    idle = local_cost_s(DECODE, 256, 0)
    assert idle == pytest.approx(2 * (0.025 + 0.0005) + 256 * 0.0012)
    model = DECODE.step_model
    busy = replace(DECODE, running=4)  # 124 tokens a step: three steps, each with four decodes
    own = 3 * (model.base_s + 4 * model.token_s + 5 * model.sequence_s) + 256 * model.token_s
    assert local_cost_s(busy, 256, 0) == pytest.approx(own + 4 * model.token_s * 256)


def test_each_path_pays_for_what_is_uncached_at_its_own_worker() -> None:
    held_by_prefill = Ask(num_tokens=600, held={WorkerId("p1"): 576})
    held_by_decode = Ask(num_tokens=600, held={WorkerId("d1"): 576})
    cold = Ask(num_tokens=600)
    assert handed_off_cost_s(PREFILL, DECODE, held_by_prefill, COST) < handed_off_cost_s(PREFILL, DECODE, cold, COST)
    assert path(held_by_prefill, DECODE, PREFILL)[0] == "handed_off"
    assert path(held_by_decode, DECODE, PREFILL)[0] == "local"


def test_the_estimate_takes_the_chunks_that_the_engine_would() -> None:
    """Beside decodes a target leaves little, so a prompt takes many steps; rows below the floor cost nothing."""
    model = StepModel(base_s=0.002, token_s=0.0016, sequence_s=0.0008, floor_s=0.030)
    idle = replace(DECODE, step_model=model, itl_target=ItlTarget(least_s=0.050))
    busy = replace(idle, running=6)
    assert (chunk_of(idle), chunk_of(replace(busy, itl_target=ItlTarget()))) == (128, 122)
    assert chunk_of(busy) == 20
    assert steps_s(model, 4, start=0, chunk=4, running=6) == 0.030
    assert local_cost_s(busy, 600, 0) > local_cost_s(replace(busy, itl_target=ItlTarget()), 600, 0)
    assert path(Ask(num_tokens=200), busy, replace(PREFILL, step_model=model)) == ("handed_off", "estimate")


def test_context_term_makes_deep_chunks_dearer() -> None:
    deep = replace(DECODE, step_model=StepModel(base_s=0.025, token_s=0.0012, context_s=1e-5))
    assert local_cost_s(deep, 128, 2_000) > local_cost_s(deep, 128, 0)


def test_context_counts_the_positions_that_every_token_attends_to() -> None:
    """As the engine counts them: whole or in chunks, and for what is queued, from its own beginning."""
    model = StepModel(context_s=1.0)
    assert steps_s(model, 1, start=99, chunk=1, running=0) == 100
    assert steps_s(model, 3, start=10, chunk=128, running=0) == 11 + 12 + 13 == chunk_context(10, 3)
    assert steps_s(model, 3, start=10, chunk=2, running=5) == 11 + 12 + 13
    assert steps_s(model, 1, start=10, chunk=9, running=0, queue_tokens=4) == 1 + 2 + 3 + 4 + 11


def test_paths_that_need_no_estimate() -> None:
    assert path(Ask(num_tokens=1), DECODE, PREFILL) == ("local", "one_token")
    assert path(Ask(num_tokens=65, held={WorkerId("d1"): 64}), DECODE, PREFILL) == ("local", "cached")
    assert path(Ask(num_tokens=600), DECODE) == ("local", "no_prefill_worker")
    for busy in (
        replace(PREFILL, running=8),
        replace(PREFILL, waiting=1),
        replace(PREFILL, free_blocks=(3,)),
        replace(PREFILL, draining=True),
        replace(PREFILL, fingerprint="other"),
    ):
        assert path(Ask(num_tokens=600), DECODE, busy) == ("local", "no_prefill_worker")


def test_rank_is_numerics_then_match_then_free_blocks_then_id() -> None:
    a, b, c = view("a", free_blocks=(50,)), view("b", free_blocks=(60,)), view("c", free_blocks=(60,))

    def winner(ask: Ask, *views: object) -> str:
        choice = choose(ask, list(views), COST)  # type: ignore[arg-type]
        assert choice is not None
        assert choice.candidates == len(views)
        return choice.decode_worker

    assert winner(Ask(num_tokens=100), a, b, c) == "b"
    assert winner(Ask(num_tokens=100, held={WorkerId("a"): 32}), a, b, c) == "a"
    assert winner(Ask(num_tokens=100), a, replace(b, held_back=(11,)), replace(c, held_back=(12,))) == "a"
    other = replace(c, numerics="n2")
    assert winner(Ask(num_tokens=100, held={WorkerId("a"): 32}, numerics="n2"), a, b, other) == "c"


def test_only_workers_with_room_are_candidates() -> None:
    ask = Ask(num_tokens=320, max_new_tokens=32)  # eleven blocks of 32
    assert ask.blocks(DECODE) == (11,)
    assert Ask(num_tokens=40, max_new_tokens=30, choices=3).blocks(DECODE) == (1 + 3 * 2,)
    # a long answer takes no more to begin with: its prompt's blocks and one to grow into
    assert Ask(num_tokens=320, max_new_tokens=2000).blocks(DECODE) == (11,)
    assert Ask(num_tokens=320, max_new_tokens=2000).most_blocks(DECODE) == (73,)
    for full in (
        replace(DECODE, free_blocks=(10,)),
        replace(DECODE, free_blocks=(13,), held_back=(3,)),
        replace(DECODE, running=7, waiting=1),
        replace(DECODE, draining=True),
        PREFILL,
    ):
        assert choose(ask, [full], COST) is None
    assert choose(replace(ask, excluded=frozenset({DECODE.worker})), [DECODE], COST) is None
    assert choose(ask, [replace(DECODE, free_blocks=(11,))], COST) is not None
    assert choose(ask, [replace(DECODE, free_blocks=(14,), held_back=(3,))], COST) is not None


def test_choices_need_a_slot_each() -> None:
    four = Ask(num_tokens=60, choices=4)
    busy = replace(DECODE, max_sequences=8, running=3, waiting=2)
    assert choose(four, [busy], COST) is None
    assert choose(four, [replace(busy, waiting=1)], COST) is not None
    # what it never runs at once it is asked for all the same, to say so
    assert choose(four, [replace(busy, max_sequences=3, running=0, waiting=0)], COST) is not None
    assert choose(Ask(num_tokens=60, choices=9), [busy, replace(busy, worker=WorkerId("d2"), max_sequences=16)], COST)


def test_prompts_that_are_scored_stay_where_they_are_computed() -> None:
    assert path(Ask(num_tokens=600, scores_prompt=True), DECODE, PREFILL) == ("local", "prompt_logprobs")


def test_what_can_never_fit_goes_to_a_worker_to_be_refused_there() -> None:
    assert choose(Ask(num_tokens=32 * 200), [replace(DECODE, free_blocks=(0,))], COST) is not None


def test_an_answer_that_can_never_be_held_to_its_end_waits_for_nothing_either() -> None:
    endless = Ask(num_tokens=32, max_new_tokens=32 * 200)
    assert choose(endless, [replace(DECODE, free_blocks=(0,))], COST) is not None
    assert choose(replace(endless, max_new_tokens=32 * 99), [replace(DECODE, free_blocks=(0,))], COST) is None


def test_too_small_a_worker_is_passed_over_while_a_larger_one_is_busy() -> None:
    """Its "never" would end the request, which the larger one can run later."""
    small, large = view("small", total_blocks=(10,)), view("large", free_blocks=(0,), total_blocks=(300,))
    ask = Ask(num_tokens=32 * 200)
    assert choose(ask, [small, large], COST) is None
    assert choose(replace(ask, excluded=frozenset({large.worker})), [small, large], COST) is None
    choice = choose(ask, [small, replace(large, free_blocks=(300,))], COST)
    assert choice is not None
    assert choice.decode_worker == "large"


@pytest.mark.parametrize(("num_tokens", "path"), [(1000, "handed_off"), (60, "local")])
def test_paths_with_the_defaults_and_the_step_times_of_a_small_machine(num_tokens: int, path: str) -> None:
    """SmolLM2-135M in float32 on two cores, as the workers measured it: the margin is small but there."""
    engine = EngineSettings()
    model = StepModel(base_s=0.05, token_s=0.0022, sequence_s=0.002)
    decode = replace(DECODE, token_budget=engine.token_budget, step_model=model)
    prefill = replace(PREFILL, token_budget=engine.prefill_token_budget, step_model=model)
    choice = choose(Ask(num_tokens=num_tokens), [decode, prefill], HandoffCost())
    assert choice is not None
    assert (choice.path, choice.reason) == (path, "estimate")
    cheaper, dearer = sorted((choice.local_s, choice.handed_off_s))
    assert cheaper < 0.97 * dearer


def test_moving_kv_costs_what_the_worker_says_a_token_takes() -> None:
    ask = Ask(num_tokens=1_001)
    at_once = replace(PREFILL, token_budget=1_000)
    light, heavy = (handed_off_cost_s(at_once, replace(DECODE, token_bytes=n), ask, COST) for n in (1_000, 2_001_000))
    assert heavy - light == pytest.approx(1_000 * 2_000_000 / COST.bandwidth_bytes_s)


def test_kv_moves_while_later_chunks_are_computed() -> None:
    ask = Ask(num_tokens=10_001)
    chunks = replace(PREFILL, token_budget=1_000)
    unmoved = handed_off_cost_s(chunks, replace(DECODE, token_bytes=0), ask, COST)
    quick = handed_off_cost_s(chunks, replace(DECODE, token_bytes=1_000), ask, COST)
    assert quick - unmoved == pytest.approx(1_000 * 1_000 / COST.bandwidth_bytes_s), "the last chunk's KV alone"
    slow = handed_off_cost_s(chunks, replace(DECODE, token_bytes=10_000_000), ask, COST)
    assert slow - 10_000 * 10_000_000 / COST.bandwidth_bytes_s < unmoved / 5, "nearly all of the computing is hidden"


def test_the_way_and_what_was_measured_on_it_decide_the_path() -> None:
    ask = Ask(num_tokens=2_000)
    here, there = KvEnd("here", "net"), KvEnd("there", "net", "tcp://127.0.0.1:5")
    decode, prefill = replace(DECODE, kv=here), replace(PREFILL, kv=there)
    assert path(ask, decode, prefill) == ("handed_off", "estimate")
    slow = replace(decode, links=(KvLink(WorkerId("p1"), "tcp", 1e6),))
    assert path(ask, slow, prefill) == ("local", "estimate")
    for sink, source in (
        (decode, replace(prefill, kv=KvEnd("there", "net"))),
        (replace(decode, kv=replace_end(here, transfer="shared-memory")), prefill),
        (replace(decode, links=(KvLink(WorkerId("p1"), "tcp", 1e9, failed=True),)), prefill),
    ):
        assert path(ask, sink, source) == ("local", "no_kv_path")
    near = view("p2", "prefill", kv=here)
    choice = choose(ask, [slow, prefill, near], COST)
    assert choice is not None
    assert choice.prefill_worker == "p2", "who is reached faster"


def test_two_layer_groups_both_count() -> None:
    two = replace(DECODE, free_blocks=(100, 2), total_blocks=(100, 10), block_sizes=(32, 64))
    assert choose(Ask(num_tokens=100), [two], COST) is not None
    assert choose(Ask(num_tokens=200), [two], COST) is None


# ------------------------------------------------------------------------------------------ what classes have


def winner(ask: Ask, *views: WorkerView) -> str:
    choice = choose(ask, list(views), COST)
    assert choice is not None
    return choice.decode_worker


def roomy(view: WorkerView, *rooms: tuple[int, int]) -> WorkerView:
    """With that many sequences and blocks for each class."""
    return replace(view, rooms=tuple(ClassRoom(sequences, (blocks,)) for sequences, blocks in rooms))


def test_a_higher_class_is_placed_where_lower_ones_give_way() -> None:
    full = roomy(replace(DECODE, running=8, free_blocks=(1,)), (8, 90), (3, 20), (0, 0))
    assert winner(Ask(num_tokens=60), full) == "d1"
    assert winner(Ask(num_tokens=60, klass="analysis"), full) == "d1"
    assert choose(Ask(num_tokens=60, klass="analysis", choices=4), [full], COST) is None
    assert choose(Ask(num_tokens=60 * 32, klass="analysis"), [full], COST) is None
    assert choose(Ask(num_tokens=60, klass="batch"), [full], COST) is None


def test_what_is_free_is_taken_before_what_others_hold() -> None:
    taken = roomy(DECODE, (8, 90), (8, 90), (0, 0))
    free = roomy(replace(DECODE, worker=WorkerId("d2")), (2, 20), (2, 20), (2, 20))
    held = {WorkerId("d1"): 32}
    assert winner(Ask(num_tokens=60, held=held), taken, free) == "d2"


def test_a_dedicated_worker_is_preferred_and_takes_nothing_else() -> None:
    shared = DECODE
    batch = replace(DECODE, worker=WorkerId("d2"), classes=("batch",))
    longer = replace(DECODE, worker=WorkerId("d3"), classes=("analysis", "batch"))
    assert winner(Ask(num_tokens=60, klass="batch"), shared, longer, batch) == "d2"
    assert winner(Ask(num_tokens=60, klass="analysis"), shared, longer, batch) == "d3"
    assert winner(Ask(num_tokens=60), shared, longer, batch) == "d1"
    full = replace(batch, running=8)
    assert winner(Ask(num_tokens=60, klass="batch"), shared, longer, full) == "d3"
    assert choose(Ask(num_tokens=60), [batch, longer], COST) is None
    prefill = replace(PREFILL, classes=("batch",))
    assert path(Ask(num_tokens=600), DECODE, prefill) == ("local", "no_prefill_worker")
    assert path(Ask(num_tokens=600, klass="batch"), DECODE, prefill) == ("handed_off", "estimate")


def test_a_request_goes_to_a_pool_that_holds_it_to_its_end() -> None:
    """Unlike pools: in the small one it could begin, and would never end."""
    small = replace(DECODE, total_blocks=(10,), free_blocks=(10,))
    large = replace(DECODE, worker=WorkerId("d2"), total_blocks=(40,), free_blocks=(12,))
    ask = Ask(num_tokens=60, max_new_tokens=600)
    assert winner(ask, small, large) == "d2"
    assert choose(ask, [small, replace(large, running=8)], COST) is None  # it waits for the large one
    assert winner(ask, small) == "d1"  # which says that it never fits
    assert winner(ask, replace(small, running=8)) == "d1"  # at once, though it is full


def test_the_last_token_needs_no_slot() -> None:
    tight = replace(DECODE, total_blocks=(10,), free_blocks=(10,))
    assert room_of_idle([tight], Ask(num_tokens=64, max_new_tokens=257)) is None
    assert room_of_idle([tight], Ask(num_tokens=64, max_new_tokens=258)) == 320
    larger = replace(tight, worker=WorkerId("d2"), total_blocks=(12,))
    assert room_of_idle([tight, larger], Ask(num_tokens=64, max_new_tokens=258)) is None
    assert room_of_idle([tight, larger], Ask(num_tokens=640)) == 384
    assert room_of_idle([PREFILL], Ask(num_tokens=6400)) is None  # nobody to say so


def test_a_prefill_worker_that_is_too_small_leaves_the_prompt_to_the_decode_worker() -> None:
    small = replace(PREFILL, total_blocks=(4,), free_blocks=(4,))
    assert path(Ask(num_tokens=600), DECODE, small) == ("local", "no_prefill_worker")


def test_an_output_that_nobody_named_a_length_of_ends_where_the_largest_pool_does() -> None:
    small = replace(DECODE, total_blocks=(10,), free_blocks=(10,))
    large = replace(DECODE, worker=WorkerId("d2"), total_blocks=(40,), free_blocks=(12,))
    ask = Ask(num_tokens=64, max_new_tokens=4000, open_ended=True)
    assert winner(ask, small, large) == "d2"
    assert within_pools(ask, [small, large]).max_new_tokens == 40 * 32 + 1 - 64
    assert room_of_idle([small, large], within_pools(ask, [small, large])) is None
    asked = replace(ask, open_ended=False)
    assert within_pools(asked, [small, large]) == asked
    assert within_pools(replace(ask, max_new_tokens=100), [small, large]).max_new_tokens == 100
    # the prompt alone is too long
    over = replace(ask, num_tokens=40 * 32 + 1)
    assert room_of_idle([small, large], within_pools(over, [small, large])) == 40 * 32
