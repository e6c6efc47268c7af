"""The start-up check of native kernels: a layer of the model's shape has the same bits in any company, on any threads.

The library's loops do not depend on sizes, so widths that only cost time are cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.linear.quantize import NONE, Int4Weight, Matrix, Quant, to_int4, to_int8
from kernels.native.arena import Arena
from kernels.native.library import NativeLibrary, Team
from kernels.native.model import GroupPlan, NativeLayer, NativeModel, Shape
from kernels.native.packed import PackedLinear, pack_linear
from kernels.tile_layouts import LANES16
from shared.kv.layout import LayerGroup, PoolLayout
from shared.kv.pool import pool_views
from shared.model.config import ModelConfig
from shared.model.rope_table import rope_table

_BLOCK_SIZE = 32
_SEQ_LEN = 600
_CHUNKS = ((1, 599), (512, 88), (130, 300, 169, 1))
_POSITIONS = (0, 63, 64, 511, 512, _SEQ_LEN - 1)
_MOST_INTERMEDIATE, _MOST_VOCAB = 2048, 512


class NativeCheck:
    """One random layer of a model's shape.

    Args:
        kv_dtype: "int8" or "float16", or "" for KV as the model computes.

    Raises:
        NativeUnavailable: the system gives no threads.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, library: NativeLibrary, quant: Quant = NONE, kv_dtype: str = ""
    ) -> None:
        self._shape = Shape(
            hidden=config.hidden_size,
            intermediate=min(config.intermediate_size, _MOST_INTERMEDIATE),
            vocab=min(config.vocab_size, _MOST_VOCAB),
            q_heads=config.num_q_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            scale=config.scale,
        )
        self._dtype, self._quant, self._kv_dtype = dtype, quant, kv_dtype
        self._generator = torch.Generator().manual_seed(0)
        self._rotary = rope_table(config.rope, config.head_dim, max(_SEQ_LEN, config.max_positions), dtype)
        shape, size = self._shape, config.head_dim
        self._models = self._make(library, shape.q_heads * size, shape.kv_heads * size)
        self._tokens = torch.randint(0, shape.vocab, (_SEQ_LEN,), generator=self._generator)
        self._num_blocks = -(-_SEQ_LEN // _BLOCK_SIZE)

    def difference(self) -> str | None:
        """What differed, or None."""
        pools = [self._pool(), self._pool()]
        whole = self._steps(self._models[0], pools[0], (_SEQ_LEN,))
        if not bool(torch.isfinite(whole).all()):
            return "reads slots that were never written"
        if not torch.equal(self._steps(self._models[1], pools[1], (_SEQ_LEN,)), whole):
            return "differs on two threads"
        for chunks in _CHUNKS:
            if not torch.equal(self._steps(self._models[1], self._pool(), chunks), whole):
                return f"differs in chunks of {chunks}"
        for position in _POSITIONS:
            if not torch.equal(self._beside_a_neighbour(pools[0], position), whole[position]):
                return f"differs at position {position} beside a neighbour"
        return None

    def _make(self, library: NativeLibrary, q: int, kv: int) -> list[NativeModel]:
        shape = self._shape
        quant, head = self._quant, self._quant.head
        teams = [Team(library, threads) for threads in (1, 2)]

        def packed(*parts: tuple[int, int], gated: bool = False, quant: Quant = quant) -> PackedLinear:
            weights = self._weights(parts, quant)
            plan = Arena.plan()
            pack_linear(teams[0], plan, weights, [], self._dtype, gated, quant)
            return pack_linear(teams[0], Arena(plan.used), weights, [], self._dtype, gated, quant)

        norm = torch.ones(shape.hidden)
        inner, outer = (shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)
        qkv, o, down = packed((q + 2 * kv, shape.hidden)), packed((shape.hidden, q)), packed(outer)
        layer = NativeLayer(norm, norm, qkv, o, packed(inner, inner, gated=True), down, 0, 0)
        embedding, last = self._random(shape.vocab, shape.hidden), packed((shape.vocab, shape.hidden), quant=head)
        return [NativeModel(team, self._dtype, shape, embedding, self._rotary, [layer], norm, last) for team in teams]

    def _weights(self, parts: tuple[tuple[int, int], ...], quant: Quant) -> list[Matrix]:
        """Floats, or what a checkpoint of such integers would hold, in an order of its own where it can have one."""
        inputs = parts[0][1]
        order = torch.randperm(inputs, generator=self._generator)
        made: list[Matrix] = []
        for out, _ in parts:
            weight = self._random(out, inputs) / inputs**0.5
            if not quant.as_kept:
                made.append(weight)
            elif quant.bits == 8:
                made.append(to_int8(weight))
            else:
                four = to_int4(weight, quant.group)
                zeros = torch.full_like(four.minima, -8.0)
                made.append(Int4Weight(four.integers, four.scales, zeros, quant.group, quant.in_steps, order))
        return made

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)

    def _pool(self) -> Tensor:
        """One layer's pool of twice the blocks the sequence needs, never written."""
        kv_dtype = self._kv_dtype or str(self._dtype).removeprefix("torch.")
        heads, size = self._shape.kv_heads, self._shape.head_dim
        group = LayerGroup("full", (0,), heads, size, _BLOCK_SIZE, kv_dtype, LANES16)
        layout = PoolLayout((group,), (2 * self._num_blocks,))
        never = torch.full((layout.total_bytes,), 0xFF, dtype=torch.uint8)  # NaN, whatever elements or scales are
        return pool_views(never, layout)[0]

    def _steps(self, model: NativeModel, pool: Tensor, chunks: tuple[int, ...]) -> Tensor:
        """Logits of every position, computed in such steps."""
        table, rows, start = range(self._num_blocks - 1, -1, -1), [], 0
        for size in chunks:
            positions = torch.arange(start, start + size)
            slots = [table[p // _BLOCK_SIZE] * _BLOCK_SIZE + p % _BLOCK_SIZE for p in range(start, start + size)]
            group = GroupPlan([table], slots)
            tokens, every = self._tokens[start : start + size].contiguous(), torch.arange(size)
            rows.append(model.step(tokens, positions, [0, size], [start + size], every, [group], [pool]))
            start += size
        return torch.cat(rows)

    def _beside_a_neighbour(self, pool: Tensor, position: int) -> Tensor:
        """The logits of one position, in one step with three tokens of another sequence."""
        own, other = range(self._num_blocks - 1, -1, -1), range(self._num_blocks, 2 * self._num_blocks)
        slots = [self._num_blocks * _BLOCK_SIZE + i for i in range(3)] + [-1]
        tokens = torch.cat((self._tokens[:3], self._tokens[position : position + 1]))
        positions = torch.tensor([0, 1, 2, position])
        group = GroupPlan([other, own], slots)
        lengths = [3, position + 1]
        return self._models[1].step(tokens, positions, [0, 3, 4], lengths, torch.tensor([3]), [group], [pool])[0]
