"""The index's pure cores: fleet, block map, issued tags, generations."""

from __future__ import annotations

import logging
import random
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from services.prefix_cache_index.fleet import Fleet, Heard
from services.prefix_cache_index.index import REPLAY_RETRY_S, BlockIndex
from services.prefix_cache_index.issued import IssuedTags, Owner, salted
from shared.contracts.errors import Conflict, Forbidden
from shared.contracts.grants import Scope
from shared.contracts.ids import BlockTag, Incarnation, ScopeGeneration, TenantId, WorkerId
from shared.contracts.messages import BlockEvents, WorkerBeat
from shared.contracts.parts import GroupTags, Holder
from shared.security.generations import Generations

W1, W2 = WorkerId("decode-1"), WorkerId("decode-2")


def tag(number: int) -> BlockTag:
    return BlockTag(number.to_bytes(16, "big"))


def tags(*numbers: int, group: int = 0) -> GroupTags:
    return GroupTags(group, tuple(tag(number) for number in numbers))


def event(
    number: int,
    stored: tuple[GroupTags, ...] = (),
    removed: tuple[GroupTags, ...] = (),
    worker: WorkerId = W1,
    incarnation: int = 1,
    snapshot: bool = False,
) -> BlockEvents:
    return BlockEvents(
        worker=worker,
        incarnation=Incarnation(incarnation),
        number=number,
        stored=stored,
        removed=removed,
        snapshot=snapshot,
    )


def make_index(*workers: WorkerId) -> BlockIndex:
    index = BlockIndex()
    for worker in workers:
        index.admit(worker, Incarnation(1))
    return index


def beat(worker: WorkerId = W1, fingerprint: str = "f", incarnation: int = 1, pool: str = "default") -> WorkerBeat:
    return WorkerBeat(
        worker=worker,
        role="decode",
        pool=pool,
        incarnation=Incarnation(incarnation),
        boot_id="b",
        host="h",
        number=1,
        block_sizes=(4,),
        fingerprint=fingerprint,
    )


# ---------------------------------------------------------------------------------------------- index


def test_a_match_counts_leading_blocks_only() -> None:
    index = make_index(W1, W2)
    index.apply(event(1, (tags(1, 2, 4),)))
    index.apply(event(1, (tags(2, 3),), worker=W2))
    assert index.match([tags(1, 2, 3, 4)], [W1, W2]) == (Holder(W1, (2,)),)


def test_a_match_names_every_holder_most_first_per_group() -> None:
    index = make_index(W1, W2)
    index.apply(event(1, (tags(1, 2, 3), tags(1, group=1))))
    index.apply(event(1, (tags(1), tags(1, 2, 3, group=1)), worker=W2))
    chains = [tags(1, 2, 3), tags(1, 2, group=1)]
    assert index.match(chains, [W1, W2]) == (Holder(W1, (3, 1)), Holder(W2, (1, 2)))
    assert index.match(chains, [W2]) == (Holder(W2, (1, 2)),)
    assert index.match([tags(9)], [W1, W2]) == ()
    assert index.match([], [W1, W2]) == ()


def test_removed_blocks_match_no_more() -> None:
    index = make_index(W1)
    index.apply(event(1, (tags(1, 2),)))
    index.apply(event(2, removed=(tags(1),)))
    assert index.match([tags(1, 2)], [W1]) == ()
    assert len(index) == 1


def test_a_repeated_event_changes_nothing() -> None:
    index = make_index(W1)
    index.apply(event(1, (tags(1),)))
    index.apply(event(2, removed=(tags(1),)))
    index.apply(event(1, (tags(1),)))
    assert len(index) == 0


def test_a_gap_asks_for_a_replay_until_the_snapshot_comes() -> None:
    index = make_index(W1)
    index.apply(event(1, (tags(1),)))
    assert index.replays_due(0.0) == []
    index.apply(event(3, (tags(3),)))
    assert index.replays_due(0.0) == [(W1, 3)]
    assert index.replays_due(REPLAY_RETRY_S / 2) == []
    index.apply(event(4, (tags(4),)))
    assert index.replays_due(REPLAY_RETRY_S) == [(W1, 4)]
    index.apply(event(5, (tags(1, 4),), snapshot=True))
    assert index.replays_due(99.0) == []
    assert index.match([tags(1, 3, 4)], [W1]) == (Holder(W1, (1,)),)
    assert len(index) == 2


def test_a_worker_met_in_mid_life_is_asked() -> None:
    index = make_index(W1)
    assert index.replays_due(0.0) == [(W1, 0)]
    index.apply(event(7, (tags(1),), snapshot=True))
    assert index.replays_due(99.0) == []


