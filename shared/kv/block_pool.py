"""Who holds which KV block: reference counts, generations, tags and the order of eviction, per layer group.

Pure bookkeeping: knows block ids, never bytes. The planner thread owns a pool; nobody else may touch it.

Every block is in exactly one of three states:

    referenced   refcount > 0; named by that many block tables, or once by the cleaner while it is being zeroed
    cached       refcount 0 and tagged; can be matched, and is evicted oldest first when nothing is free
    free         refcount 0 and untagged; its old contents mean nothing, save to a tag that is still on its way
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from shared.contracts.ids import BlockGeneration, BlockTag, ScopeGeneration, TenantId
from shared.kv.block_table import BlockTable
from shared.kv.layout import PoolLayout


@dataclass(frozen=True, slots=True)
class TagEvents:
    """What changed for the index since the last drain; a tag stands in one list at most, with its final state."""

    stored: tuple[BlockTag, ...] = ()
    removed: tuple[BlockTag, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks of one group by state; the three always add up to the size of the group."""

    free: int
    used: int
    cached: int

    @property
    def available(self) -> int:
        """Blocks that can be handed out now: the free ones and, by eviction, the cached ones."""
        return self.free + self.cached


Owner = tuple[TenantId, ScopeGeneration]
"""Whose KV a block holds: of this tenant, computed under this generation of its scope."""
NOBODY: Owner = (TenantId(""), ScopeGeneration(0))


