"""A worker's KV in the simulator: the real block pool of two layer groups over toy memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shared.contracts.parts import GroupTags
from shared.kv.block_pool import BlockPool
from shared.kv.layout import LayerGroup, PoolLayout
from tests.simulation.network import Violation
from tests.simulation.toy_model import BLOCKS, Memory, tags_of

Tables = tuple[list[int], ...]  # per group, block ids in position order
GROUPS = tuple(LayerGroup(f"group-{size}", (0,), 1, 4, size, "int8") for size in BLOCKS)


class ToyPool:
    """Blocks, their bytes and the prefix cache."""

    def __init__(self, num_tokens: int) -> None:
        self.num_blocks = tuple(num_tokens // size for size in BLOCKS)
        self.blocks = BlockPool(PoolLayout(GROUPS, self.num_blocks))
        self.memory = Memory(self.num_blocks)
        self.hits = 0
        self._checks = 0

    @property
    def available(self) -> tuple[int, ...]:
        return tuple(counts.available for counts in self.blocks.counts)

    @property
    def idle(self) -> bool:
        return self.available == self.num_blocks

    def never(self, num_tokens: int, copies: int) -> bool:
        """Could the pool not hold this even when idle?"""
        return any(copies * n > total for n, total in zip(_needs(num_tokens), self.num_blocks, strict=True))

    def take(
        self, tags: Sequence[GroupTags], tokens: Sequence[int], num_tokens: int, max_hit: int, copies: int = 1
    ) -> tuple[list[Tables], int] | None:
        """Tables for `num_tokens` tokens, `copies` times, that begin with what is cached; and the hit, in tokens."""
        hits = self.blocks.match([group.tags for group in tags], tokens, max_hit)
        needs = _needs(num_tokens)
        for group, hit, need in zip(self.blocks.groups, hits, needs, strict=True):
            if not group.can_take(hit, copies * (need - len(hit))):
                return None
        tables: list[Tables] = []
        for _ in range(copies):
            for group, hit in zip(self.blocks.groups, hits, strict=True):
                group.share(hit)
            tables.append(tuple(list(hit) for hit in hits))
        for table in tables:
            for group, blocks, need in zip(self.blocks.groups, table, needs, strict=True):
                blocks += group.allocate(need - len(blocks))
        hit_tokens = len(hits[0]) * BLOCKS[0]
        self.hits += hit_tokens > 0
        return tables, hit_tokens

    def give(self, tables: Tables, tokens: Sequence[int], computed: int) -> None:
        """Let go of a table; its full blocks of [0, computed) stay findable."""
        done = [*tokens[:computed], 0]  # one more, as tags stop before the last token
        for group, blocks, tags in zip(self.blocks.groups, tables, tags_of(done), strict=True):
            size = group.block_size
            for i, (block, tag) in enumerate(zip(blocks, tags.tags, strict=False)):
                group.tag(block, group.generation(block), tag, done[i * size : (i + 1) * size])
            group.free(blocks)

    def held(self, tags: Sequence[GroupTags], tokens: Sequence[int]) -> tuple[int, ...]:
        """How many leading blocks of a chain are cached here, per group: what the index should say."""
        return tuple(len(g.match(t.tags, tokens)) for g, t in zip(self.blocks.groups, tags, strict=True))

    def check(self, owners: Iterable[Tables]) -> None:
        """Blocks are conserved: in use is what the tables name, and now and then every reference count agrees."""
        owners = list(owners)
        for number, counts in enumerate(self.blocks.counts):
            used = {block for tables in owners for block in tables[number]}
            if counts.used != len(used):
                raise Violation(f"{counts.used} blocks of group {number} in use, and {len(used)} named by tables")
        self._checks += 1
        if self._checks % 64 == 0:
            for number, group in enumerate(self.blocks.groups):
                references = [0] * group.num_blocks
                for tables in owners:
                    for block in tables[number]:
                        references[block] += 1
                group.check(references)


def _needs(num_tokens: int) -> tuple[int, ...]:
    return tuple(-(-num_tokens // size) for size in BLOCKS)
