"""Speculating sequences in a batcher: what counts of a guess, what is left of a wrong one, and when nobody guesses."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from shared.contracts.errors import SettingsError
from shared.contracts.ids import WorkerId
from shared.contracts.sampling import SamplingParams
from shared.contracts.tokens import pack_tokens
from shared.engine import draft_length, speculation, worker_engine
from shared.engine.batcher import Batcher
from shared.engine.draft_costs import DraftCosts
from shared.engine.draft_length import MARGIN, OVERHEAD_S, Draftable, draft_lengths
from shared.engine.draft_record import FIRST_CHANCES, LONG_MATCH, DraftRecord
from shared.engine.prompt_lookup import PromptLookup
from shared.engine.sequence_update import SequenceUpdate
from shared.engine.step_plan import ScheduledSequence, StepOutput, StepPlan, require_fit
from shared.engine.step_time import StepTimeModel
from shared.engine.worker_engine import WorkerOptions, open_worker_engine
from shared.engine.worker_settings import worker_options
from shared.settings.sections import Settings
from tests.unit.batcher_support import BLOCK, EOS, Tokens, make_batcher, make_spec, output_of, used

FREE_ROWS = StepTimeModel(base_s=0.0, token_s=1e-4, sequence_s=0.0, context_s=0.0, floor_s=0.05)
"""Weights take 50 ms to read: rows up to 500 cost nothing."""
DEAR_ROWS = StepTimeModel(base_s=0.0, token_s=0.05, sequence_s=0.0, context_s=0.0, floor_s=0.0)


def cycle(seq_id: str, position: int) -> int:
    """A model that repeats itself."""
    return 50 + position % 5


def broken_cycle(seq_id: str, position: int) -> int:
    """The same, but for every twelfth token."""
    return 60 if position % 12 == 0 else cycle(seq_id, position)


def make(model: StepTimeModel = FREE_ROWS, **config: Any) -> Batcher:
    batcher = make_batcher(**{"most_drafted": 4, "depth": 1, "num_blocks": 200} | config)
    batcher.step_model = model
    return batcher


def run(
    batcher: Batcher, tokens: Tokens, seen: Callable[[StepPlan, list[SequenceUpdate]], None] = lambda plan, news: None
) -> list[SequenceUpdate]:
    """As the engine does, until nothing runs."""
    updates = batcher.take_updates()
    flying: list[StepPlan] = []
    while True:
        while (plan := batcher.plan(may_stretch=True)) is not None:
            flying.append(plan)
        batcher.zeroed(batcher.take_blocks_to_zero())
        if not flying:
            return updates + batcher.take_updates()
        plan = flying.pop(0)
        news = batcher.commit(output_of(plan, tokens, repeats=plan.repeats))
        batcher.check()
        seen(plan, news)
        updates += news


def outputs(updates: list[SequenceUpdate]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for update in updates:
        assert update.first_seq == len(found.setdefault(update.seq_id, []))
        found[update.seq_id].extend(update.token_ids)
    return found


@pytest.mark.parametrize("tokens", [cycle, broken_cycle])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("stretch_s", [0.0, 10.0])
def test_the_output_is_the_same_and_takes_fewer_steps(tokens: Tokens, depth: int, stretch_s: float) -> None:
    steps, said = {}, {}
    for most in (0, 4):
        batcher = make(most_drafted=most, depth=depth, stretch_s=stretch_s)
        count = 0

        def seen(plan: StepPlan, news: list[SequenceUpdate]) -> None:
            nonlocal count
            count += plan.repeats

        for name, prompt in (("a", 7), ("b", 20)):
            batcher.reserve(make_spec(name, prompt, 60))
        updates = run(batcher, tokens, seen)
        steps[most], said[most] = count, outputs(updates)
        assert {u.finish for u in updates if u.finish} == {"length"}
        assert batcher.is_idle
        assert used(batcher) == [0]
    assert said[0] == said[4] == {name: [tokens(name, n + i) for i in range(60)] for name, n in (("a", 7), ("b", 20))}
    assert steps[4] < (0.6 if tokens is cycle else 0.9) * steps[0]


def steps_of_two(most_drafted: int, every: int, depth: int) -> int:
    """Steps that two outputs of 200 tokens take: one repeats itself but for one token of so many, one never does."""

    def tokens(seq_id: str, position: int) -> int:
        if seq_id == "plain" or position % every == 0:
            return 1000 + position
        return cycle(seq_id, position)

    batcher, count = make(most_drafted=most_drafted, depth=depth, num_blocks=400), 0

    def seen(plan: StepPlan, news: list[SequenceUpdate]) -> None:
        nonlocal count
        count += 1

    for name, first in (("guesses", 100), ("plain", 500)):
        batcher.reserve(make_spec(name, 7, 200, token_ids=tuple(range(first, first + 7))))
    run(batcher, tokens, seen)
    assert bool(batcher.gauges().drafts) == bool(most_drafted)
    return count


@pytest.mark.parametrize("every", [4, 6, 12])
def test_one_that_guesses_beside_one_that_does_not_misses_no_step(every: int) -> None:
    """With steps planned ahead the two take no more steps than where none is, and no more than without guesses."""
    steps = steps_of_two(4, every, depth=1)
    assert steps <= steps_of_two(4, every, depth=0)
    assert steps <= steps_of_two(0, every, depth=1)


def test_a_prompt_that_comes_while_guesses_are_in_flight_waits_for_them() -> None:
    """Its first step is then one of both: the other does not stand still meanwhile."""
    batcher = make(chunk_size=4)
    batcher.reserve(make_spec("a", 7, 60))
    while not (plan := batcher.plan()) or not plan.sequences[0].drafted:
        assert plan is not None
        batcher.commit(output_of(plan, cycle))
    batcher.reserve(make_spec("b", 20, 4))
    assert batcher.plan() is None
    batcher.commit(output_of(plan, cycle))
    both = batcher.plan()
    assert both is not None
    assert {row.seq_id for row in both.sequences} == {"a", "b"}


def test_the_account_tells_guesses_and_counts_wrong_ones_as_waste() -> None:
    batcher = make()
    batcher.reserve(make_spec("a", 7, 60))
    (end,) = [u for u in run(batcher, broken_cycle) if u.totals is not None]
    totals, gauges = end.totals, batcher.gauges()
    assert totals is not None
    assert 0 < totals.accepted_tokens < totals.drafted_tokens
    assert (gauges.drafted, gauges.accepted) == (totals.drafted_tokens, totals.accepted_tokens)
    assert totals.computed_tokens == 7 + 59 + totals.wasted_tokens
    assert totals.wasted_tokens == totals.drafted_tokens - totals.accepted_tokens


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("ends_at", range(8, 20))
def test_what_lies_behind_an_end_is_no_accepted_guess(ends_at: int, cut: bool) -> None:
    """The prediction is right throughout. An ending token stands in it, or somebody cuts the text there afterwards."""
    right = tuple(range(207, 240))

    def tokens(seq_id: str, position: int) -> int:
        return EOS if position == ends_at and not cut else right[position - 7]

    predicted = [EOS if i == ends_at - 7 and not cut else token for i, token in enumerate(right)]
    batcher, guessed, totals = make(), list[int](), None
    batcher.reserve(make_spec("a", 7, sampling=SamplingParams(max_tokens=30, prediction=pack_tokens(predicted))))
    while totals is None:
        plan = batcher.plan()
        assert plan is not None
        for row in plan.sequences:
            end = row.start + len(row.token_ids)
            guessed += range(end - row.drafted, end)
        updates = batcher.commit(output_of(plan, tokens))
        if cut and len(batcher.outputs("a")) > ends_at - 7:
            totals = batcher.finish("a", ends_at + 1 - 7)
        for update in updates:
            totals = totals or update.totals
    gauges = batcher.gauges()
    assert totals.completion_tokens == ends_at + 1 - 7
    assert totals.predicted_tokens == len(guessed) == totals.drafted_tokens == gauges.drafted > 0
    assert totals.predicted_right_tokens == sum(position <= ends_at for position in guessed)
    assert gauges.accepted == totals.accepted_tokens >= totals.predicted_right_tokens
    assert cut or totals.accepted_tokens == totals.predicted_right_tokens


def test_texts_are_read_within_one_budget_and_the_short_ones_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four long texts that come at once, and a short one behind them: no plan reads more than it may, and the short one
    guesses as if it were alone."""
    monkeypatch.setattr(speculation, "READ_AT_ONCE", 20)
    taken, whole = list[int](), PromptLookup.read

    def read(lookup: PromptLookup, tokens: list[int], most: int) -> bool:
        before = lookup.num_unread(len(tokens))
        done = whole(lookup, tokens, most)
        taken[-1] += before - lookup.num_unread(len(tokens))
        return done

    monkeypatch.setattr(PromptLookup, "read", read)
    batcher = make(token_budget=500, num_blocks=400)
    for name in "abcd":
        batcher.reserve(make_spec(name, 100, 60))
    batcher.reserve(make_spec("short", 5, 60))
    first = dict[str, int]()
    for number in itertools.count():
        taken.append(0)
        plan = batcher.plan()
        if plan is None:
            break
        for row in plan.sequences:
            if row.drafted:
                first.setdefault(row.seq_id, number)
        batcher.commit(output_of(plan, cycle))
    assert max(taken) <= 20
    assert set(first) == {"a", "b", "c", "d", "short"}
    assert first["short"] == min(first.values())


