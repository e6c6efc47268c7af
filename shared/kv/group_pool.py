"""Who holds which KV block of one layer group: reference counts, generations, tags.

Pure bookkeeping: knows block ids, never bytes. The planner thread owns a pool; nobody else may touch it.

Every block is in exactly one of three states:

    referenced   refcount > 0; named by that many block tables, or once by the cleaner while it is being zeroed
    cached       refcount 0 and tagged; can be matched, and is given up, as `eviction` says, when nothing is free
    free         refcount 0 and untagged; its old contents mean nothing, save to a tag that is still on its way

Cached and free blocks of a tenant whose KV is kept for so long only are overwritten when that has passed: `retention`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from shared.contracts.ids import BlockGeneration, BlockTag, ScopeGeneration, TenantId
from shared.kv.eviction import CachedBlocks, Eviction
from shared.kv.retention import NEVER, Retention


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


@dataclass(frozen=True, slots=True)
class Keeping:
    """How blocks of a request are kept when it has ended."""

    rank: int = 0  # of its class; 0 is the highest
    retention_s: float = NEVER  # from the end of the last request that used them; 0: overwritten at once


KEPT = Keeping()


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
    keeping: Keeping = KEPT
    reused: bool = False  # a second request used it, or it was given up and came again
    ends_before: float = NEVER  # when what stands behind what the owner wrote is to be overwritten


@dataclass(slots=True)
class GroupPool:
    """The blocks of one layer group."""

    num_blocks: int
    block_size: int  # token slots in a block
    eviction: Eviction = "reuse"
    now: float = 0.0  # seconds, as last told to `expire`
    _blocks: list[_Block] = field(init=False)
    _free: OrderedDict[int, None] = field(init=False)  # oldest first, so that late tags find their block
    _cached: CachedBlocks = field(init=False)
    _retention: Retention = field(init=False, default_factory=Retention)
    _by_tag: dict[BlockTag, int] = field(init=False, default_factory=dict)
    _events: dict[BlockTag, bool] = field(init=False, default_factory=dict)  # True: stored
    _dirty: list[int] = field(init=False, default_factory=list)  # condemned, waiting for the cleaner
    _cleaning: set[int] = field(init=False, default_factory=set)  # with the cleaner
    _stuck: set[int] = field(init=False, default_factory=set)  # could not be zeroed: nobody gets them any more
    _purged: set[int] = field(init=False, default_factory=set)  # blocks that are `purged`

    def __post_init__(self) -> None:
        self._blocks = [_Block() for _ in range(self.num_blocks)]
        self._free = OrderedDict.fromkeys(range(self.num_blocks))
        self._cached = CachedBlocks(self.eviction, self.num_blocks)

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

    def freed_in_turn(self, stages: Iterable[Iterable[Sequence[int]]]) -> list[int]:
        """What `freed_by` says of the tables of the first stage, of those of the first two, and so on."""
        blocks, freed, total = self._blocks, [], 0
        named: dict[int, int] = {}
        for tables in stages:
            more = dict(Counter(chain.from_iterable(tables)))
            for block_id in named.keys() & more.keys():
                more[block_id] += named[block_id]
            total += sum([b.refcount == n and not b.condemned for i, n in more.items() for b in (blocks[i],)])
            freed.append(total)
            named.update(more)
        return freed

    def share(self, block_ids: Iterable[int], keeping: Keeping | None = None) -> None:
        """Add a reference to full blocks that are tagged or held. A shared block is never written.

        Args:
            keeping: of a request that found them; None: one that had them before, or a part of the same.
        """
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.tag is None and not block.refcount:
                raise ValueError(f"block {block_id} is nobody's and has no tag: it cannot be shared")
            self._cached.discard(block_id)
            self._retention.taken(block_id)
            block.refcount += 1
            if keeping is not None:
                block.reused = True
                block.keeping = Keeping(min(block.keeping.rank, keeping.rank), keeping.retention_s)

    def allocate(self, count: int, owner: Owner = NOBODY, keeping: Keeping = KEPT) -> list[int]:
        """Hand out `count` blocks to a new owner, giving cached ones up when none is free.

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
                block_id = self._give_up_one()
            self._cached.holds(owner[0], 1)
            block = self._blocks[block_id]
            block.generation += 1
            block.refcount = 1
            block.keeping, block.reused = keeping, False
            block.ends_before = min(block.ends_before, self._retention.taken(block_id))
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
            block.refcount -= 1
            if block.refcount == 0:
                self._let_go(block_id)

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
        block.before, block.ends_before = frozenset(), NEVER  # it is full: nothing of theirs is left
        block.reused = self._cached.was_lost(block.owner[0], tag)
        self._no_longer_purged(block_id)
        if block.refcount == 0:
            del self._free[block_id]
            self._cache(block_id)
            self._cached.holds(block.owner[0], 1)
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

    def purge(self, tenant: TenantId, below: ScopeGeneration) -> tuple[int, ...]:
        """Every block that holds, or may hold, bytes of the tenant from generations below `below`: those nobody uses go
        to the cleaner now, those in use when their last owner lets go. Cached ones are forgotten.

        Blocks that another owner writes keep what is his; they are done with once they are full, or zeroed.

        Returns:
            Their ids; `num_purged` tells how many of them are not done with.
        """
        found: list[int] = []
        self._cached.forget_lost(tenant)
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
                self._clean(block_id)
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
            self._clean(block_id)
        else:
            self.condemn([block_id])

    def expire(self, now: float) -> int:
        """Forget blocks that nobody has used for as long as their tenant's KV is kept: zeroed before any reuse.

        Returns:
            How many they are.
        """
        self.now = now
        ended = self._retention.ended(now)
        for block_id in ended:
            self._clean(block_id)
        return len(ended)

    def take_dirty(self, most: int | None = None) -> list[int]:
        """Condemned blocks that nobody but the cleaner holds any more, at most so many; each must come back through
        `cleaned`."""
        dirty, self._dirty = self._dirty[:most], self._dirty[most:] if most is not None else []
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
            block.owner, block.before, block.ends_before = NOBODY, frozenset(), NEVER
            self._no_longer_purged(block_id)
            self._free[block_id] = None

    def not_cleaned(self, block_ids: Iterable[int]) -> None:
        """Blocks of `take_dirty` could not be zeroed: better a smaller pool than somebody else's KV."""
        for block_id in block_ids:
            self._cleaning.remove(block_id)
            self._stuck.add(block_id)

    @property
    def num_cleaning(self) -> int:
        """Blocks that are free once they are zeroed."""
        return len(self._dirty) + len(self._cleaning)

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
        held: Counter[TenantId] = Counter()
        for i in (used - {*self._dirty, *self._cleaning, *self._stuck}) | cached:
            held[self._blocks[i].owner[0]] += 1
        assert held == self._cached.held(), "tenants hold other blocks than are counted"
        if references is not None:
            expected = list(references)
            for block_id in (*self._dirty, *self._cleaning, *self._stuck):
                expected[block_id] += 1
            assert expected == [b.refcount for b in self._blocks], "refcounts differ from the owners' tables"

    def _let_go(self, block_id: int) -> None:
        """The last reference is gone."""
        block = self._blocks[block_id]
        if block.tag is None:
            self._cached.holds(block.owner[0], -1)
        if block.condemned or (block.tag is None and (block.purged or block.keeping.retention_s <= 0)):
            block.condemned = True
            block.refcount = 1  # the cleaner's
            self._dirty.append(block_id)
            return
        if block.tag is None:
            self._free[block_id] = None
        else:
            self._cache(block_id)
        self._retention.let_go(block_id, min(block.ends_before, self.now + block.keeping.retention_s))

    def _cache(self, block_id: int) -> None:
        block = self._blocks[block_id]
        self._cached.add(block_id, block.owner[0], block.keeping.rank, block.reused)

    def _give_up_one(self) -> int:
        block_id = self._cached.victim()
        block = self._blocks[block_id]
        self._cached.discard(block_id)
        self._cached.holds(block.owner[0], -1)
        assert block.tag is not None
        self._cached.lose(block.owner[0], block.tag)
        self._untag(block_id)
        return block_id

    def _clean(self, block_id: int) -> None:
        """Have a block that nobody holds zeroed."""
        block = self._blocks[block_id]
        if self._cached.discard(block_id):
            self._cached.holds(block.owner[0], -1)
            self._untag(block_id)
        else:
            del self._free[block_id]
        self._retention.taken(block_id)
        block.condemned = True
        block.refcount = 1  # the cleaner's
        self._dirty.append(block_id)

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
