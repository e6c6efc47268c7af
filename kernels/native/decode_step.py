"""Steps in which every sequence has one token and draws the next: their memory stays from step to step.

What `NativeModel.step` lays out anew each time takes longer than all else a small step needs of Python. Here a row is
written again only where something changed: its token, its position and its slot in each step, its blocks and how it is
sampled once in many.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels.native.abi import BLOCK, GroupStruct, RowStruct, SamplingStruct, StepStruct
from kernels.native.library import NAMES
from kernels.native.model import QUICK_LOGITS, NativeModel, group_struct
from kernels.native.sampling import row_fields
from kernels.sampling import RowSampling

FEW_ROWS = 6
"""Up to here rows are written one by one: a call of numpy takes as long as one of them."""


class DecodeStep:
    """One step's arrays. Rows are written by `sit` and `place`, and the first so many computed by `run`.

    Args:
        pools: as of `NativeModel.step`.
        rows: most sequences of a step.
        blocks: most blocks of a sequence in a layer group.
    """

    def __init__(self, model: NativeModel, pools: Sequence[Tensor], rows: int, blocks: int) -> None:
        self.rows, self.blocks = rows, blocks
        self.logits = model.passing_logits(rows)
        self._model = model
        self._sizes = [pool.shape[4] for pool in pools]
        self._numbers: list[NDArray[np.int64]] = []  # what structures point to
        self._tokens, self._positions, self._lengths = (self._array(rows).data for _ in range(3))
        self._slots = [self._array(rows).data for _ in pools]
        self._tables = [self._array(rows, blocks) for _ in pools]
        self._block_ids = [table.data for table in self._tables]
        self._drawn, self._rechecked = (self._array(rows).data for _ in range(2))
        self._sampling = (RowStruct * rows)()
        # the position of every row's draw, within the structures
        at, apart = RowStruct.position.offset, ctypes.sizeof(RowStruct)
        places = memoryview(self._sampling).cast("B")
        self._draw_positions = np.ndarray((rows,), np.uint64, places, at, (apart,))
        self._views = [np.asarray(part) for part in (self._tokens, self._positions, self._lengths, self._drawn)]
        self._slot_views, self._row_numbers = [np.asarray(slots) for slots in self._slots], np.arange(rows)
        self._groups = (GroupStruct * len(pools))()
        self._pools = tuple(pools)
        self._step, self._draws = self._structs()
        self._count = 0
        team, whole = model.team, ctypes.addressof
        name = f"baton_step_{NAMES[model.dtype]}"
        self._compute = team.prepared(name, whole(model.struct), whole(self._step))
        self._draw = team.prepared("baton_sample", whole(self._draws))

    def sit(self, row: int, tables: Sequence[Sequence[int]], sampling: RowSampling) -> None:
        """A sequence's blocks per layer group, and how its next tokens are drawn; the position is `place`'s to say."""
        for held, table in zip(self._tables, tables, strict=True):
            held[row, : len(table)] = table
        self._sampling[row] = RowStruct(*row_fields(sampling))

    def place(self, row: int, token: int, position: int, tables: Sequence[Sequence[int]]) -> None:
        """A sequence's next token. Raises IndexError when its blocks do not reach so far."""
        self._tokens[row], self._positions[row], self._lengths[row] = token, position, position + 1
        for slots, table, size in zip(self._slots, tables, self._sizes, strict=True):
            slots[row] = table[position // size] * size + position % size
        self._sampling[row].position = position + 1

    def follow(self, count: int) -> None:
        """The first `count` rows go on with the tokens they drew.

        Raises IndexError when the array has no room for a row's next block. Whether the row has that block is the
        caller's to know.
        """
        if count <= FEW_ROWS:
            self._follow_few(count)
            return
        tokens, positions, lengths, drawn = (view[:count] for view in self._views)
        after = positions + 1
        slots = [
            table[self._row_numbers[:count], after // size] * size + after % size
            for table, size in zip(self._tables, self._sizes, strict=True)
        ]
        tokens[:], positions[:] = drawn, after
        lengths += 1
        for view, found in zip(self._slot_views, slots, strict=True):
            view[:count] = found
        self._draw_positions[:count] += np.uint64(1)

    def _follow_few(self, count: int) -> None:
        parts = tuple(zip(self._slots, self._block_ids, self._sizes, strict=True))
        for row in range(count):
            after = self._positions[row] + 1
            places = [table[row, after // size] * size + after % size for _, table, size in parts]
            self._tokens[row], self._positions[row], self._lengths[row] = self._drawn[row], after, after + 1
            for (slots, _, _), place in zip(parts, places, strict=True):
                slots[row] = place
            self._sampling[row].position = after + 1

    def run(self, count: int, looked_at: int) -> list[int]:
        """KV of the first `count` rows' tokens into the pools, and the token each draws; -1: its largest logit is not
        finite.

        Args:
            looked_at: logits that the draws of all rows look at, as `logits_looked_at`; of others `logits` may have
                minus infinity.

        Raises:
            ValueError, MemoryError: as `NativeModel.step`.
        """
        step, model = self._step, self._model
        if count != self._count:
            step.num_tokens = step.num_sequences = step.num_logits = self._draws.num_rows = self._count = count
        quick = model.has_quick_head and count <= model.quick_rows and looked_at <= QUICK_LOGITS
        step.top_only = quick
        self._compute()
        if quick:
            model.rechecks.count(self._rechecked[:count].tolist(), -(-model.shape.vocab // BLOCK))
        self._draw()
        drawn: list[int] = self._drawn[:count].tolist()
        return drawn

    def _array(self, *shape: int) -> NDArray[np.int64]:
        self._numbers.append(np.zeros(shape, dtype=np.int64))
        return self._numbers[-1]

    def _structs(self) -> tuple[StepStruct, SamplingStruct]:
        rows = self.rows
        counted, starts = self._array(rows + 1), self._array(rows + 1)
        counted[:], starts[:] = np.arange(rows + 1), np.arange(rows + 1) * self.blocks
        for i, (pool, slots, tables) in enumerate(zip(self._pools, self._slots, self._tables, strict=True)):
            addresses = (_address(slots), tables.ctypes.data, starts.ctypes.data)
            self._groups[i] = group_struct(self._model, pool, addresses)
        step = StepStruct(
            0,
            0,
            0,
            len(self._pools),
            _address(self._tokens),
            _address(self._positions),
            counted.ctypes.data,
            _address(self._lengths),
            counted.ctypes.data,
            ctypes.addressof(self._groups),
            self.logits.data_ptr(),
            0,
            _address(self._rechecked),
            ctypes.addressof(self._sampling),
        )
        places = self.logits.data_ptr(), ctypes.addressof(self._sampling), _address(self._drawn)
        return step, SamplingStruct(*places, 0, self._model.shape.vocab)


def _address(view: memoryview) -> int:
    return np.asarray(view).ctypes.data
