"""A plan as one buffer of words: what lies where, padding, sources of tokens in flight, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shared.contracts.sampling import SamplingParams
from shared.engine.device_batch import (
    BatchWriter,
    StepShape,
    buffer_words,
    decode_buckets,
    decode_shape,
    is_decode,
    mixed_shape,
    parts_of,
    views,
)
from shared.engine.sampling_lines import StepLines
from shared.engine.step_plan import IN_FLIGHT, ScheduledSequence, StepPlan
from shared.kv.layout import LayerGroup

GROUP = LayerGroup("full", (0,), num_kv_heads=1, head_dim=8, block_size=8, dtype="float32")
SEEDED = SamplingParams(max_tokens=4, temperature=0.5, top_k=7, top_p=0.25, seed=2**64 - 3)
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


def make(seq_id: str, start: int, tokens: tuple[int, ...], table: tuple[int, ...], **changes: Any) -> ScheduledSequence:
    values: dict[str, Any] = {"num_logits": 1, "sampling": GREEDY} | changes
    return ScheduledSequence(seq_id, start, tokens, (table,), **values)


def written(plan: StepPlan, shape: StepShape, samples: dict[str, tuple[int, int]] | None = None) -> dict[str, Any]:
    buffer = np.full(buffer_words(shape), -99, np.int32)
    BatchWriter(buffer, (GROUP,), (20,), vocab_size=100).write(plan, shape, samples or {})
    return {name: part.tolist() for name, part in views(buffer, parts_of(shape)).items()}


def test_a_chunk_beside_a_decode_step() -> None:
    plan = StepPlan(
        3,
        (
            make("a", 6, (11, 12, 13), (4, 2), num_logits=2, sampling=SEEDED, stored_from=7),
            make("b", 9, (IN_FLIGHT,), (5, 6)),
            make("c", 0, (7,), (9,), num_logits=0, sampling=None),
        ),
    )
    assert not is_decode(plan)
    shape = mixed_shape(plan, 1)
    assert shape == StepShape(16, 3, 16, 1, 0)
    found = written(plan, shape, {"b": (4, 2), "a": (0, 1)})
    assert found["token_ids"] == [11, 12, 13, 0, 7] + [0] * 11
    assert found["token_source"] == [-1, -1, -1, 5, -1] + [-1] * 11
    assert found["positions"] == [6, 7, 8, 9, 0] + [0] * 11
    assert found["cu_seqlens_q"] == [0, 3, 4, 5]
    assert found["seq_lens"] == [9, 10, 1]
    assert found["slots.0"] == [-1, 4 * 8 + 7, 2 * 8, 6 * 8 + 1, 9 * 8] + [-1] * 11
    assert found["logit_rows"] == [1, 2, 3] + [0] * 13
    assert found["temperature"] == [0.5, 0.5, 0.0] + [0.0] * 13
    assert found["top_p"] == [0.25, 0.25, 1.0] + [1.0] * 13
    assert found["top_k"] == [7, 7, 0] + [0] * 13
    assert found["seed"] == [-3, -3, 0] + [0] * 13
    assert found["draw_position"] == [8, 9, 10] + [0] * 13


def test_a_decode_step_is_padded_to_its_bucket_and_brings_its_tables() -> None:
    plan = StepPlan(1, tuple(make(f"s{i}", 20, (i,), (i, i + 1, i + 2)) for i in range(3)))
    assert is_decode(plan)
    shape = decode_shape(plan, (GROUP,), max_len=64, bucket=4)
    assert shape == StepShape(4, 4, 4, 1, 4)
    found = written(plan, shape)
    assert found["tables.0"][:3] == [[0, 1, 2, 0], [1, 2, 3, 0], [2, 3, 4, 0]]
    assert found["cu_seqlens_q"] == [0, 1, 2, 3, 3]
    assert found["seq_lens"] == [21, 21, 21, 0]
    assert found["slots.0"] == [2 * 8 + 4, 3 * 8 + 4, 4 * 8 + 4, -1]
    # places do not depend on how long the tables are: a captured step finds them again
    fewer = parts_of(StepShape(4, 4, 4, 1, 0))
    assert {name: part.begin for name, part in fewer.items()} == {
        name: part.begin for name, part in parts_of(shape).items()
    }


def test_a_buffer_is_filled_again() -> None:
    shape = StepShape(2, 2, 2, 1, 4)
    buffer = np.zeros(buffer_words(shape), np.int32)
    writer = BatchWriter(buffer, (GROUP,), (20,), vocab_size=100)
    tables = views(buffer, parts_of(shape))["tables.0"]
    writer.write(StepPlan(1, (make("a", 9, (1,), (3, 4)), make("b", 17, (1,), (5, 6, 7)))), shape, {})
    writer.write(StepPlan(2, (make("b", 18, (1,), (5, 6, 7)), make("c", 0, (1,), (8,)))), shape, {})
    assert tables.tolist() == [[5, 6, 7, 0], [8, 0, 0, 0]]
    # a table with blocks for later steps than its columns show
    writer.write(StepPlan(3, (make("b", 19, (1,), (5, 6, 7, 8, 9, 10)),)), shape, {})
    assert tables.tolist()[0] == [5, 6, 7, 8]


def test_what_draws_look_at_beside_the_logits() -> None:
    params = SamplingParams(
        max_tokens=4, min_p=0.25, repetition_penalty=1.5, presence_penalty=-0.5, frequency_penalty=0.75, logprobs=3
    )
    special = StepPlan(
        1,
        (
            make("a", 2, (5,), (1,)),
            make("b", 0, (4, 5, 6), (2,), num_logits=3, sampling=params, scored=(5, 6), score_top=2),
            make("c", 2, (9,), (3,), sampling=None, num_logits=1, scored=(7,), score_top=0),
            make("d", 0, (9, 8), (4,), sampling=params, num_logits=2),
        ),
    )
    shape = mixed_shape(special, 1)
    buffer = np.full(buffer_words(shape), -99, np.int32)
    writer = BatchWriter(buffer, (GROUP,), (20,), vocab_size=100)
    parts = views(buffer, parts_of(shape))
    writer.write(special, shape, {}, StepLines(penalties={1: 6}, biases={1: 5, 3: 0}, masks={3: 2}))
    found = {name: parts[name].tolist()[:8] for name in parts}
    assert found["min_p"] == [0, 0, 0, 0.25, 0, 0.25, 0.25, 0]
    assert found["repetition"] == [1, 1, 1, 1.5, 1, 1.5, 1.5, 1]
    assert found["presence"] == [0, 0, 0, -0.5, 0, -0.5, -0.5, 0]
    assert found["frequency"] == [0, 0, 0, 0.75, 0, 0.75, 0.75, 0]
    assert found["penalty_line"] == [-1, -1, -1, 6, -1, -1, -1, -1]
    assert found["bias_line"] == [-1, -1, -1, 5, -1, 0, 0, -1]
    assert found["mask_line"] == [-1, -1, -1, -1, -1, 2, 3, -1]
    assert found["scored"] == [-1, 5, 6, -1, 7, -1, -1, -1]
    assert found["top"] == [0, 2, 2, 3, 0, 3, 3, 0]
    # rows that are scored draw nothing
    assert found["temperature"] == [0, 0, 0, 1, 0, 1, 1, 0]
    assert found["draw_position"][3] == 3

    plain = StepPlan(2, (*(make(name, 2, (5,), (1,)) for name in "ab"), make("c", 0, (5,) * 5, (2,), num_logits=5)))
    for step, lines in ((plain, None), (plain, None), (special, StepLines()), (plain, None)):
        writer.write(step, StepShape(16, 4, 16, 1, 0), {}, lines)
    for name, nothing in (("scored", -1), ("top", 0), ("bias_line", -1), ("repetition", 1), ("min_p", 0)):
        assert set(parts[name].tolist()) == {nothing}


@pytest.mark.parametrize(
    ("sequence", "what"),
    [
        (make("a", 0, (100,), (1,)), "token id outside"),
        (make("a", 0, (-2,), (1,)), "token id outside"),
        (make("a", 0, (1,), (1,), sampling=None, scored=(100,)), "scores a token id outside"),
        (make("a", 0, (1,), (1,), sampling=None, scored=(-1,)), "scores a token id outside"),
        (make("a", 0, (1,), (20,)), "block outside"),
        (make("a", 0, (1,), (-1,)), "block outside"),
        (make("a", 8, (1,), (1,)), "do not cover"),
        (make("a", 1, (IN_FLIGHT,), (1,)), "no step samples"),
        (make("b", 1, (IN_FLIGHT, IN_FLIGHT), (1,)), "no step samples"),
        (make("b", 1, (IN_FLIGHT, 5), (1,)), "follows one in flight"),
        (make("a", 0, (), (1,), num_logits=0), "0 tokens"),
    ],
)
def test_a_plan_that_breaks_its_contract_is_refused(sequence: ScheduledSequence, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        written(StepPlan(1, (sequence,)), StepShape(16, 1, 16, 1, 4), {"b": (0, 1)})


def test_buckets() -> None:
    assert decode_buckets(1) == (1,)
    assert decode_buckets(9) == (1, 2, 4, 8, 16)
    assert decode_buckets(200)[-4:] == (112, 128, 160, 192, 224)[-4:]
    assert decode_buckets(256)[-1] == 256
