"""Blocks that are to be overwritten with zeros, and the sequences that wait for it."""

from __future__ import annotations

from collections.abc import Iterable

from shared.engine.sequence import Sequence
from shared.kv.block_pool import BlockPool


class BlockCleaning:
    """Dirty blocks of a pool, and partly filled tails of sequences that only compute; blocks are (group, block id)."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._tails: list[tuple[int, int]] = []
        self._cleaned_for: dict[tuple[int, int], Sequence] = {}  # by tail, pinned until it is zeroed

    def add_tails(self, seq: Sequence) -> None:
        """A partly filled block travels whole: what lies behind its last token must be nobody's."""
        for group, table in enumerate(seq.tables):
            if len(seq.tokens) % table.block_size and table.own:
                block = (group, table.block_ids[-1])
                self._tails.append(block)
                self._cleaned_for[block] = seq
                seq.cleaning += 1

    def take(self) -> tuple[tuple[int, int], ...]:
        """What is to be overwritten now; each block is named once and held until it is `done`."""
        if not (self._tails or self._pool.is_dirty):
            return ()
        blocks = (*self._tails, *self._pool.take_dirty())
        self._tails = []
        return blocks

    def done(self, blocks: Iterable[tuple[int, int]]) -> list[Sequence]:
        """These are overwritten: the sequences that waited for them, and now for none any more."""
        free = []
        for block in blocks:
            seq = self._cleaned_for.pop(block, None)
            if seq is None:
                self._pool.cleaned([block])
            else:
                seq.cleaning -= 1
                if not seq.cleaning:
                    free.append(seq)
        return free

    def failed(self, blocks: Iterable[tuple[int, int]]) -> None:
        """These could not be overwritten: nobody gets them any more, and who waits for a tail waits on."""
        self._pool.not_cleaned(block for block in blocks if block not in self._cleaned_for)
