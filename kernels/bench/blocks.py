"""Storing new keys and values, and whole blocks of an 8B model: 32 layers, 8 KV heads of 128, 16 tokens, 2 MiB."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kernels.bench import peers
from kernels.bench.row import Case
from kernels.store_kv.triton_blocks import digest_blocks, gather_blocks, move_blocks, scatter_blocks, zero_blocks
from kernels.store_kv.triton_kernel import store_kv

_CUDA = torch.device("cuda")
_SPAN = (32, 2, 8, 16, 128)
_NUM_BLOCKS, _NUM_SPANS = 4096, 512
_SPAN_BYTES = 32 * 2 * 8 * 16 * 128 * 2
Call = Callable[[], object]
OfBlocks = Callable[[Tensor, Tensor, Tensor], object]
"""Of pool, ids and spans."""


def cases() -> Iterator[Case]:
    """All of them move bytes and compute next to nothing."""
    yield store(8192, torch.bfloat16)
    yield store(8192, torch.int8)
    yield store(8192, torch.float8_e4m3fn)
    yield blocks(
        "gather blocks", 2, gather_blocks, lambda pool, ids, spans: torch.index_select(pool, 0, ids, out=spans)
    )
    yield blocks(
        "scatter blocks",
        2,
        lambda pool, ids, spans: scatter_blocks(spans, ids, pool),
        lambda pool, ids, spans: pool.index_copy_(0, ids, spans),
    )
    yield blocks(
        "move blocks",
        2,
        lambda pool, ids, spans: move_blocks(pool, ids, spans, torch.arange(len(ids), device=ids.device)),
        lambda pool, ids, spans: spans.copy_(pool[ids]),
    )
    yield blocks(
        "zero blocks",
        1,
        lambda pool, ids, spans: zero_blocks(pool, ids),
        lambda pool, ids, spans: pool.index_fill_(0, ids, 0),
    )
    yield blocks(
        "digest blocks",
        1,
        lambda pool, ids, spans: digest_blocks(pool, ids),
        lambda pool, ids, spans: pool.view(torch.int32)[ids].flatten(1).sum(1),
    )


def store(num_tokens: int, dtype: torch.dtype) -> Case:
    """One layer's K and V of a chunk."""

    def make() -> tuple[Call, dict[str, Call]]:
        kv = torch.randn(num_tokens, 2, 8, 128, dtype=torch.bfloat16, device=_CUDA)
        pool = torch.zeros(num_tokens // 8, 2, 8, 16, 128, dtype=dtype, device=_CUDA)
        slots = torch.randperm(num_tokens * 2, device=_CUDA)[:num_tokens]
        scales = torch.zeros(pool.shape[:4], device=_CUDA) if dtype.itemsize == 1 else None

        def by_torch() -> None:
            if scales is None:
                peers.store(kv, pool, slots)
            else:
                peers.store_quantized(kv, pool, scales, slots)

        return lambda: store_kv(kv, pool, slots, scales), {"torch": by_torch}

    moved = num_tokens * 2 * 8 * (128 * (2 + dtype.itemsize) + 4 * (dtype.itemsize == 1))
    return Case("store_kv", f"{num_tokens} tokens into {str(dtype)[6:]}", moved, 0, make, dtype == torch.float8_e4m3fn)


def blocks(name: str, passes: int, call: OfBlocks, by_torch: OfBlocks) -> Case:
    """An operation over scattered blocks that touches their bytes `passes` times."""

    def make() -> tuple[Call, dict[str, Call]]:
        pool = torch.zeros(_NUM_BLOCKS, *_SPAN, dtype=torch.bfloat16, device=_CUDA).normal_()
        spans = torch.empty(_NUM_SPANS, *_SPAN, dtype=torch.bfloat16, device=_CUDA)
        ids = torch.randperm(_NUM_BLOCKS, device=_CUDA)[:_NUM_SPANS]
        return lambda: call(pool, ids, spans), {"torch": lambda: by_torch(pool, ids, spans)}

    return Case(name, f"{_NUM_SPANS} of {_SPAN_BYTES >> 20} MiB", passes * _NUM_SPANS * _SPAN_BYTES, 0, make)
