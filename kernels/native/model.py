"""A model as the library knows it, and its steps: one call each."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.native.abi import (
    BLOCK,
    EMBEDDING_KINDS,
    KV_ELEMENTS,
    KV_FLOAT16,
    KV_INT8,
    GroupStruct,
    LayerStruct,
    LinearStruct,
    ModelStruct,
    StepStruct,
)
from kernels.native.compiler import NativeUnavailable
from kernels.native.library import NAMES, Team
from kernels.native.packed import PackedLinear, QuickHead
from kernels.tile_layouts import SCALE_BYTES


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model, and its two constants."""

    hidden: int
    intermediate: int
    vocab: int
    q_heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """One layer's weights; norms are [hidden] float32."""

    attention_norm: Tensor
    mlp_norm: Tensor
    qkv: PackedLinear
    o: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    group: int  # its layer group
    index: int  # its place in the group


QUICK_ROWS = 4
"""Most rows of logits a quick head is used for: more are bound by arithmetic, which it adds to."""
QUICK_LOGITS = 100
"""Most logits that the draws of all rows together look at, with a quick head: more take longer than the whole head."""


@dataclass(slots=True)
class Rechecks:
    """What quick heads saved, and where they did not."""

    rows: int = 0
    blocks: int = 0  # computed by the real head, of all rows together
    fallbacks: int = 0  # rows that needed more than a quarter of it

    def count(self, rechecked: Sequence[int], blocks: int) -> None:
        for row in rechecked:
            self.rows += 1
            self.blocks += row
            self.fallbacks += 4 * row > blocks


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A step's addressing in one layer group."""

    block_tables: Sequence[Sequence[int]]  # per sequence
    slots: Sequence[int]  # [num_tokens] or more; -1: not stored


_KV_FORMATS = {torch.int8: KV_INT8, torch.float16: KV_FLOAT16}
"""Of pools that are not of the model's dtype."""


def require_runnable(dtype: torch.dtype, head_dim: int) -> None:
    """Raises NativeUnavailable, with the reason, if the library cannot run such a model."""
    if dtype not in NAMES:
        name = str(dtype).removeprefix("torch.")
        raise NativeUnavailable(f"the native kernels compute in {' and '.join(NAMES.values())}, not in {name}")
    if head_dim % 4:
        raise NativeUnavailable(f"the native kernels need a head size that 4 divides, not {head_dim}")


