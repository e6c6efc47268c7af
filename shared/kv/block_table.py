"""The blocks of one sequence in one layer group, in position order.

Ownership, in token positions of a table with block size b:

    [0, num_shared * b)               shared with other tables; read, never written
    [num_shared * b, len(table) * b)  this sequence's own; written by its steps, or by the hand-off that pulls for it,
                                      until they are full; from then on others may share them once they are tagged
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.contracts.ids import BlockGeneration


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Block ids with the generations they were taken at."""

    block_size: int  # token slots in a block
    block_ids: tuple[int, ...]
    generations: tuple[BlockGeneration, ...]
    num_shared: int  # leading blocks found in the prefix cache

    def __post_init__(self) -> None:
        if len(self.block_ids) != len(self.generations) or not 0 <= self.num_shared <= len(self.block_ids):
            raise ValueError("a block table needs one generation per block, and at most all of it is shared")

    def __len__(self) -> int:
        return len(self.block_ids)

    @property
    def own(self) -> tuple[int, ...]:
        """The blocks this sequence may write."""
        return self.block_ids[self.num_shared :]

    def grown(self, block_ids: Sequence[int], generations: Sequence[BlockGeneration]) -> BlockTable:
        """The table with more blocks of its own behind the others."""
        return BlockTable(
            self.block_size, (*self.block_ids, *block_ids), (*self.generations, *generations), self.num_shared
        )

    def first(self, num_tokens: int) -> BlockTable:
        """The leading full blocks that hold [0, num_tokens), all of them shared."""
        count = num_tokens // self.block_size
        return BlockTable(self.block_size, self.block_ids[:count], self.generations[:count], num_shared=count)