@dataclass(slots=True)
class _Block:
    generation: int = 0
    refcount: int = 0
    condemned: bool = False  # never tagged again, and zeroed before it is reused
    owner: Owner = NOBODY  # who was handed it last
    before: frozenset[Owner] = frozenset()  # others whose bytes may stand behind what the owner wrote
    purged: bool = False  # a purge waits until it is zeroed, or full of its owner's own
    tag: BlockTag | None = None
    token_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class GroupPool:
    """The blocks of one layer group."""

    num_blocks: int
    block_size: int  # token slots in a block
    _blocks: list[_Block] = field(init=False)
    _free: OrderedDict[int, None] = field(init=False)  # oldest first, so that late tags find their block
    _cached: OrderedDict[int, None] = field(init=False, default_factory=OrderedDict)  # least recently used first
    _by_tag: dict[BlockTag, int] = field(init=False, default_factory=dict)
    _events: dict[BlockTag, bool] = field(init=False, default_factory=dict)  # True: stored
    _dirty: list[int] = field(init=False, default_factory=list)  # condemned, waiting for the cleaner
    _cleaning: set[int] = field(init=False, default_factory=set)  # with the cleaner
    _purged: set[int] = field(init=False, default_factory=set)  # blocks that are `purged`

    def __post_init__(self) -> None:
        self._blocks = [_Block() for _ in range(self.num_blocks)]
        self._free = OrderedDict.fromkeys(range(self.num_blocks))

    @property
    def counts(self) -> BlockCounts:
        free, cached = len(self._free), len(self._cached)
        return BlockCounts(free=free, used=self.num_blocks - free - cached, cached=cached)

    def generation(self, block_id: int) -> BlockGeneration:
        """How often the block has been handed out to a new owner."""
        return BlockGeneration(self._blocks[block_id].generation)

    def refcount(self, block_id: int) -> int:
        return self._blocks[block_id].refcount

    def tags(self) -> tuple[BlockTag, ...]:
        """Every tag the group can be matched by: the snapshot of a replay."""
        return tuple(self._by_tag)

    def match(self, tags: Sequence[BlockTag], token_ids: Sequence[int]) -> list[int]:
        """Blocks of the longest prefix of `tags` held here whose token ids also compare equal. Takes no reference."""
        hit: list[int] = []
        for i, tag in enumerate(tags):
            block_id = self._by_tag.get(tag)
            wanted = tuple(token_ids[i * self.block_size : (i + 1) * self.block_size])
            if block_id is None or self._blocks[block_id].token_ids != wanted:
                break
            hit.append(block_id)
        return hit

    def still_held(self, block_ids: Sequence[int], generations: Sequence[int]) -> list[int]:
        """Leading blocks that are of these generations still, trusted, and tagged or held by somebody."""
        found: list[int] = []
        for block_id, generation in zip(block_ids, generations, strict=True):
            block = self._blocks[block_id]
            if block.generation != generation or block.condemned or (block.tag is None and not block.refcount):
                break
            found.append(block_id)
        return found

    def can_take(self, shared: Sequence[int], num_new: int) -> bool:
        """True if `shared` can be referenced and `num_new` blocks allocated besides."""
        pinned = sum(1 for block_id in set(shared) if block_id in self._cached)
        return num_new <= len(self._free) + len(self._cached) - pinned

    def freed_by(self, tables: Iterable[Sequence[int]], kept: Collection[int] = ()) -> int:
        """Blocks, other than those `kept`, that would be available if these tables were given back, all of them."""
        named = Counter(block_id for table in tables for block_id in table)
        return sum(
            block_id not in kept and block.refcount == count and not block.condemned
            for block_id, count in named.items()
            for block in (self._blocks[block_id],)
        )

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to full blocks that are tagged or held. A shared block is never written."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.tag is None and not block.refcount:
                raise ValueError(f"block {block_id} is nobody's and has no tag: it cannot be shared")
            self._cached.pop(block_id, None)
            block.refcount += 1

    def allocate(self, count: int, owner: Owner = NOBODY) -> list[int]:
        """Hand out `count` blocks to a new owner, evicting cached ones, oldest first, when none is free.

        Raises:
            MemoryError: fewer than `count` are available; nothing was handed out.
        """
        if count > len(self._free) + len(self._cached):
            raise MemoryError(f"{count} blocks asked for, {self.counts.available} available")
        block_ids: list[int] = []
        for _ in range(count):
            if self._free:
                block_id, _ = self._free.popitem(last=False)
            else:
                block_id, _ = self._cached.popitem(last=False)
                self._untag(block_id)
            block = self._blocks[block_id]
            block.generation += 1
            block.refcount = 1
            if block.owner != owner:
                if block.owner != NOBODY:
                    block.before |= {block.owner}
                block.owner = owner
            block_ids.append(block_id)
        return block_ids

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each block of a table given in position order; its tail becomes the oldest."""
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            if block.refcount <= 0:
                raise ValueError(f"block {block_id} is freed more often than it was referenced")
            if block.refcount == 1 and (block.condemned or (block.purged and block.tag is None)):
                block.condemned = True
                self._dirty.append(block_id)  # the last reference passes to the cleaner
                continue
            block.refcount -= 1
            if block.refcount == 0:
                (self._free if block.tag is None else self._cached)[block_id] = None

    def tag(self, block_id: int, generation: int, tag: BlockTag, token_ids: Sequence[int]) -> bool:
        """Make a full, finished block findable. Answers False, and changes nothing, when

        the block has been handed out again since `generation`, was condemned, has a tag already, or the tag already
        names another block (the older copy is kept, as others may share it).

        Raises:
            ValueError: `token_ids` is not one full block.
        """
        if len(token_ids) != self.block_size:
            raise ValueError(f"a tag needs {self.block_size} token ids, not {len(token_ids)}")
        block = self._blocks[block_id]
        if block.generation != generation or block.condemned or block.tag is not None or tag in self._by_tag:
            return False
        block.tag = tag
        block.token_ids = tuple(token_ids)
        self._by_tag[tag] = block_id
        self._events[tag] = True
        block.before = frozenset()  # it is full: nothing of theirs is left
        self._no_longer_purged(block_id)
        if block.refcount == 0:
            del self._free[block_id]
            self._cached[block_id] = None
        return True

    def condemn(self, block_ids: Iterable[int]) -> None:
        """Distrust referenced blocks: untagged now, and held back for zeroing once the last reference is gone."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.refcount <= 0:
                raise ValueError(f"block {block_id} is condemned but nobody holds it")
            block.condemned = True
            if block.tag is not None:
                self._untag(block_id)

    def forget(self, tags: Iterable[BlockTag]) -> int:
        """What a purge asks for: blocks of these tags can't be matched from now on and are zeroed before any reuse.

        Returns:
            How many of the tags were held. Blocks in use are zeroed when their last owner lets go.
        """
        block_ids = [self._by_tag[tag] for tag in tags if tag in self._by_tag]
        for block_id in block_ids:
            if block_id in self._cached:
                del self._cached[block_id]
                self._blocks[block_id].refcount = 1  # the cleaner's
                self._dirty.append(block_id)
        self.condemn(block_ids)
        return len(block_ids)

    def purge(self, tenant: TenantId, below: ScopeGeneration) -> tuple[int, ...]:
        """Every block that holds, or may hold, bytes of the tenant from generations below `below`: those nobody uses go
        to the cleaner now, those in use when their last owner lets go. Cached ones are forgotten.

        Blocks that another owner writes keep what is his; they are done with once they are full, or zeroed.

        Returns:
            Their ids; `num_purged` tells how many of them are not done with.
        """
        found: list[int] = []
        for block_id, block in enumerate(self._blocks):
            owned = _is_purged(block.owner, tenant, below)
            if not owned and not any(_is_purged(owner, tenant, below) for owner in block.before):
                continue
            found.append(block_id)
            block.purged = True
            self._purged.add(block_id)
            if block.condemned:
                continue
            if block.refcount == 0:
                (self._free if block.tag is None else self._cached).pop(block_id)
                block.refcount = 1  # the cleaner's
                self._dirty.append(block_id)
                self.condemn([block_id])
            elif owned:
                self.condemn([block_id])
        return tuple(found)

    def num_purged(self, block_ids: Iterable[int]) -> int:
        """How many of these still hold what a purge found in them."""
        return len(self._purged.intersection(block_ids))

    def tag_at(self, block_id: int, generation: int) -> BlockTag | None:
        """The block's tag, if it still is of this generation and has one."""
        block = self._blocks[block_id]
        return block.tag if block.generation == generation else None

    def condemn_given_up(self, block_id: int, generation: int) -> None:
        """Distrust a block that was let go of: zeroed before any reuse, if it still is of this generation."""
        block = self._blocks[block_id]
        if block.generation != generation or block.condemned:
            return
        if block.refcount == 0:
            (self._free if block.tag is None else self._cached).pop(block_id)
            block.refcount = 1  # the cleaner's
            self._dirty.append(block_id)
        self.condemn([block_id])

    def take_dirty(self) -> list[int]:
        """Condemned blocks that nobody but the cleaner holds any more; each must come back through `cleaned`."""
        dirty, self._dirty = self._dirty, []
        self._cleaning.update(dirty)
        return dirty

    def cleaned(self, block_ids: Iterable[int]) -> None:
        """Blocks of `take_dirty` are zeroed and may be handed out again."""
        for block_id in block_ids:
            if block_id not in self._cleaning:
                raise ValueError(f"block {block_id} is not with the cleaner")
            self._cleaning.remove(block_id)
            block = self._blocks[block_id]
            block.condemned = False
            block.refcount = 0
            block.generation += 1  # a tag that is still on its way finds another generation
            block.owner, block.before = NOBODY, frozenset()
            self._no_longer_purged(block_id)
            self._free[block_id] = None

    def drain_events(self) -> TagEvents:
        """Tags stored and removed since the last call."""
        events, self._events = self._events, {}
        return TagEvents(
            stored=tuple(t for t, stored in events.items() if stored),
            removed=tuple(t for t, stored in events.items() if not stored),
        )

    def check(self, references: Sequence[int] | None = None) -> None:
        """Assert that free + referenced + cached is the whole group and that every index agrees.

        Args:
            references: how often each block is named by its owners' tables, if they are known; the cleaner is added.
        """
        used = {i for i, b in enumerate(self._blocks) if b.refcount > 0}
        free, cached = set(self._free), set(self._cached)
        assert len(used) + len(free) + len(cached) == self.num_blocks, "free + referenced + cached is not the total"
        assert used | free | cached == set(range(self.num_blocks)), "a block is in no state, or in two"
        assert all(self._blocks[i].tag is None for i in free), "a free block has a tag"
        assert all(self._blocks[i].tag is not None for i in cached), "a cached block has no tag"
        assert all(b.refcount >= 0 for b in self._blocks), "a refcount is negative"
        tagged = {b.tag: i for i, b in enumerate(self._blocks) if b.tag is not None}
        assert tagged == self._by_tag, "the tag map does not name the tagged blocks"
        if references is not None:
            expected = list(references)
            for block_id in (*self._dirty, *self._cleaning):
                expected[block_id] += 1
            assert expected == [b.refcount for b in self._blocks], "refcounts differ from the owners' tables"

    def _no_longer_purged(self, block_id: int) -> None:
        block = self._blocks[block_id]
        if block.purged:
            block.purged = False
            self._purged.discard(block_id)

    def _untag(self, block_id: int) -> None:
        block = self._blocks[block_id]
        assert block.tag is not None
        del self._by_tag[block.tag]
        self._events[block.tag] = False
        block.tag = None
        block.token_ids = ()