def test_no_block_is_told_of_before_its_tokens_are_drawn() -> None:
    batcher = make(max_num_seqs=1)
    batcher.reserve(make_spec("a", 7, 60))
    text = [*range(100, 107)]

    def seen(plan: StepPlan, news: list[SequenceUpdate]) -> None:
        for update in news:
            text.extend(update.token_ids)
            assert update.num_computed_tokens <= len(text)
            for block in update.completed[0]:
                assert list(block.token_ids) == text[block.position * BLOCK : (block.position + 1) * BLOCK]

    completed = [b.position for u in run(batcher, broken_cycle, seen) for b in u.completed[0]]
    assert completed == list(range(16)), "each once, in order"


@pytest.mark.parametrize("ends_at", range(20, 42))
@pytest.mark.parametrize("more", [0, 1, 2, 5])
def test_an_end_inside_an_accepted_run_is_where_it_is_without_guesses(ends_at: int, more: int) -> None:
    def tokens(seq_id: str, position: int) -> int:
        return EOS if position >= ends_at else cycle(seq_id, position)

    ends = []
    for most in (0, 4):
        batcher = make(most_drafted=most)
        batcher.reserve(make_spec("a", 7, ends_at - 7 + more))
        updates = run(batcher, tokens)
        (end,) = [u for u in updates if u.finish]
        assert end.totals is not None
        ends.append((outputs(updates), end.finish, end.totals.completion_tokens, end.totals.checksum))
    assert ends[0] == ends[1]
    assert ends[0][1] == ("stop" if more else "length")