def test_a_worker_met_at_its_start_need_not_be_asked() -> None:
    index = make_index(W1)
    index.apply(event(1, (tags(1),)))
    assert index.replays_due(0.0) == []


def test_events_of_strangers_and_of_other_incarnations_are_dropped() -> None:
    index = make_index(W1)
    index.apply(event(1, (tags(1),), worker=W2))
    index.apply(event(1, (tags(1),), incarnation=2))
    index.apply(event(1, (tags(1),), incarnation=0))
    assert len(index) == 0


def test_a_dead_worker_takes_its_blocks_along() -> None:
    index = make_index(W1, W2)
    index.apply(event(1, (tags(1, 2),)))
    index.apply(event(1, (tags(1),), worker=W2))
    index.drop(W1)
    assert len(index) == 1
    assert index.match([tags(1, 2)], [W1, W2]) == (Holder(W2, (1,)),)


def test_a_new_incarnation_begins_empty() -> None:
    index = make_index(W1)
    index.apply(event(1, (tags(1),)))
    index.admit(W1, Incarnation(2))
    assert len(index) == 0
    index.apply(event(1, (tags(2),), incarnation=2))
    assert index.match([tags(2)], [W1]) == (Holder(W1, (1,)),)


@pytest.mark.parametrize("seed", range(5))
def test_after_any_losses_a_snapshot_makes_the_map_true(seed: int) -> None:
    """Random stores and removes with lost, repeated and reordered events, then one snapshot each."""
    rng = random.Random(seed)
    index = make_index(W1, W2)
    truth: dict[WorkerId, set[int]] = {W1: set(), W2: set()}
    number = {W1: 0, W2: 0}
    sent: list[BlockEvents] = []
    for _ in range(300):
        worker = rng.choice([W1, W2])
        stored, gone = rng.randrange(40), rng.randrange(40)
        number[worker] += 1
        truth[worker].add(stored)
        truth[worker].discard(gone)
        message = event(number[worker], (tags(stored),) if stored != gone else (), (tags(gone),), worker)
        sent.append(message)
        if rng.random() < 0.8:
            index.apply(message)
        if rng.random() < 0.2:
            index.apply(rng.choice(sent))
    for worker in (W1, W2):
        snapshot = event(number[worker] + 1, (tags(*sorted(truth[worker])),), worker=worker, snapshot=True)
        index.apply(snapshot)
        for block in range(40):
            held = bool(index.match([tags(block)], [worker]))
            assert held == (block in truth[worker])
    assert len(index) == len(truth[W1] | truth[W2])


# ---------------------------------------------------------------------------------------------- fleet


def test_a_worker_is_first_heard_then_heard_again() -> None:
    fleet = Fleet()
    assert fleet.beat(beat(), 0.0) == Heard.FIRST
    assert fleet.beat(beat(), 1.0) == Heard.AGAIN
    assert fleet.beat(beat(incarnation=2), 2.0) == Heard.FIRST
    assert fleet.beat(beat(incarnation=1), 3.0) == Heard.IGNORED
    assert list(fleet.workers("default")) == [W1]


def test_silence_of_ten_seconds_is_death() -> None:
    fleet = Fleet()
    fleet.beat(beat(), 0.0)
    assert fleet.expire(10.0) == []
    assert fleet.expire(10.1) == [W1]
    assert fleet.member(W1) is None
    assert fleet.beat(beat(), 11.0) == Heard.FIRST


def test_workers_of_another_format_are_remembered_in_bounded_room() -> None:
    fleet = Fleet()
    fleet.beat(beat(W1, "first"), 0.0)
    for number in range(1000):
        fleet.beat(beat(WorkerId(f"decode-{number}x"), "second"), 0.0)
    assert len(fleet._warned) <= 256


