"""Which lines of a device's sampling state sequences draw by, and when those are written."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from shared.contracts.sampling import SamplingParams
from shared.engine.sampling_lines import LineText, PlainRows, SamplingLines
from shared.engine.step_plan import IN_FLIGHT, ScheduledSequence, StepPlan

PENALIZED = SamplingParams(max_tokens=9, presence_penalty=1.0)
BIASED = SamplingParams(max_tokens=9, logit_bias=((7, 2.0), (3, -1.0)))
PROMPT = (4, 5, 6)


def row(seq_id: str, start: int, token: int, sampling: SamplingParams, **more: Any) -> ScheduledSequence:
    values = {"num_prompt_tokens": 3, "history": PROMPT[:start] if start <= 3 else (*PROMPT, *[8] * (start - 3))} | more
    return ScheduledSequence(seq_id, start, (token,), ((0,),), 1, sampling, **values)


def plan(*rows: ScheduledSequence) -> StepPlan:
    return StepPlan(1, rows)


def test_a_line_is_written_once_while_the_device_counts_along() -> None:
    lines = SamplingLines(2, 100, 8)
    first = lines.assign(plan(row("a", 2, 6, PENALIZED)))
    assert first.penalties == {0: 0}
    assert first.biases == {}
    assert first.texts == [LineText(0, (PROMPT, ()))]
    # drawn and not yet read, then read
    assert lines.assign(plan(row("a", 3, IN_FLIGHT, PENALIZED))).texts == []
    assert lines.assign(plan(row("a", 4, 8, PENALIZED))).texts == []
    # a step was left out, and nobody knows what the device drew meanwhile: told anew
    assert lines.assign(plan(row("a", 7, 9, PENALIZED))).texts == [LineText(0, (PROMPT, (8, 8, 8, 8, 9)))]


def test_a_line_goes_to_who_needs_it_and_comes_back_with_all_tokens() -> None:
    lines = SamplingLines(2, 100, 8)
    lines.assign(plan(row("a", 2, 6, PENALIZED), row("b", 2, 6, PENALIZED)))
    taken = lines.assign(plan(row("c", 2, 6, PENALIZED), row("a", 3, IN_FLIGHT, PENALIZED)))
    # b drew longest ago, and a is part of the step
    assert taken.penalties == {0: 1, 1: 0}
    assert [text.line for text in taken.texts] == [1]
    back = lines.assign(plan(row("b", 4, 9, PENALIZED)))
    assert back.texts == [LineText(back.penalties[0], (PROMPT, (8, 9)))]
    with pytest.raises(ValueError, match="b has penalties, and a token before 7 that nobody knows"):
        lines.assign(plan(row("b", 6, IN_FLIGHT, PENALIZED)))


def test_plain_steps_are_told_from_those_that_ask_for_more() -> None:
    plain = PlainRows()
    some = [SamplingParams(max_tokens=9, temperature=0.5, top_k=3, top_p=0.5, seed=i) for i in range(3)]
    rows = [row(f"s{i}", 2, 6, params) for i, params in enumerate(some)]
    assert plain.all_of(rows[:2])
    assert plain.all_of(rows)
    for changes in (
        {"min_p": 0.1},
        {"presence_penalty": -1.0},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"logit_bias": ((5, 1.0),)},
        {"min_tokens": 2},
        {"logprobs": 0},
        {"grammar": "{}"},
    ):
        special = row("s1", 2, 6, msgspec.structs.replace(some[1], **changes))
        for _ in range(2):
            assert not plain.all_of([rows[0], special, rows[2]])
        assert plain.all_of(rows)
    scored = ScheduledSequence("s", 0, (1, 2), ((0,),), 2, None, scored=(2, 3))
    assert not plain.all_of([scored])
    prompt = ScheduledSequence("s", 0, (1, 2), ((0,),), 0, None)
    assert plain.all_of([rows[0], prompt])


def test_who_needs_no_line_gets_none() -> None:
    lines = SamplingLines(1, 100, 8)
    plain = SamplingParams(max_tokens=9, min_tokens=2, min_p=0.5, logprobs=3)
    found = lines.assign(
        plan(row("a", 2, 6, plain), ScheduledSequence("b", 0, (1, 2), ((0,),), 0, None), row("c", 2, 6, BIASED))
    )
    assert (found.penalties, found.biases) == ({}, {2: 0})


def test_biases_are_written_by_id_and_again_when_bans_end() -> None:
    lines = SamplingLines(1, 100, 8)
    told = lines.assign(plan(row("a", 2, 6, BIASED, banned=(2, 3)))).texts
    assert told == [LineText(0, None, ((2, -math.inf), (3, -math.inf), (3, -1.0), (7, 2.0)))]
    assert lines.assign(plan(row("a", 3, IN_FLIGHT, BIASED, banned=(2, 3)))).texts == []
    assert lines.assign(plan(row("a", 4, IN_FLIGHT, BIASED))).texts == [LineText(0, None, ((3, -1.0), (7, 2.0)))]
    only_bans = SamplingParams(max_tokens=9, min_tokens=1)
    assert lines.assign(plan(row("b", 2, 6, only_bans, banned=(2,)))).biases == {0: 0}
    assert lines.assign(plan(row("b", 3, IN_FLIGHT, only_bans))).biases == {}


def test_another_sequence_of_the_same_name_gets_a_line_of_its_own_text() -> None:
    lines = SamplingLines(2, 100, 8)
    lines.assign(plan(row("a", 2, 6, PENALIZED)))
    again = SamplingParams(max_tokens=9, presence_penalty=1.0)
    assert lines.assign(plan(row("a", 3, 9, again))).texts == [LineText(0, (PROMPT, (9,)))]
    lines.forget(plan(row("a", 3, 9, again)))
    assert lines.assign(plan(row("a", 4, 9, again))).texts == [LineText(0, (PROMPT, (8, 9)))]
