"""The KV blocks of all layer groups of a worker. Pure; see `group_pool`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from shared.contracts.ids import BlockTag, ScopeGeneration, TenantId
from shared.kv.block_table import BlockTable
from shared.kv.eviction import Eviction
from shared.kv.group_pool import KEPT, NOBODY, BlockCounts, GroupPool, Keeping, Owner, TagEvents
from shared.kv.layout import PoolLayout

__all__ = ["KEPT", "NOBODY", "BlockCounts", "BlockPool", "GroupPool", "Keeping", "Owner", "TagEvents"]


ZEROED_BYTES = 64 * 1024 * 1024
"""Overwritten between two steps: a purge of a full pool must not make others' tokens wait for all of it."""


class BlockPool:
    """The groups' pools side by side; every argument and result is plural per group."""

    def __init__(self, layout: PoolLayout, eviction: Eviction = "reuse") -> None:
        self.groups = tuple(
            GroupPool(num_blocks, group.block_size, eviction)
            for group, num_blocks in zip(layout.groups, layout.num_blocks, strict=True)
        )
        self._zeroed_at_once = tuple(max(1, ZEROED_BYTES // group.span_bytes) for group in layout.groups)
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

    def expire(self, now: float) -> int:
        """See `GroupPool.expire`; `now` is in seconds and never falls."""
        return sum(group.expire(now) for group in self.groups)

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
        """(group, block id) of condemned blocks to zero before the next step, of each group about ZEROED_BYTES.

        Each must come back through `cleaned`.
        """
        return tuple(
            (g, block_id)
            for g, (group, most) in enumerate(zip(self.groups, self._zeroed_at_once, strict=True))
            for block_id in group.take_dirty(most)
        )

    def cleaned(self, blocks: Iterable[tuple[int, int]]) -> None:
        """(group, block id) of `take_dirty` that are zeroed."""
        for group, block_id in blocks:
            self.groups[group].cleaned([block_id])

    def not_cleaned(self, blocks: Iterable[tuple[int, int]]) -> None:
        """(group, block id) of `take_dirty` that could not be zeroed."""
        for group, block_id in blocks:
            self.groups[group].not_cleaned([block_id])

    def will_have(self, counts: Sequence[int]) -> bool:
        """True if so many blocks per group can be handed out once those being zeroed are."""
        return all(
            group.can_take((), count - group.num_cleaning) for group, count in zip(self.groups, counts, strict=True)
        )

    def drain_events(self) -> tuple[TagEvents, ...]:
        """Tags stored and removed since the last call, per group."""
        return tuple(group.drain_events() for group in self.groups)
