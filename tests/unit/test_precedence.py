"""Higher classes do not wait for places or blocks that lower ones hold."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from shared.contracts.grants import CLASSES
from shared.engine.batcher import Batcher
from shared.engine.block_room import NoBlocks, NoSlot
from shared.engine.preemption import PASSES
from shared.engine.sequence_update import SequenceUpdate
from shared.kv.block_pool import GroupPool
from tests.unit.batcher_support import fifty, make_batcher, make_spec, output_of, run_dry, shape, step, used


def steady(seq_id: str, position: int) -> int:
    """Tokens that depend on sequence and position, and never end."""
    return 8 + (sum(seq_id.encode()) + position * 5) % 11


def events(updates: list[SequenceUpdate]) -> list[tuple[str, str]]:
    return [(update.seq_id, update.event) for update in updates if update.event]


def tokens_of(updates: list[SequenceUpdate], seq_id: str) -> list[int]:
    return [token for update in updates if update.seq_id == seq_id for token in update.token_ids]


def full_of_batch(depth: int = 0, places: int = 4, num_blocks: int = 64) -> tuple[Batcher, list[SequenceUpdate]]:
    """As many batch sequences as there are places, all decoding."""
    batcher = make_batcher(num_blocks=num_blocks, depth=depth, max_num_seqs=places)
    for i in range(places):
        batcher.reserve(make_spec(f"b{i}", prompt=4, max_tokens=20, klass="batch"))
    return batcher, [update for _ in range(3) for update in step(batcher, steady)]


@pytest.mark.parametrize("klass", ["interactive", "analysis"])
def test_a_higher_class_takes_the_place_of_the_newest_of_the_lowest_at_once(klass: str) -> None:
    batcher, before = full_of_batch()
    reservation = batcher.reserve(make_spec("high", prompt=6, max_tokens=3, klass=klass))
    assert reservation.tables[0].block_ids
    assert not reservation.arriving
    plan = batcher.plan()
    assert plan is not None
    assert {row.seq_id for row in plan.sequences} == {"b0", "b1", "b2", "high"}
    updates = before + batcher.commit(output_of(plan, steady)) + run_dry(batcher, steady)
    assert events(updates) == [("b3", "preempted"), ("b3", "resumed")]
    ends = [update.seq_id for update in updates if update.finish]
    assert ends[0] == "high"
    assert len(ends) == 5
    for seq_id in ("b0", "b1", "b2", "b3"):
        tokens = tokens_of(updates, seq_id)
        assert tokens == [steady(seq_id, 4 + i) for i in range(len(tokens))]
    assert batcher.is_idle


def test_a_step_in_flight_ends_first_but_the_place_is_had_at_once() -> None:
    batcher, _ = full_of_batch(depth=1)
    flying = [batcher.plan(), batcher.plan()]
    assert not batcher.reserve(make_spec("high", prompt=6, max_tokens=3)).arriving
    for plan in flying:
        assert plan is not None
        batcher.commit(output_of(plan, fifty))
    assert {name for name, _, _ in shape(batcher.plan())} == {"b0", "b1", "b2", "high"}
    batcher.check()


def test_blocks_of_lower_classes_come_when_their_steps_have_ended() -> None:
    batcher, _ = full_of_batch(depth=1, num_blocks=12)
    flying = [batcher.plan(), batcher.plan()]
    reservation = batcher.reserve(make_spec("high", prompt=20, max_tokens=3))
    assert reservation.arriving
    assert not reservation.tables[0].block_ids
    batcher.check()
    updates: list[SequenceUpdate] = []
    for plan in flying:
        assert plan is not None
        updates += batcher.commit(output_of(plan, fifty))
        batcher.check()
    plan = batcher.plan()
    updates += batcher.take_updates()
    assert ("high", "admitted") in events(updates)
    assert "high" in {name for name, _, _ in shape(plan)}
    assert plan is not None
    updates += batcher.commit(output_of(plan, fifty)) + run_dry(batcher, fifty)
    assert [update.seq_id for update in updates if update.finish].index("high") == 0
    assert len([update for update in updates if update.finish]) == 5
    assert used(batcher) == [0]


def test_what_waits_for_kv_gets_its_blocks_too() -> None:
    batcher, _ = full_of_batch(depth=1, num_blocks=12)
    flying = [batcher.plan(), batcher.plan()]
    assert batcher.reserve(make_spec("high", prompt=20, max_tokens=3, await_kv=True)).arriving
    for plan in flying:
        assert plan is not None
        batcher.commit(output_of(plan, fifty))
    batcher.plan()
    assert ("high", "admitted") in events(batcher.take_updates())
    held = batcher.reservation("high")
    assert held is not None
    assert held.tables[0].block_ids
    assert not held.arriving
    assert batcher.pin("high")
    assert batcher.kv_received("high", 19)


def test_what_has_not_begun_gives_way_first_and_keeps_its_place_in_the_order() -> None:
    batcher = make_batcher(max_num_seqs=2)
    batcher.reserve(make_spec("old", prompt=4, max_tokens=8, klass="batch", await_kv=True))
    batcher.reserve(make_spec("new", prompt=4, max_tokens=8, klass="batch"))
    step(batcher)
    batcher.reserve(make_spec("high", prompt=4, max_tokens=2))
    assert events(batcher.take_updates()) == [("old", "revoked")]
    batcher.release("old")
    ends = [update.seq_id for update in run_dry(batcher) if update.finish]
    assert ends == ["high", "new", "old"]


@pytest.mark.parametrize("klass", ["analysis", "batch"])
def test_nobody_gives_way_to_an_equal_or_a_lower_class(klass: str) -> None:
    batcher = make_batcher(max_num_seqs=2)
    for i in range(2):
        batcher.reserve(make_spec(f"s{i}", klass="analysis"))
    step(batcher)
    with pytest.raises(NoSlot):
        batcher.reserve(make_spec("late", klass=klass))
    assert not events(batcher.take_updates())


def test_what_would_not_be_enough_is_not_taken() -> None:
    batcher = make_batcher(num_blocks=12, max_num_seqs=4)
    batcher.reserve(make_spec("long", prompt=24, max_tokens=8))
    batcher.reserve(make_spec("low", prompt=4, max_tokens=8, klass="batch"))
    step(batcher)
    with pytest.raises(NoBlocks):
        batcher.reserve(make_spec("high", prompt=24, max_tokens=8))
    assert not events(batcher.take_updates())


def test_choices_have_places_all_or_none() -> None:
    batcher = make_batcher(max_num_seqs=4)
    batcher.reserve(make_spec("same"))
    batcher.reserve(make_spec("low", klass="batch"))
    step(batcher)
    choices = [make_spec(f"c{i}", prompt=9, follows="c0" if i else "") for i in range(4)]
    with pytest.raises(NoSlot):
        batcher.require_room(choices)
    batcher.require_room(choices[:3])
    for spec in choices[:3]:
        batcher.reserve(spec)
    assert events(batcher.take_updates()) == [("low", "preempted")]
    ends = [update.seq_id for update in run_dry(batcher) if update.finish]
    assert ends[-1] == "low"
    assert set(ends) == {"same", "c0", "c1", "c2", "low"}


def test_choices_of_a_short_prompt_come_together_though_their_blocks_are_on_their_way() -> None:
    batcher, _ = full_of_batch(depth=1, num_blocks=12)
    flying = [batcher.plan(), batcher.plan()]
    choices = [make_spec(f"c{i}", prompt=2, max_tokens=7, follows="c0" if i else "") for i in range(3)]
    batcher.require_room(choices)
    assert [batcher.reserve(spec).arriving for spec in choices] == [True] * 3
    updates = []
    for plan in flying:
        assert plan is not None
        updates += batcher.commit(output_of(plan, fifty))
    ends = [update.seq_id for update in updates + run_dry(batcher) if update.finish]
    assert set(ends[:3]) == {"c0", "c1", "c2"}
    assert len(ends) == 7


def test_followers_of_a_lower_class_give_up_their_places_too() -> None:
    batcher = make_batcher(max_num_seqs=3, token_budget=8)
    for i in range(3):
        batcher.reserve(make_spec(f"b{i}", prompt=20, follows="b0" if i else "", klass="batch"))
    for i in range(3):
        batcher.reserve(make_spec(f"h{i}", prompt=4, max_tokens=2))
        batcher.check()
    with pytest.raises((NoSlot, NoBlocks)):
        batcher.reserve(make_spec("late"))
    ends = [update.seq_id for update in run_dry(batcher) if update.finish]
    assert set(ends[:3]) == {"h0", "h1", "h2"}
    assert set(ends[3:]) == {"b0", "b1", "b2"}


def test_a_flood_of_a_higher_class_does_not_keep_a_lower_one_out_for_ever() -> None:
    """Each newcomer takes the one place there is; the one below is passed over `PASSES` times between two blocks."""
    batcher = make_batcher(max_num_seqs=1)
    batcher.reserve(make_spec("low", prompt=4, max_tokens=21, klass="batch"))
    updates, let_in, made = step(batcher), 0, 0
    for _ in range(2000):
        try:
            batcher.reserve(make_spec(f"h{let_in}", prompt=1, max_tokens=2))
            let_in += 1
        except (NoSlot, NoBlocks):
            pass
        plan = batcher.plan()
        assert plan is not None
        got = batcher.take_updates() + batcher.commit(output_of(plan, fifty))
        batcher.check()
        updates += got
        made += len(tokens_of(got, "low"))
        if any(update.finish and update.seq_id == "low" for update in got):
            break
    end = next(update for update in updates if update.finish and update.seq_id == "low")
    assert end.totals is not None
    assert end.totals.completion_tokens == 21
    # five blocks of its own, and each stay but the first makes one
    assert 1 <= end.totals.preemptions <= 1 + 21 // 4
    assert let_in <= PASSES * (end.totals.preemptions + 1) + 1


def test_a_worker_says_what_each_class_can_have() -> None:
    batcher, _ = full_of_batch(num_blocks=20)
    interactive, analysis, batch = batcher.gauges().rooms
    assert len(CLASSES) == 3
    assert interactive == analysis
    assert (interactive.sequences, interactive.blocks) == (4, (20,))
    assert (batch.sequences, batch.blocks) == (0, (20 - 4 * 2 - 4,))
    batcher.reserve(make_spec("mid", prompt=4, max_tokens=8, klass="analysis"))
    interactive, analysis, batch = batcher.gauges().rooms
    assert (interactive.sequences, analysis.sequences) == (4, 3)
    assert batch.sequences == 0  # one of its own waits before it
    for i in range(1 + PASSES):  # the first takes a lower one's place, the others that same place while it is free
        assert batcher.gauges().rooms[0].sequences == 4
        batcher.reserve(make_spec(f"h{i}", prompt=1, max_tokens=1))
        batcher.cancel(f"h{i}")
    assert batcher.gauges().rooms[0].sequences == 0  # it is the turn of those who were passed over


def test_higher_ones_get_every_place_that_lower_ones_hold() -> None:
    places = 2 * PASSES
    batcher, _ = full_of_batch(places=places, num_blocks=512)
    for i in range(places):
        assert batcher.gauges().rooms[0].sequences == places - i
        batcher.reserve(make_spec(f"h{i}", prompt=4, max_tokens=20))
        step(batcher, steady)
        batcher.check()
    assert batcher.gauges().preempted == places
    assert len([update for update in run_dry(batcher, steady) if update.finish]) == 2 * places


def test_one_whose_last_step_is_in_flight_counts_once() -> None:
    """It goes by itself, and has a place that could be taken."""
    batcher = make_batcher(num_blocks=12, depth=1, max_num_seqs=2, token_budget=64)
    batcher.reserve(make_spec("low", prompt=36, max_tokens=1, klass="batch"))
    flying = batcher.plan()
    assert flying is not None
    assert batcher.gauges().rooms[0].blocks == (12,)
    assert batcher.reserve(make_spec("high", prompt=36, max_tokens=2)).arriving
    batcher.commit(output_of(flying, fifty))
    assert [update.seq_id for update in run_dry(batcher) if update.finish][-1] == "high"


def test_what_each_class_can_have_is_read_from_every_table_once(monkeypatch: pytest.MonkeyPatch) -> None:
    batcher = make_batcher(num_blocks=64, max_num_seqs=4)
    for i, klass in enumerate(("batch", "batch", "analysis", "interactive")):
        batcher.reserve(make_spec(f"s{i}", prompt=4 * (i + 1), max_tokens=8, klass=klass))
    step(batcher)
    read: list[int] = []

    def freed_in_turn(group: GroupPool, stages: Iterable[Iterable[Iterable[int]]]) -> list[int]:
        held = [[list(table) for table in tables] for tables in stages]
        read.extend(block for tables in held for table in tables for block in table)
        return [group.freed_by([table for tables in held[: i + 1] for table in tables]) for i in range(len(held))]

    rooms = batcher.gauges().rooms
    monkeypatch.setattr(GroupPool, "freed_in_turn", freed_in_turn)
    assert batcher.gauges().rooms == rooms
    assert read
    assert len(read) == len(set(read))
