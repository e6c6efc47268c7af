"""Paged attention on a GPU: checks, plans, launches. The kernels are in triton_kernel.py, their order in README.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.arguments import (
    FLOATS,
    KernelArgumentError,
    check_contiguous,
    check_device,
    check_dtype,
    check_range,
    check_rows,
    check_shape,
)
from kernels.attention import triton_kernel, triton_plan_kernel
from kernels.attention.reference import KEY_TILE, SPLIT
from kernels.attention.triton_plan import NARROW, Work, plan_work, tile_heads
from kernels.attention.triton_tuning import HEAD_DIMS, join_shape, padded, programs, shape, stages

QUANTIZED = (torch.int8, torch.float8_e4m3fn)
_LOG2_E = math.log2(math.e)
_PLAN_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Items:
    """One launch: `count` work items, which `grid` programs take in turn."""

    rows: int
    split: bool
    items: Tensor  # [capacity, 7] int32, see `attend_kernel`
    count: Tensor  # [1] int32
    grid: int


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """One step's attention over one layer group, in device memory. Every layer of the group uses it."""

    num_tokens: int  # rows past these are padding, whose result is zero
    block_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    quantized: bool
    window: int
    positions: Tensor  # [num_tokens] int32
    partials: Tensor  # [num_tokens] int32
    rows: Tensor  # int32
    tables: Tensor  # [num_seqs, any] int32
    joined: Tensor  # [any] int32
    launches: tuple[Items, ...]
    num_partials: int
    most_splits: int  # of a row whose splits are joined
    blocks: tuple[int, int] | None  # lowest and highest that are read; None: known on the device only