@pytest.mark.parametrize(
    ("sampling", "speculates"),
    [
        ({"temperature": 0.7}, True),
        ({"presence_penalty": 1.0, "logit_bias": ((9, 1.0),), "logprobs": 2}, True),
        ({"grammar": "g"}, False),
        ({"min_tokens": 40}, False),
        ({"min_tokens": 10}, True),
    ],
)
def test_who_speculates(sampling: dict[str, Any], speculates: bool) -> None:
    batcher = make()
    batcher.reserve(make_spec("a", 7, sampling=SamplingParams(max_tokens=40, **sampling)))
    guessing = list[ScheduledSequence]()
    run(batcher, cycle, lambda plan, news: guessing.extend(row for row in plan.sequences if row.drafted))
    assert bool(guessing) == speculates
    least = 7 + sampling.get("min_tokens", 0)
    assert all(row.start >= least - 1 and not row.banned for row in guessing)


def test_nobody_guesses_where_rows_cost_what_they_bring() -> None:
    batcher = make(DEAR_ROWS, stretch_s=100.0)
    batcher.reserve(make_spec("a", 7, 60))
    plans: list[StepPlan] = []
    run(batcher, cycle, lambda plan, news: plans.append(plan))
    assert batcher.gauges().drafts == 0
    assert any(plan.repeats > 1 for plan in plans), "and stretches are as long as ever"


