"""The block pool against a naive model, and its rules one by one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.contracts.ids import BlockTag, ScopeGeneration, TenantId
from shared.kv import block_pool
from shared.kv.block_pool import NOBODY, BlockPool, GroupPool, Owner
from shared.kv.layout import LayerGroup, PoolLayout

OWNERS: list[Owner] = [NOBODY, *((TenantId(t), ScopeGeneration(g)) for t in "ab" for g in (1, 2))]


def tag_of(token_ids: tuple[int, ...]) -> BlockTag:
    """A stand-in for the keyed hash of a whole prefix."""
    return BlockTag(repr(token_ids).encode())


def tags_of(token_ids: tuple[int, ...], block_size: int) -> list[BlockTag]:
    return [tag_of(token_ids[: end + block_size]) for end in range(0, len(token_ids) - block_size + 1, block_size)]


def fill(pool: GroupPool, token_ids: tuple[int, ...]) -> list[int]:
    """Allocate and tag the full blocks of `token_ids`, as a finished prompt would."""
    size = pool.block_size
    blocks = pool.allocate(len(token_ids) // size)
    for i, (block_id, tag) in enumerate(zip(blocks, tags_of(token_ids, size), strict=True)):
        assert pool.tag(block_id, pool.generation(block_id), tag, token_ids[i * size : (i + 1) * size])
    return blocks


def layout(*groups: tuple[int, int]) -> PoolLayout:
    """(block_size, num_blocks) per group."""
    return PoolLayout(
        groups=tuple(
            LayerGroup(name=f"g{i}", layers=(i,), num_kv_heads=1, head_dim=8, block_size=size, dtype="float32")
            for i, (size, _) in enumerate(groups)
        ),
        num_blocks=tuple(count for _, count in groups),
    )


def test_match_is_the_longest_prefix_that_also_compares_equal() -> None:
    pool = GroupPool(8, 2)
    blocks = fill(pool, (1, 2, 3, 4, 5, 6))
    tags = tags_of((1, 2, 3, 4, 5, 6), 2)
    assert pool.match(tags, (1, 2, 3, 4, 5, 6)) == blocks
    assert pool.match(tags[:2], (1, 2, 3, 4, 5, 6)) == blocks[:2]
    # a colliding tag is caught by the token check, and ends the match
    assert pool.match(tags, (1, 2, 9, 4, 5, 6)) == blocks[:1]
    assert pool.match([tags[0], BlockTag(b"?"), tags[2]], (1, 2, 3, 4, 5, 6)) == blocks[:1]


def test_eviction_takes_free_blocks_first_then_the_oldest_leaf() -> None:
    pool = GroupPool(6, 2)
    old, new = fill(pool, (1, 2, 3, 4)), fill(pool, (5, 6, 7, 8))
    pool.free(old)
    pool.free(new)
    assert pool.counts.free == 2
    assert pool.counts.cached == 4
    assert set(pool.allocate(2)).isdisjoint(old + new)
    assert pool.allocate(1) == [old[1]]  # the tail of the oldest chain
    assert pool.match(tags_of((1, 2, 3, 4), 2), (1, 2, 3, 4)) == old[:1]
    assert pool.allocate(3) == [old[0], new[1], new[0]]
    with pytest.raises(MemoryError):
        pool.allocate(1)
    pool.check()


def test_sharing_rescues_a_cached_block_from_eviction() -> None:
    pool = GroupPool(2, 2)
    blocks = fill(pool, (1, 2, 3, 4))
    pool.free(blocks)
    assert pool.can_take(blocks[:1], 1)
    assert not pool.can_take(blocks[:1], 2)
    pool.share(blocks[:1])
    assert pool.allocate(1) == [blocks[1]]
    pool.free(blocks)
    pool.check([0, 0])


def test_a_late_tag_finds_its_block_until_the_block_is_handed_out() -> None:
    pool = GroupPool(1, 2)
    [block_id] = pool.allocate(1)
    generation = pool.generation(block_id)
    pool.free([block_id])
    assert pool.tag(block_id, generation, BlockTag(b"a"), (1, 2))
    assert pool.counts.cached == 1
    assert pool.allocate(1) == [block_id]
    assert not pool.tag(block_id, generation, BlockTag(b"a"), (1, 2))
    assert pool.drain_events().removed == (BlockTag(b"a"),)
    pool.check([1])


def test_a_tag_keeps_the_block_it_names() -> None:
    pool = GroupPool(2, 2)
    a, b = pool.allocate(2)
    assert pool.tag(a, pool.generation(a), BlockTag(b"t"), (1, 2))
    assert not pool.tag(b, pool.generation(b), BlockTag(b"t"), (1, 2))
    assert not pool.tag(a, pool.generation(a), BlockTag(b"u"), (1, 2))
    assert pool.match([BlockTag(b"t")], (1, 2)) == [a]
    with pytest.raises(ValueError, match="2 token ids"):
        pool.tag(b, pool.generation(b), BlockTag(b"v"), (1,))


def test_condemned_blocks_wait_for_the_last_reader_and_for_the_cleaner() -> None:
    pool = GroupPool(2, 2)
    blocks = fill(pool, (1, 2))
    pool.share(blocks)
    pool.condemn(blocks)
    assert pool.match(tags_of((1, 2), 2), (1, 2)) == []
    assert not pool.tag(blocks[0], pool.generation(blocks[0]), BlockTag(b"t"), (1, 2))
    pool.free(blocks)
    assert pool.take_dirty() == []
    pool.free(blocks)
    assert pool.counts.used == 1
    assert pool.take_dirty() == blocks
    assert pool.take_dirty() == []
    pool.cleaned(blocks)
    assert pool.counts.free == 2
    pool.check([0, 0])


def test_a_block_that_was_let_go_of_is_recognized_by_its_generation() -> None:
    pool = GroupPool(3, 2)
    cached, shared = fill(pool, (1, 2, 3, 4))
    (plain,) = pool.allocate(1)
    generations = [int(pool.generation(block_id)) for block_id in (cached, shared, plain)]
    tags = tags_of((1, 2, 3, 4), 2)
    pool.free([cached, shared, plain])
    pool.share([shared])
    assert [pool.tag_at(b, g) for b, g in zip((cached, shared, plain), generations, strict=True)] == [*tags, None]
    # all three are distrusted: the free and the cached one now, the other when its new reader lets go
    for block_id, generation in zip((cached, shared, plain), generations, strict=True):
        pool.condemn_given_up(block_id, generation)
        pool.condemn_given_up(block_id, generation)
    assert pool.match(tags, (1, 2, 3, 4)) == []
    dirty = pool.take_dirty()
    assert sorted(dirty) == sorted([cached, plain])
    pool.free([shared])
    pool.cleaned([*dirty, *pool.take_dirty()])
    pool.check([0, 0, 0])
    assert pool.counts.free == 3
    # handed out again, it is another's
    again = pool.allocate(3)
    assert pool.tag_at(cached, generations[0]) is None
    pool.condemn_given_up(cached, generations[0])
    assert pool.take_dirty() == []
    pool.free(again)
    assert pool.counts.free == 3


def test_events_carry_the_final_state_of_each_tag() -> None:
    pool = GroupPool(1, 2)
    blocks = fill(pool, (1, 2))
    assert pool.drain_events().stored == (tag_of((1, 2)),)
    pool.free(blocks)
    pool.free(fill(pool, (3, 4)))
    pool.free(fill(pool, (1, 2)))
    events = pool.drain_events()
    assert set(events.stored) == {tag_of((1, 2))}
    assert set(events.removed) == {tag_of((3, 4))}
    assert pool.tags() == (tag_of((1, 2)),)


def test_wrong_use_is_refused() -> None:
    pool = GroupPool(2, 2)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(ValueError, match="no tag"):
        pool.share(blocks)
    with pytest.raises(ValueError, match="more often"):
        pool.free(blocks)
    with pytest.raises(ValueError, match="nobody holds"):
        pool.condemn(blocks)
    with pytest.raises(ValueError, match="not with the cleaner"):
        pool.cleaned(blocks)


def test_match_ends_where_the_shortest_group_ends() -> None:
    pool = BlockPool(layout((2, 8), (4, 4)))
    tokens = tuple(range(8))
    fill(pool.groups[0], tokens)
    fill(pool.groups[1], tokens[:4])
    tags = [tags_of(tokens, 2), tags_of(tokens, 4)]
    assert [len(hit) for hit in pool.match(tags, tokens, 8)] == [2, 1]
    assert [len(hit) for hit in pool.match(tags, tokens, 3)] == [0, 0]
    assert [len(hit) for hit in pool.match([], tokens, 8)] == [0, 0]
    assert pool.blocks_for(5) == (3, 2)


def test_a_purge_of_a_large_pool_is_overwritten_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    group = LayerGroup("full", (0,), 1, 8, 4, "float16")
    monkeypatch.setattr(block_pool, "ZEROED_BYTES", 2 * group.span_bytes + 1)
    pool = BlockPool(PoolLayout((group,), (5,)))
    (only,) = pool.groups
    only.free(only.allocate(5, OWNERS[1]))
    (blocks,) = pool.purge(*OWNERS[1][:1], ScopeGeneration(9))
    taken = []
    while pool.is_dirty:
        part = pool.take_dirty()
        assert len(part) <= 2
        assert only.num_purged(blocks) == 5 - len(taken)
        pool.cleaned(part)
        taken += part
    assert sorted(block_id for _, block_id in taken) == list(range(5))
    assert only.num_purged(blocks) == 0


class PoolMachine(RuleBasedStateMachine):
    """Random use of a small pool, mirrored by plain lists: one list of references, one map of tags."""

    NUM_BLOCKS, SIZE = 6, 2

    def __init__(self) -> None:
        super().__init__()
        self.pool = GroupPool(self.NUM_BLOCKS, self.SIZE)
        self.tables: list[list[int]] = []
        self.generations = [0] * self.NUM_BLOCKS
        self.tagged: dict[BlockTag, tuple[int, tuple[int, ...]]] = {}
        self.condemned: set[int] = set()
        self.cleaning: list[int] = []
        self.written: list[set[Owner]] = [set() for _ in range(self.NUM_BLOCKS)]  # whose bytes may be in each block
        self.owners = [NOBODY] * self.NUM_BLOCKS
        self.purged: set[int] = set()
        self.known: set[BlockTag] = set()  # what an index would hold from the events alone

    def references(self) -> list[int]:
        named = list(itertools.chain(*self.tables, self.cleaning))
        return [named.count(i) for i in range(self.NUM_BLOCKS)]

    def drop_tags_of(self, block_id: int) -> None:
        self.tagged = {t: v for t, v in self.tagged.items() if v[0] != block_id}

    @rule(count=st.integers(0, 4), owner=st.sampled_from(OWNERS))
    def allocate(self, count: int, owner: Owner) -> None:
        free = [i for i, refs in enumerate(self.references()) if refs == 0]
        assert self.pool.can_take([], count) == (count <= len(free))
        if count > len(free):
            with pytest.raises(MemoryError):
                self.pool.allocate(count)
            return
        untagged = [i for i in free if i not in {b for b, _ in self.tagged.values()}]
        table = self.pool.allocate(count, owner)
        assert len(set(table)) == count
        assert set(table) <= set(free)
        assert len(set(table) & set(untagged)) == min(count, len(untagged)), "evicted although a block was free"
        for block_id in table:
            self.generations[block_id] += 1
            self.written[block_id].add(owner)
            self.owners[block_id] = owner
            self.drop_tags_of(block_id)
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: Any) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free(table)
        tagged = {b for b, _ in self.tagged.values()}
        wiped = [b for b in table if b in self.condemned | (self.purged - tagged) and self.references()[b] == 0]
        self.cleaning += wiped
        self.condemned |= set(wiped)

    @rule(block_id=st.integers(0, NUM_BLOCKS - 1), age=st.integers(0, 1), content=st.integers(0, 4))
    def tag(self, block_id: int, age: int, content: int) -> None:
        tag, token_ids = BlockTag(bytes([content])), (content, content)
        fresh = age == 0 and block_id not in self.condemned
        taken = tag in self.tagged or block_id in {b for b, _ in self.tagged.values()}
        answer = self.pool.tag(block_id, self.generations[block_id] - age, tag, token_ids)
        assert answer == (fresh and not taken)
        if answer:
            self.tagged[tag] = (block_id, token_ids)
            self.written[block_id] = {self.owners[block_id]} - {NOBODY}
            self.purged.discard(block_id)

    @rule(contents=st.lists(st.integers(0, 4), max_size=3), lie=st.booleans())
    def match_and_share(self, contents: list[int], lie: bool) -> None:
        tags = [BlockTag(bytes([c])) for c in contents]
        token_ids = [t for c in contents for t in (c, c + lie)]
        expected = []
        for tag in tags:
            if lie or tag not in self.tagged:
                break
            expected.append(self.tagged[tag][0])
        assert self.pool.match(tags, token_ids) == expected
        if len(set(expected)) == len(expected):
            self.pool.share(expected)
            self.tables.append(expected)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def condemn(self, data: Any) -> None:
        table = self.tables[data.draw(st.integers(0, len(self.tables) - 1))]
        self.pool.condemn(table)
        self.condemned |= set(table)
        for block_id in table:
            self.drop_tags_of(block_id)

    @rule(tenant=st.sampled_from("ab"), below=st.integers(1, 3))
    def purge(self, tenant: str, below: int) -> None:
        matching = {owner for owner in OWNERS if owner[0] == tenant and owner[1] < below}
        expected = [i for i, owners in enumerate(self.written) if owners & matching]
        references = self.references()
        assert self.pool.purge(TenantId(tenant), ScopeGeneration(below)) == tuple(expected)
        self.purged |= set(expected)
        for block_id in expected:
            idle = references[block_id] == 0
            self.cleaning += [block_id] if idle else []
            if idle or self.owners[block_id] in matching:
                self.condemned.add(block_id)
                self.drop_tags_of(block_id)
            else:
                assert block_id in self.condemned or block_id not in {b for b, _ in self.tagged.values()}

    @rule()
    def clean(self) -> None:
        dirty = self.pool.take_dirty()
        assert sorted(dirty) == sorted(self.cleaning)
        self.pool.cleaned(dirty)
        for block_id in dirty:
            self.generations[block_id] += 1
            self.written[block_id], self.owners[block_id] = set(), NOBODY
        self.purged -= set(dirty)
        self.condemned -= set(dirty)
        self.cleaning = []

    @rule()
    def drain(self) -> None:
        events = self.pool.drain_events()
        self.known = (self.known | set(events.stored)) - set(events.removed)
        assert self.known == set(self.tagged) == set(self.pool.tags())

    @invariant()
    def agrees(self) -> None:
        references = self.references()
        self.pool.check([r - self.cleaning.count(i) for i, r in enumerate(references)])
        counts = self.pool.counts
        cached = sum(1 for b, _ in self.tagged.values() if references[b] == 0)
        assert counts.cached == cached
        assert counts.free == references.count(0) - cached
        assert counts.used == self.NUM_BLOCKS - references.count(0)
        assert [self.pool.generation(i) for i in range(self.NUM_BLOCKS)] == self.generations
        assert {i for i in range(self.NUM_BLOCKS) if self.pool.num_purged([i])} == self.purged


PoolMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestPoolMachine = PoolMachine.TestCase
