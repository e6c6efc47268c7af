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
    from_ptr,  # [num_spans] int64: the block each span is copied from, with CHOOSE_FROM; the spans in order otherwise
    to_ptr,  # [num_spans] int64: and to, with CHOOSE_TO
    words,
    CHOOSE_FROM: tl.constexpr,
    CHOOSE_TO: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Copy a chunk of a span. Grid: (num_spans, words / CHUNK rounded up)."""
    i = tl.program_id(0).to(tl.int64)
    # int64: a block's place passes 2**31 words on a large pool
    i_from, i_to = i, i
    if CHOOSE_FROM:
        i_from = tl.load(from_ptr + i)
    if CHOOSE_TO:
        i_to = tl.load(to_ptr + i)
    o_w = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    m_w = o_w < words
    b_w = tl.load(source_ptr + i_from * words + o_w, mask=m_w)  # [CHUNK]
    tl.store(target_ptr + i_to * words + o_w, b_w, mask=m_w)


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
    _check_spans(spans, ids, pool)
    _copy(_words("pool", pool), ids, _words("spans", spans), None)


def scatter_blocks(spans: Tensor, ids: Tensor, pool: Tensor) -> None:
    """Copy blocks in: `pool[ids[i]] = spans[i]`. No id occurs twice. Arguments: see `gather_blocks`."""
    _check_spans(spans, ids, pool)
    _copy(_words("spans", spans), None, _words("pool", pool), ids)


def move_blocks(source: Tensor, source_ids: Tensor, target: Tensor, target_ids: Tensor) -> None:
    """Copy blocks of one pool into another: `target[target_ids[i]] = source[source_ids[i]]`. No target occurs twice.

    Args:
        source, target: [num_blocks, ...], contiguous, alike but for the number of blocks; none is read and written.
        source_ids, target_ids: [num_spans] int64 on the device, each inside its pool.

    Raises:
        KernelArgumentError: an argument does not fit the others.
    """
    check_shape("target", target, None, *source.shape[1:])
    check_dtype("target", target, source.dtype)
    check_device("target", target, source)
    _check_ids("source_ids", source_ids, source)
    _check_ids("target_ids", target_ids, target)
    check_shape("target_ids", target_ids, *source_ids.shape)
    _copy(_words("source", source), source_ids, _words("target", target), target_ids)


def zero_blocks(pool: Tensor, ids: Tensor) -> None:
    """Overwrite blocks with zeros: what a purge does. Arguments: see `gather_blocks`."""
    words = _words("pool", pool)
    _check_ids("ids", ids, pool)
    if ids.shape[0] and words.shape[1]:
        zero_spans_kernel[(ids.shape[0], _chunks(words))](words, ids, words.shape[1], CHUNK=_CHUNK, num_warps=4)


def digest_blocks(pool: Tensor, ids: Tensor) -> Tensor:
    """Two 64-bit sums of each block's bytes, as `kernels.store_kv.digest.span_sums` defines them.

    Arguments: see `gather_blocks`.

    Returns:
        [num_spans, 2] int64, the sums' bits.
    """
    words = _words("pool", pool)
    _check_ids("ids", ids, pool)
    sums = torch.zeros(ids.shape[0], 2, _chunks(words), dtype=torch.int64, device=pool.device)
    if sums.numel():
        digest_spans_kernel[(ids.shape[0], sums.shape[2])](
            words, ids, sums, words.shape[1],
            SEED_0=SEEDS[0], SEED_1=SEEDS[1], FIRST=FIRST, SECOND=SECOND, CHUNK=_CHUNK, num_warps=4,
        )  # fmt: skip
    return sums.sum(2)


def _copy(source: Tensor, source_ids: Tensor | None, target: Tensor, target_ids: Tensor | None) -> None:
    """Both [blocks, words] int32; without ids a side's blocks are taken in order."""
    ids = target_ids if source_ids is None else source_ids
    assert ids is not None
    if not ids.shape[0] or not source.numel():
        return
    copy_spans_kernel[(ids.shape[0], _chunks(source))](
        source, target, ids if source_ids is None else source_ids, ids if target_ids is None else target_ids,
        source.shape[1], CHOOSE_FROM=source_ids is not None, CHOOSE_TO=target_ids is not None, CHUNK=_CHUNK,
        num_warps=4,
    )  # fmt: skip


def _check_spans(spans: Tensor, ids: Tensor, pool: Tensor) -> None:
    _check_ids("ids", ids, pool)
    check_shape("spans", spans, ids.shape[0], *pool.shape[1:])
    check_dtype("spans", spans, pool.dtype)
    check_device("spans", spans, pool)


def _words(name: str, tensor: Tensor) -> Tensor:
    """[blocks, words] int32 over the same memory."""
    check_contiguous(name, tensor)
    if tensor.ndim < 2:
        raise KernelArgumentError(f"{name} has shape {list(tensor.shape)}, expected blocks of at least one dimension")
    if tensor.shape[0] == 0:
        return tensor.new_empty((0, 0), dtype=torch.int32)
    size = tensor[0].numel() * tensor.itemsize
    most = 4 * _CHUNK * _MOST_CHUNKS
    if size % 4 or size > most:
        raise KernelArgumentError(
            f"{name} of shape {list(tensor.shape)} has blocks of {size} bytes, expected a multiple of 4 up to {most}"
        )
    return tensor.view(tensor.shape[0], -1).view(torch.uint8).view(torch.int32)


def _check_ids(name: str, ids: Tensor, pool: Tensor) -> None:
    check_shape(name, ids, None)
    check_dtype(name, ids, torch.int64)
    check_contiguous(name, ids)
    check_device(name, ids, pool)


def _chunks(words: Tensor) -> int:
    return -(-words.shape[1] // _CHUNK)