def test_nobody_guesses_beside_a_prompt() -> None:
    batcher = make(chunk_size=2)
    batcher.reserve(make_spec("a", 7, 60))
    while not batcher.gauges().drafts:
        plan = batcher.plan()
        assert plan is not None
        batcher.commit(output_of(plan, cycle))
    batcher.reserve(make_spec("b", 20, 4))
    plans: list[StepPlan] = []
    run(batcher, cycle, lambda plan, news: plans.append(plan))
    beside = [plan for plan in plans if any(row.seq_id == "b" and row.start < 20 for row in plan.sequences)]
    assert len(beside) == 10
    assert not any(row.drafted for plan in beside for row in plan.sequences)
    assert any(row.drafted for plan in plans for row in plan.sequences)


def test_guesses_take_no_block_from_others() -> None:
    """A pool that just holds both: what one guesses never costs the other its place."""
    batcher = make(num_blocks=2 * -(-47 // BLOCK))
    for name in "ab":
        batcher.reserve(make_spec(name, 7, 40))
    updates = run(batcher, cycle)
    assert not any(u.event for u in updates)
    assert batcher.gauges().preemptions == 0


@pytest.mark.parametrize("how", ["cancel", "finish", "preempt"])
def test_an_end_or_a_preemption_while_guesses_are_in_flight(how: str) -> None:
    batcher = make()
    batcher.reserve(make_spec("a", 7, 60))
    said: list[int] = []
    while True:
        plan = batcher.plan()
        assert plan is not None
        if plan.sequences[0].drafted:
            break
        said += [t for u in batcher.commit(output_of(plan, cycle)) for t in u.token_ids]
    assert batcher.plan() is None, "nothing is planned behind a guess"
    if how == "preempt":
        assert batcher.preempt("a")
        said += [t for u in batcher.commit(output_of(plan, cycle)) for t in u.token_ids]
        batcher.check()
        said += [t for u in run(batcher, cycle) for t in u.token_ids]
        assert said == [cycle("a", 7 + i) for i in range(60)]
    else:
        totals = batcher.cancel("a") if how == "cancel" else batcher.finish("a", len(said) - 2)
        assert totals is not None
        assert totals.completion_tokens == len(said) - (2 if how == "finish" else 0)
        batcher.commit(output_of(plan, cycle))
    batcher.check()
    assert batcher.is_idle
    assert used(batcher) == [0]


def test_a_step_of_guesses_that_fails_ends_its_sequence() -> None:
    for failing in (True, False):
        batcher = make()
        batcher.reserve(make_spec("a", 7, 60))
        while not (plan := batcher.plan()) or not plan.sequences[0].drafted:
            assert plan is not None
            batcher.commit(output_of(plan, cycle))
        bad = StepOutput(plan.step, ((),), frozenset({0}))
        (update,) = batcher.fail_step(plan.step, "boom") if failing else batcher.commit(bad)
        assert update.finish == "error"
        batcher.zeroed(batcher.take_blocks_to_zero())
        batcher.check()
        assert batcher.is_idle


def test_what_counts_of_the_tokens_drawn() -> None:
    row = ScheduledSequence("a", 5, (1, 2, 3, 4), ((0, 1),), 4, SamplingParams(max_tokens=9), drafted=3)
    assert row.num_sampled == 4
    assert row.that_count((2, 3, 4, 5)) == (2, 3, 4, 5)
    assert row.that_count((2, 3, 9, 5)) == (2, 3, 9)
    assert row.that_count((9, 3, 4, 5)) == (9,)
    plan = StepPlan(1, (row,))
    for count in (1, 2, 4):
        require_fit(plan, StepOutput(1, ((2, 3, 4, 5)[:count],)))
    for count in (0, 5):
        with pytest.raises(ValueError, match="were to be sampled"):
            require_fit(plan, StepOutput(1, ((2,) * count,)))


# ------------------------------------------------------------------------------------- how much is guessed


def test_rows_that_cost_nothing_are_all_guessed_and_dear_ones_are_not() -> None:
    wants = [Draftable(0.6, 5, 100)]
    assert draft_lengths(FREE_ROWS, wants, 1, 100, 32) == [5]
    assert draft_lengths(DEAR_ROWS, wants, 1, 100, 32) == [0]
    assert draft_lengths(FREE_ROWS, wants, 1, 100, 3) == [3], "no more than the step takes"


def test_where_rows_begin_to_cost_the_likelier_guesses_come_first() -> None:
    model = StepTimeModel(base_s=0.0, token_s=0.01, sequence_s=0.0, context_s=0.0, floor_s=0.06)
    likely, unlikely = draft_lengths(model, [Draftable(0.9, 8, 10), Draftable(0.3, 8, 10)], 2, 20, 32)
    assert likely > unlikely
    assert 2 + likely + unlikely <= 7, "six rows cost nothing"


def rate_of(model: StepTimeModel, wants: list[Draftable], lengths: tuple[int, ...]) -> float:
    """Tokens a second that such lengths can be expected to make."""
    tokens, seen = float(len(wants)), sum(want.context for want in wants)
    for want, length in zip(wants, lengths, strict=True):
        tokens += sum(want.chance**j for j in range(1, length + 1))
        seen += sum(want.context + j for j in range(1, length + 1))
    return tokens / (model.predict(len(wants) + sum(lengths), len(wants), seen) + (OVERHEAD_S if any(lengths) else 0.0))


def test_lengths_are_the_best_of_all_that_there_are() -> None:
    """Against trying every pair of lengths out."""
    rng = random.Random(3)
    for _ in range(100):
        floor_s, context_s = rng.uniform(0, 0.04), rng.choice([0.0, 1e-6])
        model = StepTimeModel(rng.uniform(0, 0.01), rng.uniform(0, 0.01), 0.0, context_s, floor_s)
        wants = [Draftable(rng.uniform(0.05, 0.98), rng.randrange(1, 6), rng.randrange(1, 4) * 100) for _ in range(2)]
        got = draft_lengths(model, wants, 2, sum(want.context for want in wants), 32)
        every = itertools.product(*(range(want.most + 1) for want in wants))
        best = max(rate_of(model, wants, lengths) for lengths in every)
        assert rate_of(model, wants, (got[0], got[1])) >= best / (1 + MARGIN + 0.01)


def test_what_cannot_pay_is_seen_at_once_and_nothing_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, cases = random.Random(4), []
    for _ in range(400):
        count = rng.randrange(1, 12)
        model = StepTimeModel(
            rng.uniform(0, 0.02), rng.uniform(0, 0.005), rng.uniform(0, 1e-3), 1e-7, rng.uniform(0, 0.05)
        )
        wants = [
            Draftable(rng.uniform(0.05, 0.98), rng.randrange(1, 9), 500) for _ in range(rng.randrange(1, count + 1))
        ]
        cases.append((model, wants, count, 500 * count, 32))
    pruned = [draft_lengths(*case) for case in cases]
    monkeypatch.setattr(draft_length, "_most_rate", lambda *case: math.inf)
    assert [draft_lengths(*case) for case in cases] == pruned
    assert 50 < sum(any(lengths) for lengths in pruned) < 350


def test_a_record_learns_and_pauses_and_tries_again() -> None:
    record = DraftRecord()
    for _ in range(20):
        record.verified(LONG_MATCH, 4, 0, 0)
    assert record.chance(LONG_MATCH) < 0.1
    assert record.chance(3) == FIRST_CHANCES[0], "short matches are another matter"
    pauses = []
    for at in range(0, 5000, 500):
        record.does_not_pay(LONG_MATCH, at)
        pauses.append(record.resumes_at - at)
        assert record.chance(LONG_MATCH) == FIRST_CHANCES[1], "after the pause it is given a chance"
    assert pauses[:5] == [16, 32, 64, 128, 256]
    assert pauses[-1] == 256
    record.verified(LONG_MATCH, 4, 4, 0)
    record.does_not_pay(LONG_MATCH, 9000)
    assert record.resumes_at == 9016
    for _ in range(200):
        record.verified(9, 8, 8, 0)
    assert 0.9 < record.chance(9) < 1


def test_a_short_match_that_does_not_pay_is_looked_at_again_when_it_may_be_long() -> None:
    record = DraftRecord()
    for _ in range(20):
        record.verified(3, 4, 0, 0)
    assert record.chance(3) < 0.1
    record = DraftRecord(_chances=[record.chance(3), FIRST_CHANCES[1]])
    record.does_not_pay(3, 100)
    assert record.resumes_at == 100 + LONG_MATCH - 3
    tries = 1
    while record.chance(3) < 0.4 and tries < 200:
        record.does_not_pay(3, 100)
        tries += 1
    assert 20 < tries < 200, "and now and then it is given a chance"


@pytest.mark.parametrize("every", [0, 3])
def test_a_text_without_repeats_is_looked_at_less_and_less(every: int) -> None:
    """One of which every third guess is wrong, too."""
    record, at, looks = DraftRecord(), 0, 0
    while at < 1000:
        if at >= record.resumes_at:
            if every and looks % every == 0:
                record.verified(3, 1, 0, at)
            else:
                record.found_nothing(at)
            looks += 1
        at += 1
    assert 20 < looks < 70


@pytest.mark.parametrize(("times", "speculates"), [(1.0, True), (2.9, False)])
def test_steps_that_take_longer_than_thought_end_speculation_for_a_while(times: float, speculates: bool) -> None:
    """A guess that is right makes two tokens of a step, which do not pay where it takes nearly three times as long."""
    batcher = make(depth=0, most_drafted=1, num_blocks=400)
    batcher.reserve(make_spec("a", 7, 600))
    drafted = list[bool]()
    while (plan := batcher.plan()) is not None:
        drafted.append(any(row.drafted for row in plan.sequences))
        seconds = FREE_ROWS.floor_s * (times if drafted[-1] else 1.0)
        batcher.commit(replace(output_of(plan, cycle), duration_s=seconds))
    assert any(drafted)
    late = sum(drafted[-200:])
    assert late > 150 if speculates else late < 10


def test_what_was_dear_is_tried_again() -> None:
    costs = DraftCosts()
    for _ in range(50):
        costs.took(True, 3.0, 1.0)
        costs.took(False, 1.0, 1.0)
    assert costs.dearer > 2
    for _ in range(5000):
        costs.took(False, 1.0, 1.0)
    assert costs.dearer < 1.05
    for seconds, predicted_s in ((0.0, 1.0), (1.0, 0.0)):
        costs.took(True, seconds, predicted_s)
    costs.took(True, 1e9, 1.0)
    assert costs.dearer < 1.3, "one that was kept waiting says little"


# ------------------------------------------------------------------------------------------ where it is set


def test_a_decode_worker_speculates_where_it_is_set(tmp_path: Path) -> None:
    def most(role: str, **engine: Any) -> int:
        return worker_options(Settings.model_validate({"engine": engine}), role, {"HOME": str(tmp_path)}).most_drafted

    assert most("decode") == 0, "off unless somebody asks for it"
    assert most("decode", speculation="prompt-lookup") == 8
    assert most("decode", speculation="prompt-lookup", speculation_max_tokens=3) == 3
    assert most("prefill", speculation="prompt-lookup") == 0
    for bad in ({"speculation": "draft"}, {"speculation_max_tokens": 0}, {"speculation_max_tokens": 33}):
        with pytest.raises(ValidationError):
            Settings.model_validate({"engine": bad})


def test_a_worker_with_a_gpu_refuses_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_engine, "_device", lambda options: "cuda")
    options = WorkerOptions(tmp_path, tmp_path / "kv", device="auto", most_drafted=8)
    with pytest.raises(SettingsError, match="prompt-lookup runs on CPUs only") as refused:
        open_worker_engine(options, WorkerId("w"))
    assert refused.value.param == "engine.speculation"