def test_another_format_is_ignored_and_logged_with_both(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet()
    fleet.beat(beat(W1, "first"), 0.0)
    with caplog.at_level(logging.WARNING):
        assert fleet.beat(beat(W2, "second"), 0.0) == Heard.IGNORED
        assert fleet.beat(beat(W2, "second"), 1.0) == Heard.IGNORED
    assert len(caplog.records) == 1
    assert "first" in caplog.text
    assert "second" in caplog.text
    assert list(fleet.workers("default")) == [W1]


def test_the_format_may_change_when_all_of_the_first_are_gone() -> None:
    fleet = Fleet()
    fleet.beat(beat(W1, "first"), 0.0)
    fleet.beat(beat(W2, "second"), 0.0)
    fleet.expire(20.0)
    assert fleet.beat(beat(W2, "second"), 20.0) == Heard.FIRST
    assert fleet.format_of("default").fingerprint == "second"
    assert fleet.beat(beat(W1, "first"), 20.0) == Heard.IGNORED


def test_a_lone_worker_may_come_back_with_another_format() -> None:
    fleet = Fleet()
    fleet.beat(beat(W1, "first"), 0.0)
    assert fleet.beat(beat(W1, "second", incarnation=2), 1.0) == Heard.FIRST


def test_a_model_goes_to_its_pool() -> None:
    fleet = Fleet()
    assert fleet.pool_for("any") is None
    fleet.beat(beat(), 0.0)
    assert fleet.pool_for("any") == "default"
    fleet.beat(beat(W2, pool="other"), 0.0)
    assert fleet.pool_for("any") is None

    fleet = Fleet(pools={"Big/Model": "big", "small": "s"})
    fleet.beat(beat(W2, pool="big"), 0.0)
    assert fleet.pool_for("Big/Model") == "big"
    assert fleet.pool_for("small") is None  # not the only one there is: its tags would be wrong
    assert fleet.pool_for("unknown") is None


# ---------------------------------------------------------------------------------------------- issued, generations


def test_a_parent_must_be_of_the_same_scope_and_group() -> None:
    issued = IssuedTags()
    issued.remember("scope-a", 0, [tag(1)])
    issued.check_parent("scope-a", 0, tag(1))
    issued.check_parent("scope-b", 0, BlockTag(b""))
    for scope, group in (("scope-b", 0), ("scope-a", 1)):
        with pytest.raises(Forbidden) as refused:
            issued.check_parent(scope, group, tag(1))
        assert refused.value.code == "foreign_parent"
    with pytest.raises(Conflict) as unknown:
        issued.check_parent("scope-a", 0, tag(2))
    assert unknown.value.code == "unknown_parent"


def test_a_scopes_tags_are_forgotten_under_every_salt() -> None:
    issued, salts = IssuedTags(), (b"", b"x" * 16, b"y" * 16)
    for number, salt in enumerate(salts):
        issued.remember(salted("scope-a", salt), 0, [tag(number)])
    issued.remember(salted("scope-b", salts[1]), 0, [tag(9)])
    assert sorted(issued.forget({"scope-a"})) == [(0, tag(number)) for number in range(3)]
    assert issued.forget({"scope-b"}) == [(0, tag(9))]
    assert len(issued) == 0


def test_forgetting_a_scope_looks_at_no_other_tags() -> None:
    issued, others = IssuedTags(), 2000
    issued.remember("big", 0, [tag(number) for number in range(others)])
    issued.remember("small", 1, [tag(others)])
    issued._owners = counted = CountedLooks(issued._owners)
    counted.looks = 0
    assert issued.forget({"small", "unknown"}) == [(1, tag(others))]
    assert counted.looks <= 2
    # a tag that has passed to another scope, or was dropped for want of room, is forgotten with nobody's
    issued = IssuedTags(capacity=2)
    issued.remember("a", 0, [tag(1)])
    issued.remember("b", 0, [tag(1), tag(2), tag(3)])
    assert issued.forget({"a"}) == []
    assert sorted(issued.forget({"b"})) == [(0, tag(2)), (0, tag(3))]
    assert (len(issued), issued._tags) == (0, {})


class CountedLooks(OrderedDict[BlockTag, Owner]):
    """Counts how many entries were looked at."""

    looks = 0

    def __iter__(self) -> Iterator[BlockTag]:
        for tag_of_one in super().__iter__():
            self.looks += 1
            yield tag_of_one

    def items(self) -> Any:
        self.looks += len(self)
        return super().items()

    def pop(self, *arguments: Any) -> Any:
        self.looks += 1
        return super().pop(*arguments)


def test_issued_tags_are_bounded_and_the_oldest_go_first() -> None:
    issued = IssuedTags(capacity=2)
    issued.remember("s", 0, [tag(1), tag(2)])
    issued.remember("s", 0, [tag(1)])
    issued.remember("s", 0, [tag(3)])
    assert len(issued) == 2
    issued.check_parent("s", 0, tag(1))
    with pytest.raises(Conflict):
        issued.check_parent("s", 0, tag(2))


def test_generations_only_rise() -> None:
    scope = Scope(TenantId("a"), (), ScopeGeneration(2))
    generations = Generations()
    generations.check(scope)
    assert generations.rise(TenantId("a"), ScopeGeneration(3))
    assert not generations.rise(TenantId("a"), ScopeGeneration(2))
    with pytest.raises(Forbidden):
        generations.check(scope)
    generations.check(msgspec.structs.replace(scope, generation=ScopeGeneration(3)))
    generations.check(msgspec.structs.replace(scope, tenant=TenantId("b")))
