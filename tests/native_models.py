"""Small models and plans of single native operations, for tests."""

from __future__ import annotations

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
from tests.native import Guarded, put_token


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


class Cache:
    """A pool of NaN between guards, with one sequence's random keys and values in scattered blocks."""

    def __init__(self, model: NativeModel, seq_len: int, block_size: int = 32, seed: int = 0, others: int = 3) -> None:
        shape, dtype = model.shape, model.dtype
        self.model = model
        num_blocks = -(-seq_len // block_size)
        self.guarded = Guarded(num_blocks + others, 1, 2, shape.kv_heads, block_size, shape.head_dim, dtype=dtype)
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

    def textbook(self) -> Tensor:
        """[T, H, D] in float64."""
        repeats = self.q.shape[1] // self.k.shape[1]
        k, v = (x.double().repeat_interleave(repeats, dim=1) for x in (self.k, self.v))
        scores = torch.einsum("thd,shd->hts", self.q.double(), k) * self.model.shape.scale
        future = torch.ones(len(k), len(k), dtype=torch.bool).triu(1)
        return torch.einsum("hts,shd->thd", scores.masked_fill(future, float("-inf")).softmax(-1), v)