def plan_attention(
    cu_seqlens_q: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device,
    window: int = 0,
    quantized: bool = False,
) -> TritonPlan:
    """Lower a step's ragged batch on the host, with one copy to the device. Arguments: see `plan_work`.

    Args:
        quantized: the pool is int8 or e4m3.

    Raises:
        KernelArgumentError: an argument is inconsistent or of a size the kernels do not have.
    """
    check_range("head_dim", head_dim, HEAD_DIMS)
    tuned = shape(head_dim, quantized, device)
    try:
        work = plan_work(
            cu_seqlens_q,
            seq_lens,
            block_tables,
            block_size,
            num_q_heads,
            num_kv_heads,
            window=window,
            programs=programs(device),
            wide=tuned.wide_rows,
        )
    except ValueError as exc:
        raise KernelArgumentError(str(exc)) from exc
    slots = num_kv_heads * tile_heads(num_q_heads // num_kv_heads)[1]
    counts = np.array([len(launch.items) for launch in work.launches], np.int32)
    host = [work.positions, work.partials, work.rows, work.tables, work.joined, counts]
    parts = _copied([*host, *(launch.items for launch in work.launches)], device)
    positions, partials, rows, tables, joined, count = parts[:6]
    launches = tuple(
        Items(launch.rows, launch.split, items, count[i : i + 1], len(launch.items) * slots)
        for i, (launch, items) in enumerate(zip(work.launches, parts[6:], strict=True))
    )
    return TritonPlan(
        work.num_tokens, block_size, num_q_heads, num_kv_heads, head_dim, quantized, window,
        positions, partials, rows, tables, joined, launches, work.num_partials, work.most_splits, _blocks(work),
    )  # fmt: skip


def plan_on_device(
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    num_rows: int,
    max_queries: int,
    max_len: int,
    block_size: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int = 0,
    quantized: bool = False,
) -> TritonPlan:
    """Lower a step whose lengths only the device knows: no value is looked at on the host, so a graph may hold it.

    Args:
        cu_seqlens_q: [num_seqs + 1] int32 running sum of query lengths; a sequence may have none.
        seq_lens: [num_seqs] int32.
        block_tables: [num_seqs, any] int32.
        num_rows: rows of `q`; those past the last sequence's are padding.
        max_queries: no sequence has more query rows.
        quantized: the pool is int8 or e4m3.
        max_len: no sequence is longer; partial results take (rows * max_len / 512) * num_q_heads * head_dim floats.

    Raises:
        KernelArgumentError: an argument is of the wrong type or shape, or of a size the kernels do not have.
    """
    num_seqs = seq_lens.shape[0]
    check_range("head_dim", head_dim, HEAD_DIMS)
    check_shape("cu_seqlens_q", cu_seqlens_q, num_seqs + 1)
    check_shape("block_tables", block_tables, num_seqs, None)
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("seq_lens", seq_lens), ("block_tables", block_tables)):
        check_dtype(name, tensor, torch.int32)
        check_rows(name, tensor)
        check_device(name, tensor, seq_lens)
    _check_sizes(block_size, num_q_heads, num_kv_heads)
    if block_tables.shape[1] * block_size < max_len:
        raise KernelArgumentError(
            f"block_tables has shape {list(block_tables.shape)}, too few blocks of {block_size} for max_len {max_len}"
        )
    heads, head_tiles = tile_heads(num_q_heads // num_kv_heads)
    slots, device = num_kv_heads * head_tiles, seq_lens.device
    tuned = shape(head_dim, quantized, device)
    narrow_tokens, wide_tokens = NARROW // heads, (tuned.wide_rows or NARROW) // heads
    narrow_most = min(max_queries, narrow_tokens) if tuned.wide_rows else max_queries
    max_splits = -(-max_len // SPLIT)
    num_narrow = (min(num_rows, num_seqs * narrow_most) // narrow_tokens + num_seqs) * max_splits
    num_wide = num_rows // wide_tokens + num_seqs if max_queries > narrow_most else 0
    num_partials = min(num_rows, num_seqs * narrow_most) * max_splits
    positions, partials, rows = torch.empty(3, num_rows, dtype=torch.int32, device=device)
    narrow_items = torch.empty(max(num_narrow, 1), 7, dtype=torch.int32, device=device)
    wide_items = torch.empty(max(num_wide, 1), 7, dtype=torch.int32, device=device)
    counts = torch.empty(2, dtype=torch.int32, device=device)
    triton_plan_kernel.plan_kernel[(num_seqs,)](
        cu_seqlens_q, seq_lens, positions, partials, rows, narrow_items, wide_items, counts,
        num_seqs, num_rows, narrow_most, narrow_tokens, wide_tokens, heads.bit_length() - 1, window,
        WINDOWED=window > 0, BLOCK=_PLAN_BLOCK, num_warps=4,
    )  # fmt: skip
    most = programs(device)
    launches = [Items(NARROW, True, narrow_items, counts[:1], min(most, num_narrow * slots))]
    if num_wide:
        launches.append(Items(tuned.wide_rows, False, wide_items, counts[1:], min(most, num_wide * slots)))
    return TritonPlan(
        num_rows, block_size, num_q_heads, num_kv_heads, head_dim, quantized, window,
        positions, partials, rows, block_tables, rows, tuple(launches), num_partials, max_splits, None,
    )  # fmt: skip


def attend(
    q: Tensor,
    pool: Tensor,
    plan: TritonPlan,
    scale: float,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """softmax(scale * q K^T, causal) V, with K and V read from the pool only: store first, then attend.

    Args:
        q: [num_rows, num_q_heads, head_dim]; may be a strided view. Rows past the plan's are padding.
        pool: [num_blocks, 2, num_kv_heads, block_size, head_dim], one layer's view; of q's dtype, int8 or e4m3.
        plan: of this step.
        scale: usually head_dim ** -0.5.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); 0 = none.
        sinks: [num_q_heads] float32, a logit per head that takes part in the softmax with no value.
        kv_scales: [num_blocks, 2, num_kv_heads, block_size] float32, what a row of a quantized pool is multiplied by.

    Returns:
        [num_rows, num_q_heads, head_dim], contiguous, q's dtype; padding rows are zero. A (row, head) result is the
        same bit for bit however the sequence is cut into steps and whatever else is in the batch.

    Raises:
        KernelArgumentError: an argument does not fit the plan or the others.
    """
    _check(q, pool, plan, scale, soft_cap, sinks, kv_scales)
    _, num_q_heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    out[plan.num_tokens :].zero_()
    group, cap_scale, score_scale = num_q_heads // plan.num_kv_heads, 0.0, scale * _LOG2_E
    if soft_cap > 0:
        cap_scale, score_scale = 2 * score_scale / soft_cap, soft_cap * _LOG2_E
    _, head_tiles = tile_heads(group)
    part_o = part_ml = out
    if plan.num_partials:
        part_o = torch.empty(plan.num_partials, num_q_heads, head_dim, dtype=torch.float32, device=q.device)
        part_ml = torch.empty(2, plan.num_partials, num_q_heads, dtype=torch.float32, device=q.device)
    scales = kv_scales if kv_scales is not None else part_ml
    some_sinks = sinks if sinks is not None else part_ml
    scale_strides = kv_scales.stride() if kv_scales is not None else (0, 0, 0, 1)
    tuned = shape(head_dim, plan.quantized, q.device)
    for launch in plan.launches:
        triton_kernel.attend_kernel[(launch.grid,)](
            q, pool, scales, out, part_o, part_ml, some_sinks,
            plan.positions, plan.partials, plan.rows, launch.items, launch.count, plan.tables,
            q.stride(0), q.stride(1), pool.stride(0), pool.stride(1), pool.stride(2), *scale_strides[:3],
            plan.tables.stride(0), plan.num_partials,
            group, head_tiles, plan.num_kv_heads, plan.block_size.bit_length() - 1, plan.window,
            score_scale, cap_scale,
            HEAD_DIM=head_dim, HEAD_PADDED=padded(head_dim), ROWS=launch.rows, SPLIT=launch.split,
            QUANTIZED=kv_scales is not None, WINDOWED=plan.window > 0, CAPPED=soft_cap > 0, SINKS=sinks is not None,
            SMALL_BLOCKS=plan.block_size < KEY_TILE,
            num_warps=tuned.split_warps if launch.split else tuned.wide_warps,
            num_stages=stages(
                head_dim, launch.rows, q.element_size(), pool.element_size(), q.device,
                tuned.split_stages if launch.split else tuned.wide_stages,
            ),
        )  # fmt: skip
    if plan.num_partials:
        heads, ahead, join_warps = join_shape(num_q_heads, plan.most_splits, q.device)
        triton_kernel.join_kernel[(plan.joined.shape[0], -(-num_q_heads // heads))](
            out, part_o, part_ml, some_sinks, plan.positions, plan.partials, plan.joined,
            plan.num_partials, num_q_heads, plan.window, score_scale,
            HEAD_DIM=head_dim, HEAD_PADDED=padded(head_dim), WINDOWED=plan.window > 0, SINKS=sinks is not None,
            HEADS=heads, AHEAD=ahead, num_warps=join_warps,
        )  # fmt: skip
    return out


def _copied(arrays: Sequence[np.ndarray[tuple[int, ...], np.dtype[np.int32]]], device: torch.device) -> list[Tensor]:
    """The arrays on the device, by one copy; each begins at a multiple of 64 bytes."""
    sizes = [-(-array.size // 16) * 16 for array in arrays]
    flat = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    host, start = flat.numpy(), 0
    for array, size in zip(arrays, sizes, strict=True):
        host[start : start + array.size] = array.reshape(-1)
        start += size
    there = flat.to(device, non_blocking=True)
    ends = np.cumsum(sizes).tolist()
    return [
        there[end - size : end - size + array.size].view(array.shape)
        for array, size, end in zip(arrays, sizes, ends, strict=True)
    ]


def _blocks(work: Work) -> tuple[int, int]:
    return work.lowest_block, work.highest_block


def _check_sizes(block_size: int, num_q_heads: int, num_kv_heads: int) -> None:
    if block_size < 1 or block_size & (block_size - 1):
        raise KernelArgumentError(f"block_size is {block_size}, expected a power of two")
    if num_kv_heads < 1 or num_q_heads % num_kv_heads:
        raise KernelArgumentError(f"num_q_heads is {num_q_heads}, expected a multiple of num_kv_heads {num_kv_heads}")


def _check(
    q: Tensor,
    pool: Tensor,
    plan: TritonPlan,
    scale: float,
    soft_cap: float,
    sinks: Tensor | None,
    kv_scales: Tensor | None,
) -> None:
    check_dtype("q", q, *FLOATS)
    check_shape("q", q, None, plan.num_q_heads, plan.head_dim)
    check_rows("q", q)
    if q.shape[0] < plan.num_tokens:
        raise KernelArgumentError(f"q has shape {list(q.shape)}, fewer rows than the plan's {plan.num_tokens}")
    check_shape("pool", pool, None, 2, plan.num_kv_heads, plan.block_size, plan.head_dim)
    check_dtype("pool", pool, q.dtype, *QUANTIZED)
    check_device("pool", pool, q)
    check_device("the plan", plan.positions, q)
    if pool.stride()[3:] != (plan.head_dim, 1):
        raise KernelArgumentError(
            f"pool of shape {list(pool.shape)} has strides {list(pool.stride())}, expected rows of "
            f"[block_size, head_dim] one after the other"
        )
    if plan.blocks is not None and not 0 <= plan.blocks[0] <= plan.blocks[1] + 1 <= pool.shape[0]:
        low, high = plan.blocks
        raise KernelArgumentError(f"block_tables name blocks {low} to {high}, outside pool of shape {list(pool.shape)}")
    if plan.quantized != (pool.dtype in QUANTIZED):
        raise KernelArgumentError(f"pool is {pool.dtype}, the plan is of a quantized pool: {plan.quantized}")
    if (kv_scales is not None) != (pool.dtype in QUANTIZED):
        raise KernelArgumentError(f"kv_scales go with a pool of int8 or e4m3 and no other; pool is {pool.dtype}")
    if kv_scales is not None:
        check_shape("kv_scales", kv_scales, *pool.shape[:4])
        check_dtype("kv_scales", kv_scales, torch.float32)
        check_rows("kv_scales", kv_scales)
        check_device("kv_scales", kv_scales, q)
    if sinks is not None:
        check_shape("sinks", sinks, plan.num_q_heads)
        check_dtype("sinks", sinks, torch.float32)
        check_contiguous("sinks", sinks)
        check_device("sinks", sinks, q)
    if not scale > 0 or soft_cap < 0:
        raise KernelArgumentError(f"scale is {scale} and soft_cap {soft_cap}, expected above 0 and not below")
    if pool.dtype == torch.float8_e4m3fn and q.is_cuda and torch.cuda.get_device_capability(q.device) < (8, 9):
        raise KernelArgumentError("pool is e4m3, which this GPU cannot convert; int8 works on it")


__all__ = ["SPLIT", "TritonPlan", "attend", "plan_attention", "plan_on_device"]
