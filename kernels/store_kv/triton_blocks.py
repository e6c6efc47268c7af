"""Whole blocks of a pool as opaque spans of bytes: copied out, copied in, zeroed, digested. For hand-off and offload.

Knows spans and block ids; knows nothing about what the bytes mean.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import KernelArgumentError, check_contiguous, check_device, check_dtype, check_shape
from kernels.store_kv.digest import FIRST, SECOND, SEEDS

_CHUNK = 4096
"""Words of a program, 16 KiB."""
_MOST_CHUNKS = 65535


@triton.jit
def copy_spans_kernel(
    source_ptr,  # [any, words] int32
    target_ptr,  # [any, words] int32
    ids_ptr,  # [num_spans] int64: the block each span is copied from, or with SCATTER to
    words,
    SCATTER: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Copy a chunk of a span. Grid: (num_spans, words / CHUNK rounded up)."""
    i = tl.program_id(0).to(tl.int64)
    block = tl.load(ids_ptr + i)
    o_w = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    m_w = o_w < words
    # int64: block * words passes 2**31 on a large pool
    if SCATTER:
        b_w = tl.load(source_ptr + i * words + o_w, mask=m_w)  # [CHUNK]
        tl.store(target_ptr + block * words + o_w, b_w, mask=m_w)
    else:
        b_w = tl.load(source_ptr + block * words + o_w, mask=m_w)  # [CHUNK]
        tl.store(target_ptr + i * words + o_w, b_w, mask=m_w)


@triton.jit
def zero_spans_kernel(pool_ptr, ids_ptr, words, CHUNK: tl.constexpr):
    """Zero a chunk of a block. Grid: (num_blocks, words / CHUNK rounded up)."""
    block = tl.load(ids_ptr + tl.program_id(0))
    o_w = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    tl.store(pool_ptr + block * words + o_w, tl.zeros([CHUNK], tl.int32), mask=o_w < words)


@triton.jit
def digest_spans_kernel(
    pool_ptr,  # [any, words] int32
    ids_ptr,  # [num_spans] int64
    sums_ptr,  # [num_spans, 2, chunks] int64, written
    words,
    SEED_0: tl.constexpr,
    SEED_1: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Add up a chunk of a span under both seeds. Grid: (num_spans, words / CHUNK rounded up)."""
    i = tl.program_id(0).to(tl.int64)
    block = tl.load(ids_ptr + i)
    o_w = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    m_w = o_w < words
    b_w = tl.load(pool_ptr + block * words + o_w, mask=m_w, other=0)  # [CHUNK]
    z = (o_w.to(tl.uint64) << 32) | b_w.to(tl.uint32, bitcast=True).to(tl.uint64)
    first = tl.full([CHUNK], FIRST, tl.uint64)
    second = tl.full([CHUNK], SECOND, tl.uint64)
    for seed in tl.static_range(2):
        y = z ^ tl.full([CHUNK], SEED_0 if seed == 0 else SEED_1, tl.uint64)
        y = (y ^ (y >> 30)) * first
        y = (y ^ (y >> 27)) * second
        y = (y ^ (y >> 31)).to(tl.int64, bitcast=True)
        total = tl.sum(tl.where(m_w, y, 0), 0)
        tl.store(sums_ptr + (i * 2 + seed) * tl.num_programs(1) + tl.program_id(1), total)


def gather_blocks(pool: Tensor, ids: Tensor, spans: Tensor) -> None:
    """Copy blocks out: `spans[i] = pool[ids[i]]`.

    Args:
        pool: [num_blocks, ...], contiguous; a block's bytes are a multiple of 4.
        ids: [num_spans] int64 on the device, each inside the pool.
        spans: [num_spans, ...], as `pool` otherwise.

    Raises:
        KernelArgumentError: an argument does not fit the others.
    """
    _copy(pool, ids, spans, "spans", scatter=False)


def scatter_blocks(spans: Tensor, ids: Tensor, pool: Tensor) -> None:
    """Copy blocks in: `pool[ids[i]] = spans[i]`. No id occurs twice. Arguments: see `gather_blocks`."""
    _copy(pool, ids, spans, "spans", scatter=True)


def zero_blocks(pool: Tensor, ids: Tensor) -> None:
    """Overwrite blocks with zeros: what a purge does. Arguments: see `gather_blocks`."""
    words = _words("pool", pool)
    _check_ids(ids, pool)
    if ids.shape[0] and words.shape[1]:
        zero_spans_kernel[(ids.shape[0], _chunks(words))](words, ids, words.shape[1], CHUNK=_CHUNK, num_warps=4)


def digest_blocks(pool: Tensor, ids: Tensor) -> Tensor:
    """Two 64-bit sums of each block's bytes, as `kernels.store_kv.digest.span_sums` defines them.

    Arguments: see `gather_blocks`.

    Returns:
        [num_spans, 2] int64, the sums' bits.
    """
    words = _words("pool", pool)
    _check_ids(ids, pool)
    sums = torch.zeros(ids.shape[0], 2, _chunks(words), dtype=torch.int64, device=pool.device)
    if sums.numel():
        digest_spans_kernel[(ids.shape[0], sums.shape[2])](
            words, ids, sums, words.shape[1],
            SEED_0=SEEDS[0], SEED_1=SEEDS[1], FIRST=FIRST, SECOND=SECOND, CHUNK=_CHUNK, num_warps=4,
        )  # fmt: skip
    return sums.sum(2)


def _copy(pool: Tensor, ids: Tensor, spans: Tensor, name: str, scatter: bool) -> None:
    words, others = _words("pool", pool), _words(name, spans)
    _check_ids(ids, pool)
    check_shape(name, spans, ids.shape[0], *pool.shape[1:])
    check_dtype(name, spans, pool.dtype)
    check_device(name, spans, pool)
    if not others.numel():
        return
    source, target = (others, words) if scatter else (words, others)
    copy_spans_kernel[(ids.shape[0], _chunks(words))](
        source, target, ids, words.shape[1], SCATTER=scatter, CHUNK=_CHUNK, num_warps=4
    )


def _words(name: str, tensor: Tensor) -> Tensor:
    """[blocks, words] int32 over the same memory."""
    check_contiguous(name, tensor)
    if tensor.ndim < 2 or tensor.shape[0] == 0:
        return tensor.new_empty((0, 0), dtype=torch.int32)
    size = tensor[0].numel() * tensor.itemsize
    most = 4 * _CHUNK * _MOST_CHUNKS
    if size % 4 or size > most:
        raise KernelArgumentError(
            f"{name} of shape {list(tensor.shape)} has blocks of {size} bytes, expected a multiple of 4 up to {most}"
        )
    return tensor.view(tensor.shape[0], -1).view(torch.uint8).view(torch.int32)


def _check_ids(ids: Tensor, pool: Tensor) -> None:
    check_shape("ids", ids, None)
    check_dtype("ids", ids, torch.int64)
    check_contiguous("ids", ids)
    check_device("ids", ids, pool)


def _chunks(words: Tensor) -> int:
    return -(-words.shape[1] // _CHUNK)
