"""Small models and plans of single native operations, for tests."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.native.arena import Arena
from kernels.native.library import Team
from kernels.native.model import GroupPlan, NativeLayer, NativeModel, Shape, StepArrays
from kernels.native.packed import PackedLinear, pack_linear, packed_bytes
from kernels.rotary import rotary_table
from kernels.rotary.frequencies import plain
from tests.native import Guarded, GuardedIntegers, put_token, token_at


def rand(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(team: Team, parts: Sequence[Tensor], biases: Sequence[Tensor], gated: bool = False) -> PackedLinear:
    out = sum(len(part) for part in parts)
    arena = Arena(packed_bytes(out, parts[0].shape[1], parts[0].dtype, gated, bool(biases)))
    return pack_linear(team, arena, parts, biases, parts[0].dtype, gated)


def make_model(team: Team, dtype: torch.dtype, heads: tuple[int, int, int], positions: int = 1200) -> NativeModel:
    """A model of one layer, of which only attention is used."""
    q_heads, kv_heads, head_dim = heads
    shape = Shape(8, 16, 8, q_heads, kv_heads, head_dim, 1e-5, head_dim**-0.5)
    q, kv = q_heads * head_dim, kv_heads * head_dim

    def zeros(out: int, inner: int) -> PackedLinear:
        return packed(team, [torch.zeros(out, inner, dtype=dtype)], [])

    gate = torch.zeros(16, 8, dtype=dtype)
    gated = packed(team, [gate, gate], [], gated=True)
    layer = NativeLayer(torch.ones(8), torch.ones(8), zeros(q + 2 * kv, 8), zeros(8, q), gated, zeros(8, 16), 0, 0)
    table = rotary_table(plain(head_dim, 10000.0), positions, dtype)
    return NativeModel(team, dtype, shape, torch.zeros(8, 8), table, [layer], torch.ones(8), None)


def make_plan(
    model: NativeModel,
    pool: Tensor,
    lengths: Sequence[tuple[int, int]],
    tables: Sequence[Sequence[int]],
    unstored: int = 0,
) -> StepArrays:
    """Sequences given as (first position, tokens); the first `unstored` tokens of each are not stored."""
    block_size = pool.shape[4]
    positions, slots, cumulated = [], [], [0]
    for (start, count), table in zip(lengths, tables, strict=True):
        for position in range(start, start + count):
            positions.append(position)
            slot = table[position // block_size] * block_size + position % block_size
            slots.append(-1 if position < start + unstored else slot)
        cumulated.append(len(positions))
    place = torch.tensor(positions)
    lens = [start + count for start, count in lengths]
    nothing = torch.empty(0, dtype=torch.int64)
    group = GroupPlan(tables, slots)
    tokens = torch.zeros(len(positions), dtype=torch.int64)
    return StepArrays(model, tokens, place, cumulated, lens, nothing, [group], [pool], torch.empty(0, 8))


def guarded_pool(model: NativeModel, num_blocks: int, block_size: int, kv: torch.dtype) -> Guarded | GuardedIntegers:
    """A pool of one layer that was never written."""
    shape = (num_blocks, 1, 2, model.shape.kv_heads, block_size, model.shape.head_dim)
    return GuardedIntegers(*shape) if kv == torch.int8 else Guarded(*shape, dtype=kv)


def operands(model: NativeModel, kv: torch.dtype) -> torch.dtype:
    """What queries, keys and values are before keys and values are stored."""
    return torch.float32 if kv == torch.float16 else model.dtype


class Cache:
    """A pool of NaN between guards, with one sequence's random keys and values in scattered blocks.

    Args:
        kv: what the pool holds them in, if not the model's dtype.
    """

    def __init__(
        self,
        model: NativeModel,
        seq_len: int,
        block_size: int = 32,
        seed: int = 0,
        others: int = 3,
        kv: torch.dtype | None = None,
    ) -> None:
        shape, kept = model.shape, kv or model.dtype
        dtype = operands(model, kept)
        self.model = model
        num_blocks = -(-seq_len // block_size)
        self.guarded = guarded_pool(model, num_blocks + others, block_size, kept)
        self.pool = self.guarded.tensor
        self.table = random.Random(seed).sample(range(len(self.pool)), num_blocks)
        self.k, self.v = (rand(seed + i, seq_len, shape.kv_heads, shape.head_dim).to(dtype) for i in (10, 20))
        self.q = rand(seed + 30, seq_len, shape.q_heads, shape.head_dim).to(dtype)
        for position in range(seq_len):
            block, offset = self.table[position // block_size], position % block_size
            put_token(self.pool, block, offset, self.k[position], self.v[position])

    def attend(self, first: int, last: int, model: NativeModel | None = None) -> Tensor:
        model = model or self.model
        plan = make_plan(model, self.pool, [(first, last - first)], [self.table])
        result = model.attention(self.q[first:last].contiguous(), plan)
        self.guarded.check()
        return result

    def _stored(self) -> tuple[Tensor, Tensor]:
        """What the pool holds, of integers what they stand for: [T, KV, D] keys and values."""
        places = ((self.table[p // self.pool.shape[4]], p % self.pool.shape[4]) for p in range(len(self.k)))
        keys, values = zip(*(token_at(self.pool, *place) for place in places), strict=True)
        return torch.stack(keys), torch.stack(values)

    def textbook(self) -> Tensor:
        """[T, H, D] in float64."""
        repeats = self.q.shape[1] // self.k.shape[1]
        k, v = (x.double().repeat_interleave(repeats, dim=1) for x in self._stored())
        scores = torch.einsum("thd,shd->hts", self.q.double(), k) * self.model.shape.scale
        future = torch.ones(len(k), len(k), dtype=torch.bool).triu(1)
        return torch.einsum("hts,shd->thd", scores.masked_fill(future, float("-inf")).softmax(-1), v)


class Shared:
    """Sequences over one pool: each begins with the blocks of another one up to some length, and goes on with its own.

    Args:
        lengths: (tokens shared with the sequence `of`, `of`, tokens in all) of each sequence.
        kv: what the pool holds them in, if not the model's dtype.
    """

    def __init__(
        self,
        model: NativeModel,
        lengths: Sequence[tuple[int, int, int]],
        block_size: int = 32,
        kv: torch.dtype | None = None,
    ) -> None:
        shape, kept = model.shape, kv or model.dtype
        dtype = operands(model, kept)
        blocks = sum(-(-length // block_size) for _, _, length in lengths)
        self.model = model
        self.guarded = guarded_pool(model, blocks + 1, block_size, kept)
        self.pool = self.guarded.tensor
        self.tables: list[list[int]] = []
        self.lengths = [length for _, _, length in lengths]
        free = itertools.count()
        for i, (shared, of, length) in enumerate(lengths):
            assert shared % block_size == 0
            table = self.tables[of][: shared // block_size] if i else []
            table += [next(free) for _ in range(len(table), -(-length // block_size))]
            k, v = (rand(seed + i, length, shape.kv_heads, shape.head_dim).to(dtype) for seed in (100, 200))
            for position in range(shared if i else 0, length):
                put_token(self.pool, table[position // block_size], position % block_size, k[position], v[position])
            self.tables.append(table)
        self.q = rand(300, max(self.lengths), shape.q_heads, shape.head_dim).to(dtype)

    def attend(self, steps: Sequence[tuple[int, int]], model: NativeModel | None = None) -> list[Tensor]:
        """Attention of the last `rows` tokens of each (sequence, rows), in one step."""
        model = model or self.model
        places = [(self.lengths[i] - rows, rows) for i, rows in steps]
        plan = make_plan(model, self.pool, places, [self.tables[i] for i, _ in steps])
        result = model.attention(torch.cat([self.q[first : first + rows] for first, rows in places]), plan)
        self.guarded.check()
        return list(result.split([rows for _, rows in steps]))