class NativeModel:
    """Weights and threads. Used by one thread at a time.

    Args:
        embedding: [vocab, hidden], float32, bfloat16 or float16, as stored.
        rotary: [positions, 2, head_dim] float32, as `kernels.rotary.rotary_table`.
        final_norm: [hidden] float32.
        head: None for one who asks for no logits.
        quick: the head again as integers, for steps that only look for the largest logit.
    """

    def __init__(
        self,
        team: Team,
        dtype: torch.dtype,
        shape: Shape,
        embedding: Tensor,
        rotary: Tensor,
        layers: Sequence[NativeLayer],
        final_norm: Tensor,
        head: PackedLinear | None,
        quick: QuickHead | None = None,
    ) -> None:
        require_runnable(dtype, shape.head_dim)
        assert embedding.shape == (shape.vocab, shape.hidden), (embedding.shape, shape)
        assert embedding.is_contiguous()
        assert rotary.dtype == torch.float32
        assert rotary.shape[1:] == (2, shape.head_dim), (rotary.shape, shape)
        _check_layers(layers, final_norm, head, shape)
        self.team, self.dtype, self.shape = team, dtype, shape
        self.positions = rotary.shape[0]
        structs = (LayerStruct * len(layers))(*[_layer_struct(layer) for layer in layers])
        self._kept = (embedding, rotary.contiguous(), tuple(layers), final_norm, head, quick, structs)
        kind = EMBEDDING_KINDS.index(str(embedding.dtype).removeprefix("torch."))
        self.struct = ModelStruct(
            len(layers),
            shape.hidden,
            shape.intermediate,
            shape.vocab,
            shape.q_heads,
            shape.kv_heads,
            shape.head_dim,
            self.positions,
            kind,
            shape.eps,
            shape.scale,
            embedding.data_ptr(),
            self._kept[1].data_ptr(),
            final_norm.data_ptr(),
            ctypes.addressof(structs),
            head.struct if head is not None else LinearStruct(),
            quick.linear.struct if quick is not None else LinearStruct(),
            quick.norms.data_ptr() if quick is not None else None,
        )
        self.has_quick_head = quick is not None
        self.rechecks, self.quick_rows = Rechecks(), QUICK_ROWS
        self._room: Tensor | None = None  # of passing logits

    def step(
        self,
        token_ids: Tensor,
        positions: Tensor,
        cu_seqlens: Sequence[int],
        seq_lens: Sequence[int],
        logit_rows: Tensor,
        groups: Sequence[GroupPlan],
        pools: Sequence[Tensor],
        top_only: bool = False,
        passing: bool = False,
    ) -> Tensor:
        """KV of every token into the pools, and the wanted logits: [num_logit_rows, vocab] float32.

        Args:
            token_ids, positions: [num_tokens] or more, int64; what is beyond the sequences' tokens is not looked at.
            cu_seqlens: [num_seqs + 1] running sum of query lengths.
            seq_lens: [num_seqs] tokens visible to the last row of each sequence.
            logit_rows: [num_logit_rows] int64.
            pools: per group [num_blocks, num_layers, 2, kv_heads, block_size, head_dim], contiguous, of the model's
                dtype or float16; or int8, every block with its scales behind it, as `shared.kv.pool.Pool.views` has
                them.

            top_only: the caller looks for the largest logits alone. With a quick head, tokens that cannot be the
                largest then have minus infinity; those that can, the bits they have otherwise.
            passing: the caller is done with the logits when the next such step begins, which overwrites them.

        Raises:
            ValueError: a number points outside the pool, the vocabulary or the context. Nothing was computed.
            MemoryError: there is no memory for the step.
        """
        num_rows = logit_rows.shape[0]
        logits = self.passing_logits(num_rows) if passing else self._logits(num_rows)
        plan = StepArrays(self, token_ids, positions, cu_seqlens, seq_lens, logit_rows, groups, pools, logits)
        quick = top_only and self.has_quick_head and 0 < num_rows <= self.quick_rows
        if quick:
            rechecked = np.zeros(num_rows, dtype=np.int64)
            plan.struct.top_only, plan.struct.rechecked = 1, rechecked.ctypes.data
        self.team.call("baton_step", self.dtype, ctypes.byref(self.struct), ctypes.byref(plan.struct))
        if quick:
            self.rechecks.count(rechecked.tolist(), -(-self.shape.vocab // BLOCK))
        return logits

    def _logits(self, num_rows: int) -> Tensor:
        return torch.empty((num_rows, self.shape.vocab), dtype=torch.float32)

    def passing_logits(self, num_rows: int) -> Tensor:
        """Memory kept from step to step: made anew, its pages alone cost a small step's bookkeeping."""
        if self._room is None or self._room.shape[0] < num_rows:
            self._room = self._logits(num_rows)
        return self._room[:num_rows]

    def sweep(self, rows: int, head_rows: int) -> None:
        """Every product of the model for so many rows and nothing else: the least a step can take, for benchmarks."""
        self.team.call("baton_sweep", self.dtype, ctypes.byref(self.struct), rows, head_rows)

    def rotate(self, qkv: Tensor, plan: StepArrays, index: int = 0) -> None:
        """Rotate queries in place, rotate and store keys, store values of layer `index` of the first group: for tests.

        Args:
            qkv: [num_tokens, q_heads + 2 kv_heads, head_dim], contiguous; float32 for a pool of float16.
        """
        assert qkv.dtype == plan.operands(self.dtype), (qkv.dtype, self.dtype)
        assert qkv.shape[1:] == (self.shape.q_heads + 2 * self.shape.kv_heads, self.shape.head_dim), qkv.shape
        assert qkv.is_contiguous()
        arguments = ctypes.byref(self.struct), ctypes.byref(plan.struct), qkv.data_ptr(), index
        self.team.call("baton_rotate", self.dtype, *arguments)

    def attention(self, q: Tensor, plan: StepArrays, layers: range = range(1)) -> Tensor:
        """Attention of so many layers of the first group, one after the other, for tests and benchmarks.

        Args:
            q: [num_tokens, q_heads, head_dim], contiguous; float32 for a pool of float16.

        Returns:
            The last layer's results, in the same shape, of the model's dtype.
        """
        assert q.dtype == plan.operands(self.dtype), (q.dtype, self.dtype)
        assert q.shape[1:] == (self.shape.q_heads, self.shape.head_dim), q.shape
        assert q.is_contiguous()
        y = torch.full_like(q, float("nan"), dtype=self.dtype)
        pointers = ctypes.byref(self.struct), ctypes.byref(plan.struct), q.data_ptr(), y.data_ptr()
        self.team.call("baton_attention", self.dtype, *pointers, layers.start, layers.stop)
        return y

    def keys_read(self, plan: StepArrays) -> int:
        """Keys of a KV head that attention of the first group reads: what sequences share is read once."""
        keys = ctypes.c_int64()
        self.team.call(
            "baton_keys_read", self.dtype, ctypes.byref(self.struct), ctypes.byref(plan.struct), ctypes.byref(keys)
        )
        return keys.value


class StepArrays:
    """A step's plan as the library reads it. Keeps what it points to."""

    def __init__(
        self,
        model: NativeModel,
        token_ids: Tensor,
        positions: Tensor,
        cu_seqlens: Sequence[int],
        seq_lens: Sequence[int],
        logit_rows: Tensor,
        groups: Sequence[GroupPlan],
        pools: Sequence[Tensor],
        logits: Tensor,
    ) -> None:
        num_tokens = cu_seqlens[-1]
        assert len(seq_lens) == len(cu_seqlens) - 1, (seq_lens, cu_seqlens)
        assert len(groups) == len(pools), (len(groups), len(pools))
        for tensor in (token_ids, positions, logit_rows):
            assert tensor.dtype == torch.int64
            assert tensor.is_contiguous()
        assert min(token_ids.shape[0], positions.shape[0]) >= num_tokens, (token_ids.shape, positions.shape, num_tokens)
        numbers = _Numbers()
        cumulated, lengths = numbers.add(cu_seqlens), numbers.add(seq_lens)
        places = [_places(numbers, group, num_tokens, len(seq_lens)) for group in groups]
        array = numbers.array()
        base = array.ctypes.data
        structs = (GroupStruct * len(groups))()
        for i, (place, pool) in enumerate(zip(places, pools, strict=True)):
            structs[i] = group_struct(model, pool, [base + 8 * first for first in place])
        self._kept = (token_ids, positions, logit_rows, logits, pools, structs, array)
        self._first_pool = pools[0].dtype
        self.struct = StepStruct(
            num_tokens,
            len(seq_lens),
            logit_rows.shape[0],
            len(groups),
            token_ids.data_ptr(),
            positions.data_ptr(),
            base + 8 * cumulated,
            base + 8 * lengths,
            logit_rows.data_ptr(),
            ctypes.addressof(structs),
            logits.data_ptr(),
        )

    def operands(self, dtype: torch.dtype) -> torch.dtype:
        """What queries, and keys and values before they are stored, are in the first group of a model of `dtype`."""
        return torch.float32 if self._first_pool == torch.float16 else dtype


class _Numbers:
    """Lists of integers that become one array: an array each would cost more than what is in it."""

    def __init__(self) -> None:
        self._values: list[int] = []

    def add(self, values: Sequence[int]) -> int:
        """Where they begin in the array."""
        first = len(self._values)
        self._values.extend(values)
        return first

    def array(self) -> NDArray[np.int64]:
        return np.array(self._values, dtype=np.int64)


def _places(numbers: _Numbers, group: GroupPlan, num_tokens: int, num_seqs: int) -> tuple[int, int, int]:
    """Where a group's slots, block tables and their begins lie."""
    assert len(group.block_tables) == num_seqs, (len(group.block_tables), num_seqs)
    assert len(group.slots) >= num_tokens, (len(group.slots), num_tokens)
    starts = list(itertools.accumulate(map(len, group.block_tables), initial=0))
    slots = numbers.add(group.slots)
    return slots, numbers.add(list(itertools.chain.from_iterable(group.block_tables))), numbers.add(starts)


def group_struct(model: NativeModel, pool: Tensor, addresses: Sequence[int]) -> GroupStruct:
    num_blocks, num_layers, two, kv_heads, block_size, head_dim = pool.shape
    assert (two, kv_heads, head_dim) == (2, model.shape.kv_heads, model.shape.head_dim), pool.shape
    assert pool.dtype in (model.dtype, *_KV_FORMATS), (pool.dtype, model.dtype)
    kv_format = _KV_FORMATS.get(pool.dtype, KV_ELEMENTS)
    scales = SCALE_BYTES if kv_format == KV_INT8 else 0  # of a vector, behind the block's tiles
    vectors = num_layers * 2 * kv_heads * block_size
    assert pool[0].is_contiguous()
    assert pool.stride(0) * pool.itemsize == vectors * (head_dim * pool.itemsize + scales), pool.stride()
    return GroupStruct(pool.data_ptr(), num_blocks, num_layers, block_size, *addresses, kv_format)


def _layer_struct(layer: NativeLayer) -> LayerStruct:
    linears = (layer.qkv.struct, layer.o.struct, layer.gate_up.struct, layer.down.struct)
    return LayerStruct(layer.attention_norm.data_ptr(), layer.mlp_norm.data_ptr(), *linears, layer.group, layer.index)


def _check_layers(layers: Sequence[NativeLayer], final_norm: Tensor, head: PackedLinear | None, shape: Shape) -> None:
    q, kv = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for layer in layers:
        sizes = [
            (part.struct.in_features, part.struct.out_features)
            for part in (layer.qkv, layer.o, layer.gate_up, layer.down)
        ]
        hidden, inner = shape.hidden, shape.intermediate
        assert sizes == [(hidden, q + 2 * kv), (q, hidden), (hidden, 2 * inner), (inner, hidden)], sizes
        for norm in (layer.attention_norm, layer.mlp_norm, final_norm):
            assert norm.shape == (hidden,), norm.shape
            assert norm.dtype == torch.float32
            assert norm.is_contiguous()
    if head is not None:
        assert (head.struct.in_features, head.struct.out_features) == (shape.hidden, shape.vocab)
