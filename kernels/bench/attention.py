"""Attention at the sizes of an 8B model: 32 query heads over 8 KV heads of 128."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.triton_attention import attend, plan_attention
from kernels.bench.row import Case

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
_CUDA = torch.device("cuda")
Call = Callable[[], object]


def cases() -> Iterator[Case]:
    """Decode and verification, bound by reading K and V; prefill, bound by products."""
    for batch, length in ((1, 131072), (32, 4096), (128, 1024), (256, 1024), (256, 300)):
        yield decode(batch, length, 1)
    yield decode(32, 4096, 1, block_size=64)
    yield decode(32, 4096, 4)
    for kv_dtype in (torch.int8, torch.float8_e4m3fn):
        yield decode(32, 4096, 1, kv_dtype=kv_dtype)
    for batch, length in ((1, 4096), (4, 2048), (1, 16384)):
        yield prefill(batch, length, length)
    yield prefill(1, 4096, 4096, block_size=64)
    yield prefill(1, 16384, 512)


def decode(batch: int, length: int, queries: int, kv_dtype: torch.dtype = torch.bfloat16, block_size: int = 16) -> Case:
    """`queries` rows of each of `batch` sequences of `length` tokens."""
    scale_bytes = 0 if kv_dtype == torch.bfloat16 else 4
    tokens = batch * length
    num_bytes = 2 * tokens * KV_HEADS * (HEAD_DIM * kv_dtype.itemsize + scale_bytes)
    flops = 4 * tokens * queries * HEADS * HEAD_DIM
    shape = f"B={batch} S={length} q={queries} {str(kv_dtype)[6:]} block {block_size}"

    def make() -> tuple[Call, dict[str, Call]]:
        ours = _ours(batch, length, queries, kv_dtype, block_size)
        q, k, v = _dense(batch, length, queries)
        mask = _causal(queries, length) if queries > 1 else None
        sdpa: Any = F.scaled_dot_product_attention
        # there is none over 8 bits: what the same step takes over K and V that are kept whole
        name = "sdpa" if kv_dtype == torch.bfloat16 else "sdpa bf16"
        return ours, {name: lambda: sdpa(q, k, v, attn_mask=mask, enable_gqa=True)}

    operation = "decode attention" if queries == 1 else "verify attention"
    return Case(operation, shape, num_bytes, flops, make, kv_dtype == torch.float8_e4m3fn)


def prefill(batch: int, length: int, chunk: int, block_size: int = 16) -> Case:
    """The last `chunk` rows of `batch` prompts of `length` tokens."""
    seen = batch * (chunk * (length - chunk) + chunk * (chunk + 1) / 2)
    shape = f"B={batch} S={length} q={chunk} block {block_size}"

    def make() -> tuple[Call, dict[str, Call]]:
        q, k, v = _dense(batch, length, chunk)
        sdpa: Any = F.scaled_dot_product_attention
        how = {"is_causal": True} if chunk == length else {"attn_mask": _causal(chunk, length)}
        peers: dict[str, Call] = {"sdpa": lambda: sdpa(q, k, v, enable_gqa=True, **how)}
        if batch == 1 and chunk == length == 4096:  # its compiler takes long
            peers["flex"] = _flex(q, k, v)
        return _ours(batch, length, chunk, torch.bfloat16, block_size), peers

    return Case("prefill attention", shape, 4 * batch * length * KV_HEADS * HEAD_DIM, 4 * seen * HEADS * HEAD_DIM, make)


def _ours(batch: int, length: int, queries: int, kv_dtype: torch.dtype, block_size: int) -> Call:
    per_sequence = -(-length // block_size)
    ids = torch.randperm(batch * per_sequence).view(batch, per_sequence).tolist()
    shape = (batch * per_sequence, 2, KV_HEADS, block_size, HEAD_DIM)
    scales = None
    if kv_dtype == torch.bfloat16:
        pool = torch.randn(shape, dtype=kv_dtype, device=_CUDA)
    else:
        pool = torch.randint(-100, 100, shape, dtype=torch.int8, device=_CUDA).view(kv_dtype)
        scales = torch.rand(shape[:4], device=_CUDA) / 100
    cu = [i * queries for i in range(batch + 1)]
    sizes = (block_size, HEADS, KV_HEADS, HEAD_DIM, _CUDA, 0, kv_dtype != torch.bfloat16)
    plan = plan_attention(cu, [length] * batch, ids, *sizes)
    q = torch.randn(batch * queries, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=_CUDA)
    return lambda: attend(q, pool, plan, HEAD_DIM**-0.5, kv_scales=scales)


def _dense(batch: int, length: int, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(batch, HEADS, queries, HEAD_DIM, dtype=torch.bfloat16, device=_CUDA)
    k, v = torch.randn(2, batch, KV_HEADS, length, HEAD_DIM, dtype=torch.bfloat16, device=_CUDA)
    return q, k, v


def _causal(queries: int, length: int) -> Tensor:
    """What the last rows of a sequence see."""
    return torch.ones(queries, length, dtype=torch.bool, device=_CUDA).tril(length - queries)


def _flex(q: Tensor, k: Tensor, v: Tensor) -> Call:
    def call() -> object:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if not made:
            mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, q.shape[2], k.shape[2], device="cuda")
            made.append((torch.compile(flex_attention), mask))
        compiled, mask = made[0]
        return compiled(q, k, v, block_mask=mask, enable_gqa=True)

    made: list[tuple[Any, Any]] = []
    return call
