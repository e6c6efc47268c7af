"""Steps in which every sequence has one token and draws the next: their memory stays from step to step.

What `NativeModel.step` lays out anew each time takes longer than all else a small step needs of Python. Here a row is
written again only where something changed: its token, its position and its slot in each step, its blocks and how it is
sampled once in many.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.native.abi import BLOCK, GroupStruct, RowStruct, SamplingStruct, StepStruct, StretchStruct
from kernels.native.library import NAMES
from kernels.native.model import QUICK_LOGITS, NativeModel, group_struct
from kernels.native.sampling import row_fields
from kernels.sampling import RowSampling

MOST_STEPS = 64
"""Of one call."""


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
        self._many, self._many_rechecked = (self._array(MOST_STEPS * rows).data for _ in range(2))
        self._ends = np.zeros(MOST_STEPS)
        self._ending, self._ending_ids = frozenset[int](), self._array(0)
        self._groups = (GroupStruct * len(pools))()
        self._pools = tuple(pools)
        self._step, self._draws = self._structs()
        self._count = 0
        team, whole = model.team, ctypes.addressof
        name = f"baton_step_{NAMES[model.dtype]}"
        self._compute = team.prepared(name, whole(model.struct), whole(self._step))
        self._draw = team.prepared("baton_sample", whole(self._draws))
        self._stretch = StretchStruct(whole(model.struct), whole(self._step), whole(self._draws))
        self._stretch.is_bfloat16 = model.dtype == torch.bfloat16
        self._stretch.tokens, self._stretch.rechecked = _address(self._many), _address(self._many_rechecked)
        self._stretch.ends = self._ends.ctypes.data
        self._go_on = team.prepared("baton_go_on", whole(self._stretch))

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
            self._count_rechecked(self._rechecked[:count])
        self._draw()
        drawn: list[int] = self._drawn[:count].tolist()
        return drawn

    def go_on(
        self, most: int, until: float, ending: frozenset[int], halt: ctypes.c_int32
    ) -> tuple[list[tuple[float, list[int]]], bool]:
        """Steps of the rows of the step last run, each row going on with the token it drew.

        Whether a row has the blocks that its table lists is the caller's to know.

        Args:
            most: steps, at least one.
            until: seconds of the monotonic clock: no step begins that is expected, by the one before it, to end later.
            ending: no step begins behind one that drew such a token.
            halt: none but the first begins while it is not 0. Any thread may set it.

        Returns:
            When each step ended and what its rows drew, as `run`; and whether more can follow: not behind a step that
            was refused.

        Raises:
            ValueError, MemoryError: as `run`, of the first step. A table without room for the next block is refused.
        """
        stretch, count = self._stretch, self._count
        if ending is not self._ending:
            self._ending, self._ending_ids = ending, np.array(sorted(ending), dtype=np.int64)
            stretch.ending, stretch.num_ending = self._ending_ids.ctypes.data, len(ending)
        stretch.most, stretch.until, stretch.halt = min(most, MOST_STEPS), until, ctypes.addressof(halt)
        goes_on = True
        try:
            self._go_on()
        except (ValueError, MemoryError):
            if not stretch.taken:
                raise
            goes_on = False
        taken: int = stretch.taken
        if self._step.top_only:
            self._count_rechecked(self._many_rechecked[: taken * count])
        tokens = self._many[: taken * count].tolist()
        drawn = [tokens[i : i + count] for i in range(0, taken * count, count)]
        return list(zip(self._ends[:taken].tolist(), drawn, strict=True)), goes_on

    def _count_rechecked(self, rechecked: memoryview) -> None:
        self._model.rechecks.count(rechecked.tolist(), -(-self._model.shape.vocab // BLOCK))

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