def _is_purged(owner: Owner, tenant: TenantId, below: ScopeGeneration) -> bool:
    return owner[0] == tenant and owner[1] < below


class BlockPool:
    """The groups' pools side by side; every argument and result is plural per group."""

    def __init__(self, layout: PoolLayout) -> None:
        self.groups = tuple(
            GroupPool(num_blocks, group.block_size)
            for group, num_blocks in zip(layout.groups, layout.num_blocks, strict=True)
        )
        # a hit must end on a block boundary of every group
        self._step = math.lcm(*(group.block_size for group in self.groups))

    @property
    def counts(self) -> tuple[BlockCounts, ...]:
        return tuple(group.counts for group in self.groups)

    def blocks_for(self, num_tokens: int) -> tuple[int, ...]:
        """Blocks per group that hold `num_tokens` token slots."""
        return tuple(-(-num_tokens // group.block_size) for group in self.groups)

    def match(
        self, tags: Sequence[Sequence[BlockTag]], token_ids: Sequence[int], max_tokens: int
    ) -> tuple[list[int], ...]:
        """Blocks per group of the longest prefix that all groups hold, of at most `max_tokens` tokens.

        For a sequence that samples, `max_tokens` is n - 1: the hit is capped at floor((n - 1) / block_size) blocks,
        because the last token must be computed to have logits.
        """
        if len(tags) != len(self.groups):
            return tuple([] for _ in self.groups)
        hits = [
            group.match(group_tags[: max_tokens // group.block_size], token_ids)
            for group, group_tags in zip(self.groups, tags, strict=True)
        ]
        return self._agreed(hits)

    def still_held(self, tables: Sequence[BlockTable]) -> tuple[list[int], ...]:
        """Blocks per group of the longest prefix of full blocks that all groups hold still."""
        return self._agreed(
            [
                group.still_held(table.block_ids, table.generations)
                for group, table in zip(self.groups, tables, strict=True)
            ]
        )

    def aligned(self, num_tokens: int) -> int:
        """The most tokens, at most `num_tokens`, that are full blocks in every group."""
        return num_tokens // self._step * self._step

    def _agreed(self, hits: Sequence[list[int]]) -> tuple[list[int], ...]:
        shortest = min(len(hit) * group.block_size for hit, group in zip(hits, self.groups, strict=True))
        num_tokens = self.aligned(shortest)
        return tuple(hit[: num_tokens // group.block_size] for hit, group in zip(hits, self.groups, strict=True))

    def purge(self, tenant: TenantId, below: ScopeGeneration) -> tuple[tuple[int, ...], ...]:
        """As `GroupPool.purge`, per group."""
        return tuple(group.purge(tenant, below) for group in self.groups)

    def num_purged(self, block_ids: Sequence[Iterable[int]]) -> int:
        """As `GroupPool.num_purged`, of all groups."""
        return sum(group.num_purged(ids) for group, ids in zip(self.groups, block_ids, strict=True))

    @property
    def is_dirty(self) -> bool:
        """True when `take_dirty` has something to give."""
        for group in self.groups:  # noqa: SIM110 - asked in each step: a third of what `any` takes
            if group._dirty:
                return True
        return False

    def take_dirty(self) -> tuple[tuple[int, int], ...]:
        """(group, block id) of condemned blocks to zero; each must come back through `cleaned`."""
        return tuple((g, block_id) for g, group in enumerate(self.groups) for block_id in group.take_dirty())

    def cleaned(self, blocks: Iterable[tuple[int, int]]) -> None:
        """(group, block id) of `take_dirty` that are zeroed."""
        for group, block_id in blocks:
            self.groups[group].cleaned([block_id])

    def drain_events(self) -> tuple[TagEvents, ...]:
        """Tags stored and removed since the last call, per group."""
        return tuple(group.drain_events() for group in self.groups)
