"""Storing new keys and values, and whole blocks of an 8B model: 32 layers, 8 KV heads of 128, 16 tokens, 2 MiB."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kernels.bench.row import Case
from kernels.store_kv.triton_blocks import digest_blocks, gather_blocks, scatter_blocks, zero_blocks
from kernels.store_kv.triton_kernel import store_kv

_CUDA = torch.device("cuda")
_SPAN = (32, 2, 8, 16, 128)
_NUM_BLOCKS, _NUM_SPANS = 4096, 512
_SPAN_BYTES = 32 * 2 * 8 * 16 * 128 * 2
Call = Callable[[], object]


def cases() -> Iterator[Case]:
    """All of them move bytes and compute next to nothing."""
    yield store(8192, torch.bfloat16)
    yield store(8192, torch.int8)
    yield blocks("gather blocks", 2, lambda pool, ids, spans: gather_blocks(pool, ids, spans))
    yield blocks("scatter blocks", 2, lambda pool, ids, spans: scatter_blocks(spans, ids, pool))
    yield blocks("zero blocks", 1, lambda pool, ids, spans: zero_blocks(pool, ids))
    yield blocks("digest blocks", 1, lambda pool, ids, spans: digest_blocks(pool, ids))


def store(num_tokens: int, dtype: torch.dtype) -> Case:
    """One layer's K and V of a chunk."""

    def make() -> tuple[Call, dict[str, Call]]:
        kv = torch.randn(num_tokens, 2, 8, 128, dtype=torch.bfloat16, device=_CUDA)
        pool = torch.zeros(num_tokens // 8, 2, 8, 16, 128, dtype=dtype, device=_CUDA)
        slots = torch.randperm(num_tokens * 2, device=_CUDA)[:num_tokens]
        scales = torch.zeros(pool.shape[:4], device=_CUDA) if dtype == torch.int8 else None
        return lambda: store_kv(kv, pool, slots, scales), {}

    moved = num_tokens * 2 * 8 * (128 * (2 + dtype.itemsize) + 4 * (dtype == torch.int8))
    return Case("store_kv", f"{num_tokens} tokens into {str(dtype)[6:]}", moved, 0, make)


def blocks(name: str, passes: int, call: Callable[[Tensor, Tensor, Tensor], object]) -> Case:
    """An operation over scattered blocks that touches their bytes `passes` times."""

    def make() -> tuple[Call, dict[str, Call]]:
        pool = torch.zeros(_NUM_BLOCKS, *_SPAN, dtype=torch.bfloat16, device=_CUDA).normal_()
        spans = torch.empty(_NUM_SPANS, *_SPAN, dtype=torch.bfloat16, device=_CUDA)
        ids = torch.randperm(_NUM_BLOCKS, device=_CUDA)[:_NUM_SPANS]
        return lambda: call(pool, ids, spans), {}

    return Case(name, f"{_NUM_SPANS} of {_SPAN_BYTES >> 20} MiB", passes * _NUM_SPANS * _SPAN_BYTES, 0, make)
