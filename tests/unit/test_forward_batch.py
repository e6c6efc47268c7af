from __future__ import annotations

import pytest

from shared.engine.forward_batch import InFlightToken, build_forward_batch
from shared.engine.step_plan import IN_FLIGHT, ScheduledSequence, StepPlan
from shared.kv.layout import LayerGroup
from tests.tiny_models import sequence

FULL = LayerGroup("full", (0, 2), num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
WINDOW = LayerGroup("window", (1,), num_kv_heads=1, head_dim=8, block_size=8, dtype="float32", sliding_window=8)


def plan(*sequences: ScheduledSequence) -> StepPlan:
    return StepPlan(1, sequences)


def test_two_groups_ragged() -> None:
    chunk = ScheduledSequence("a", 3, (10, 11, 12), ((7, 2), (5,)), 0, None, stored_from=4)
    decode = ScheduledSequence("b", 8, (20,), ((1, 0, 9), (3, 6)), 1, None)
    verify = ScheduledSequence("c", 0, (30, 31, 32), ((4,), (8,)), 3, None)
    batch = build_forward_batch(plan(chunk, decode, verify), (FULL, WINDOW))
    assert (batch.num_tokens, batch.num_rows) == (7, 8)
    assert batch.token_ids.tolist() == [10, 11, 12, 20, 30, 31, 32, 0]
    assert batch.positions.tolist() == [3, 4, 5, 8, 0, 1, 2, 0]
    assert batch.cu_seqlens_q == (0, 3, 4, 7)
    assert batch.seq_lens == (6, 9, 3)
    full, window = batch.groups
    assert full.slot_mapping == (-1, 2 * 4, 2 * 4 + 1, 9 * 4, 16, 17, 18, -1)
    assert window.slot_mapping == (-1, 5 * 8 + 4, 5 * 8 + 5, 6 * 8, 64, 65, 66, -1)
    assert full.block_tables == ((7, 2), (1, 0, 9), (4,))
    assert window.block_tables == ((5,), (3, 6), (8,))
    assert batch.logit_rows.tolist() == [3, 4, 5, 6]
    assert [list(span) for span in batch.logit_ranges] == [[], [0], [1, 2, 3]]


def test_tokens_in_flight() -> None:
    first = sequence("a", [5, IN_FLIGHT], [0], start=1)
    second = sequence("b", [IN_FLIGHT, IN_FLIGHT], [1])
    batch = build_forward_batch(plan(first, second), (FULL,))
    assert batch.in_flight == (InFlightToken(1, "a", 1), InFlightToken(2, "b", 2), InFlightToken(3, "b", 1))
    assert batch.token_ids.tolist()[:4] == [5, 0, 0, 0]


@pytest.mark.parametrize(
    "bad",
    [
        sequence("a", [], [0]),
        sequence("a", [1], [0], num_logits=2),
        sequence("a", [1], [], start=0),
        sequence("a", [1], [0], start=4),
        sequence("a", [IN_FLIGHT, 3], [0]),
        ScheduledSequence("a", 0, (1,), ((0,), (0,)), 1, None),
    ],
    ids=["no tokens", "too many logits", "no block", "short table", "known after in flight", "wrong groups"],
)
def test_a_plan_that_breaks_its_contract_is_refused(bad: ScheduledSequence) -> None:
    with pytest.raises(ValueError, match="a: "):
        build_forward_batch(plan(bad), (FULL,))


def test_an_empty_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        build_forward_batch(plan(), (FULL,))
