"""The batcher and hand-off: sources of blocks, and sequences whose KV comes from elsewhere."""

from __future__ import annotations

import pytest

from tests.unit.batcher_support import (
    constant,
    make_batcher,
    make_spec,
    output_of,
    run_dry,
    shape,
    tag_all,
    used,
)


def test_compute_only_reports_blocks_chunk_by_chunk_and_keeps_them_until_unpinned() -> None:
    batcher = make_batcher(chunk_size=6, depth=1)
    reservation = batcher.reserve(make_spec(prompt=10, compute_only=True))
    zero = batcher.take_blocks_to_zero()
    assert zero == ((0, reservation.tables[0].block_ids[2]),)  # the tail of two tokens
    batcher.zeroed(zero)
    updates = run_dry(batcher)
    assert [[block.position for block in u.completed[0]] for u in updates] == [[0], [1]]
    assert [u.num_computed_tokens for u in updates] == [6, 10]
    assert [u.finish for u in updates] == ["", "computed"]
    assert updates[0].completed[0][0].token_ids == (100, 101, 102, 103)
    assert used(batcher) == [3]
    assert batcher.gauges().ended == 1
    assert batcher.unpin("a")
    assert not batcher.unpin("a")
    assert batcher.is_idle


def test_compute_only_of_what_is_cached_ends_at_once() -> None:
    batcher = make_batcher()
    batcher.reserve(make_spec("a", prompt=8, max_tokens=2))
    [tags] = tag_all(batcher, run_dry(batcher))
    reservation = batcher.reserve(make_spec("b", prompt=8, compute_only=True, tags=(tuple(tags),)))
    assert reservation.num_cached_tokens == 8
    [update] = batcher.take_updates()
    assert (update.finish, update.num_computed_tokens) == ("computed", 8)
    assert batcher.plan() is None
    assert batcher.unpin("b")


@pytest.mark.parametrize("late", [False, True])
def test_cancel_releases_a_source(late: bool) -> None:
    batcher = make_batcher()
    batcher.reserve(make_spec(prompt=8, compute_only=True))
    if late:
        run_dry(batcher)
    batcher.cancel("a")
    assert batcher.is_idle


@pytest.mark.parametrize("fault", ["step", "row", "distrust"])
def test_a_source_that_fails_between_chunks_keeps_its_blocks_while_a_peer_may_read_them(fault: str) -> None:
    batcher = make_batcher(chunk_size=4)
    batcher.reserve(make_spec(prompt=8, compute_only=True))
    first = batcher.plan()
    assert first is not None
    [named] = batcher.commit(output_of(first))
    assert [block.position for block in named.completed[0]] == [0]
    second = batcher.plan()
    assert second is not None
    if fault == "step":
        updates = batcher.fail_step(second.step, "boom")
    else:
        if fault == "distrust":
            batcher.distrust("a")
        updates = batcher.commit(output_of(second, bad_rows=frozenset({0} if fault == "row" else ())))
    assert [u.finish for u in updates] == ["error"]
    assert used(batcher) == [2]
    assert batcher.take_blocks_to_zero() == ()
    batcher.check()
    batcher.cancel("a")
    assert len(batcher.take_blocks_to_zero()) == (0 if fault == "step" else 2)
    assert batcher.is_idle
    batcher.check()


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_tail_is_held_until_it_is_zeroed(groups: int, together: bool) -> None:
    batcher = make_batcher(groups=groups)
    batcher.reserve(make_spec(prompt=6, compute_only=True))
    blocks = batcher.take_blocks_to_zero()
    assert len(blocks) == groups
    batcher.cancel("a")
    for part in [blocks] if together else [(block,) for block in blocks]:
        assert used(batcher) == [2] * groups
        batcher.check()
        batcher.zeroed(part)
    assert batcher.is_idle
    batcher.check()


def test_handed_off_kv_is_not_computed_again() -> None:
    batcher = make_batcher()
    batcher.reserve(make_spec(prompt=10, max_tokens=2, await_kv=True))
    assert batcher.plan() is None
    assert batcher.gauges().queue_tokens == 0
    assert batcher.kv_received("a", 4)
    assert batcher.kv_received("a", 9)
    with pytest.raises(ValueError, match="at most 9"):
        batcher.kv_received("a", 10)
    assert batcher.release("a")
    assert not batcher.release("a")
    assert not batcher.kv_received("a", 9)
    [pulled] = batcher.take_updates()
    assert [block.position for block in pulled.completed[0]] == [0, 1]
    plan = batcher.plan()
    assert shape(plan) == [("a", 9, 1)]
    assert plan is not None
    assert plan.sequences[0].num_logits == 1
    batcher.commit(output_of(plan, constant(50)))
    totals = run_dry(batcher)[-1].totals
    assert totals is not None
    assert (totals.received_tokens, totals.cached_tokens, totals.computed_tokens) == (9, 0, 2)


def test_a_hand_off_that_stops_half_way_is_finished_here() -> None:
    batcher = make_batcher()
    batcher.reserve(make_spec(prompt=10, max_tokens=1, await_kv=True))
    batcher.kv_received("a", 4)
    batcher.release("a")
    assert shape(batcher.plan()) == [("a", 4, 6)]


def test_a_pull_in_flight_holds_the_blocks_of_a_cancelled_sequence() -> None:
    batcher = make_batcher()
    batcher.reserve(make_spec(await_kv=True))
    assert batcher.pin("a")
    batcher.cancel("a")
    assert used(batcher) == [3]
    assert not batcher.release("a")
    assert batcher.unpin("a")
    assert batcher.is_idle
    assert not batcher.pin("a")
