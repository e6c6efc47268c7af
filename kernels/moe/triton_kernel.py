"""Mixture of experts on the device: route, sort tokens by expert, a grouped product, activation, another, combine.

An expert's product is summed in the order of `kernels.linear`, so a token's result depends neither on the other tokens
nor on how many share its expert. No step waits for the host: grids cover the worst case, and what is empty ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activation.triton_kernel import Gate, gate_mul
from kernels.arguments import (
    FLOATS,
    KernelArgumentError,
    check_contiguous,
    check_device,
    check_dtype,
    check_rows,
    check_shape,
)
from kernels.linear.triton_kernel import MAX_FEATURES, check_float8, is_roomy, quantize_rows, whole_zeros
from kernels.linear.triton_parts import finished, split_features, split_sum
from kernels.linear.triton_weights import DeviceWeight

MAX_EXPERTS = 1024
_SORT_BLOCK = 1024
_COMBINE_BLOCK = 1024


@triton.jit
def route_kernel(
    logits_ptr,  # [num_tokens, num_experts]
    id_ptr,  # [num_tokens, TOP_K] int32, written
    share_ptr,  # [num_tokens, TOP_K] float32, written
    num_experts,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= num_experts
):
    """Grid: (num_tokens,)."""
    i_t = tl.program_id(0).to(tl.int64)
    o_e = tl.arange(0, BLOCK)
    m_e = o_e < num_experts
    b_x = tl.load(logits_ptr + i_t * num_experts + o_e, mask=m_e, other=float("-inf")).to(tl.float32)
    b_share = tl.exp(b_x - tl.max(b_x, axis=0))
    b_share = b_share / tl.sum(b_share, axis=0)
    left = m_e
    total = 0.0
    for i in tl.static_range(TOP_K):
        best = tl.max(tl.where(left, b_share, -1.0), axis=0)
        # a row that is not a number still names experts that exist
        expert = tl.min(tl.where(left & ((b_share == best) | (b_share != b_share)), o_e, BLOCK - 1), axis=0)
        expert = tl.minimum(expert, num_experts - 1)
        share = tl.sum(tl.where(o_e == expert, b_share, 0.0), axis=0)
        tl.store(id_ptr + i_t * TOP_K + i, expert)
        tl.store(share_ptr + i_t * TOP_K + i, share)
        total += share
        left = left & (o_e != expert)
    if RENORMALIZE:
        # what this program stored, it may read in another thread
        tl.debug_barrier()
        for i in tl.static_range(TOP_K):
            p_share = share_ptr + i_t * TOP_K + i
            tl.store(p_share, tl.load(p_share) / total)


@triton.jit
def sort_kernel(
    id_ptr,  # [num_pairs] int32, the expert of each (token, choice)
    order_ptr,  # [max_blocks * BLOCK_M] int32, written: pairs by expert, num_pairs for padding
    expert_ptr,  # [max_blocks] int32, written: each block's expert, num_experts for an empty block
    num_pairs,
    num_experts,
    max_blocks,
    BINS: tl.constexpr,  # power of two > num_experts
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """An expert's pairs in ascending order, padded to whole blocks. Grid: (num_experts + 1,); the last marks what is
    empty."""
    i_e = tl.program_id(0)
    o_e = tl.arange(0, BINS)
    counts = tl.zeros([BINS], dtype=tl.int32)
    for start in range(0, num_pairs, BLOCK):
        o_p = start + tl.arange(0, BLOCK)
        counts += tl.histogram(tl.load(id_ptr + o_p, mask=o_p < num_pairs, other=BINS - 1), BINS)
    blocks = tl.where(o_e < num_experts, (counts + BLOCK_M - 1) // BLOCK_M, 0)
    first = tl.sum(tl.where(o_e < i_e, blocks, 0), axis=0)
    mine = tl.sum(tl.where(o_e == i_e, blocks, 0), axis=0)
    end = tl.where(i_e == num_experts, max_blocks, first + mine)
    for start in range(first, end, BLOCK):
        o_b = start + tl.arange(0, BLOCK)
        tl.store(expert_ptr + o_b, i_e, mask=o_b < end)
    if i_e < num_experts:
        found = first * BLOCK_M
        for start in range(0, num_pairs, BLOCK):
            o_p = start + tl.arange(0, BLOCK)
            is_mine = (tl.load(id_ptr + o_p, mask=o_p < num_pairs, other=BINS - 1) == i_e).to(tl.int32)
            o_out = found + tl.cumsum(is_mine, axis=0) - 1
            tl.store(order_ptr + o_out, o_p, mask=is_mine > 0)
            found += tl.sum(is_mine, axis=0)
        o_pad = found + tl.arange(0, BLOCK_M)
        tl.store(order_ptr + o_pad, num_pairs, mask=o_pad < end * BLOCK_M)


@triton.jit
def grouped_linear_kernel(
    x_ptr,  # [rows, in_features], rows contiguous; pair i reads row i / TOP_K
    w_ptr, scale_ptr, zero_ptr,  # as split_sum, an expert after another
    row_scale_ptr,  # [rows] float32, of rows of x, with HAS_ROW_SCALE
    order_ptr,  # [max_blocks * BLOCK_M] int32
    expert_ptr,  # [max_blocks] int32
    y_ptr,  # [num_pairs, out_features], written
    num_pairs,
    num_experts,
    in_features,
    out_features,
    split,
    x_row: tl.int64,
    w_expert: tl.int64,
    scale_expert: tl.int64,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    WHOLE_ZERO: tl.constexpr,
    ACC: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    HAS_COLUMN_SCALE: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One tile of one expert's product. Grid: (out tiles, max_blocks)."""
    i_b = tl.program_id(1)
    expert = tl.load(expert_ptr + i_b).to(tl.int64)
    if expert >= num_experts:
        return
    o_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < out_features
    o_pair = tl.load(order_ptr + i_b * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)  # [BLOCK_M]
    m_m = o_pair < num_pairs
    scale_ptr += expert * scale_expert
    o_row = o_pair // TOP_K
    b_sum = tl.zeros([BLOCK_N, BLOCK_M], dtype=ACC)
    for first in range(0, in_features, split):
        b_sum += split_sum(
            x_ptr, w_ptr + expert * w_expert, scale_ptr, zero_ptr + expert * scale_expert, o_row * x_row,
            m_m, o_n, m_n, first, tl.minimum(first + split, in_features), in_features, out_features, GROUP, HAS_ZERO,
            WHOLE_ZERO, ACC, EVEN_K, BLOCK_K, BLOCK_N, BLOCK_M,
        )  # fmt: skip
    b_y = finished(
        tl.trans(b_sum), row_scale_ptr, scale_ptr, scale_ptr, o_row, m_m, o_n, m_n, HAS_ROW_SCALE, HAS_COLUMN_SCALE,
        False,
    )  # fmt: skip
    p_y = y_ptr + o_pair[:, None] * out_features + o_n[None, :]
    tl.store(p_y, b_y.to(y_ptr.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@triton.jit
def combine_kernel(
    x_ptr,  # [num_tokens, TOP_K, width], contiguous
    share_ptr,  # [num_tokens, TOP_K] float32
    y_ptr,  # [num_tokens, width], written
    width,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A token's experts by their shares, in the order they were chosen. Grid: (num_tokens, width / BLOCK)."""
    i_t = tl.program_id(0).to(tl.int64)
    o_w = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_w = o_w < width
    b_sum = tl.zeros([BLOCK], dtype=tl.float32)
    for i in tl.static_range(TOP_K):
        b_x = tl.load(x_ptr + (i_t * TOP_K + i) * width + o_w, mask=m_w, other=0.0).to(tl.float32)
        b_sum += tl.load(share_ptr + i_t * TOP_K + i) * b_x
    tl.store(y_ptr + i_t * width + o_w, b_sum.to(y_ptr.dtype.element_ty), mask=m_w)


@dataclass(frozen=True, slots=True)
class Sorted:
    """Pairs (token, choice) by expert, in blocks of `block_m`."""

    order: Tensor  # [max_blocks * block_m] int32
    expert_of_block: Tensor  # [max_blocks] int32
    block_m: int


def stacked(experts: Sequence[DeviceWeight]) -> DeviceWeight:
    """One weight a expert, all alike, as one: data, scales and zeros get the expert as their first dimension.

    Raises:
        KernelArgumentError: they differ in form or shape, or have a bias or a permutation.
    """
    first = experts[0]
    for expert in experts:
        if (expert.kind, expert.data.shape, expert.group) != (first.kind, first.data.shape, first.group):
            raise KernelArgumentError(f"experts are {expert.kind} {list(expert.data.shape)} and {first.kind} "
                                      f"{list(first.data.shape)}, expected all alike")  # fmt: skip
        if expert.bias is not None or expert.permutation is not None:
            raise KernelArgumentError(f"an expert of {expert.kind} has a bias or an order of its own, expected none")
    scales = [expert.scales for expert in experts if expert.scales is not None]
    return replace(
        first,
        data=torch.stack([expert.data for expert in experts]),
        scales=torch.stack(scales) if scales else None,
        zeros=_stacked_zeros(experts),
    )


def _stacked_zeros(experts: Sequence[DeviceWeight]) -> Tensor | None:
    """An expert without zeros gets those it means where another has some."""
    known = next((expert.zeros for expert in experts if expert.zeros is not None), None)
    if known is None:
        return None
    eights = torch.full_like(known, 8)
    return torch.stack([eights if expert.zeros is None else expert.zeros for expert in experts])


def route(logits: Tensor, top_k: int, renormalize: bool = True) -> tuple[Tensor, Tensor]:
    """As `kernels.moe.route`.

    Args:
        logits: [num_tokens, num_experts] bfloat16, float16 or float32, contiguous; at most `MAX_EXPERTS` experts.

    Raises:
        KernelArgumentError: an argument is not as above.
    """
    check_shape("logits", logits, None, None)
    check_dtype("logits", logits, *FLOATS)
    check_contiguous("logits", logits)
    num_tokens, num_experts = logits.shape
    if not 1 <= top_k <= num_experts <= MAX_EXPERTS:
        raise KernelArgumentError(f"top_k is {top_k} of {num_experts} experts, expected 1 to {num_experts} of at most "
                                  f"{MAX_EXPERTS}")  # fmt: skip
    ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.device)
    shares = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    if num_tokens:
        route_kernel[(num_tokens,)](
            logits_ptr=logits,
            id_ptr=ids,
            share_ptr=shares,
            num_experts=num_experts,
            TOP_K=top_k,
            RENORMALIZE=renormalize,
            BLOCK=triton.next_power_of_2(num_experts),
            num_warps=1,
        )
    return ids, shares


def sort_by_expert(ids: Tensor, num_experts: int, block_m: int) -> Sorted:
    """Sort pairs by expert, each expert's padded to whole blocks of `block_m`, in ascending order.

    Args:
        ids: [num_tokens, top_k] int32, contiguous, each below `num_experts`.

    Raises:
        KernelArgumentError: `ids` is not as above.
    """
    check_shape("ids", ids, None, None)
    check_dtype("ids", ids, torch.int32)
    check_contiguous("ids", ids)
    pairs = ids.numel()
    # a block holds at least one pair, and only an expert's last block is not full
    max_blocks = min(pairs, pairs // block_m + num_experts)
    order = torch.empty(max_blocks * block_m, dtype=torch.int32, device=ids.device)
    expert_of_block = torch.empty(max_blocks, dtype=torch.int32, device=ids.device)
    if pairs:
        sort_kernel[(num_experts + 1,)](
            id_ptr=ids,
            order_ptr=order,
            expert_ptr=expert_of_block,
            num_pairs=pairs,
            num_experts=num_experts,
            max_blocks=max_blocks,
            BINS=triton.next_power_of_2(num_experts + 1),
            BLOCK_M=block_m,
            BLOCK=_SORT_BLOCK,
            num_warps=4,
        )
    return Sorted(order, expert_of_block, block_m)


def experts(
    x: Tensor, gate_up: DeviceWeight, down: DeviceWeight, ids: Tensor, shares: Tensor, gate: Gate = "silu"
) -> Tensor:
    """As `kernels.moe.experts`, over weights made by `stacked`.

    Args:
        x: [num_tokens, hidden] floats, rows contiguous; of plain weights' dtype.
        gate_up, down: of at most `kernels.linear.triton_kernel.MAX_FEATURES` inputs, without bias or permutation.

    Raises:
        KernelArgumentError: a tensor does not fit.
    """
    num_tokens, top_k = _check(x, gate_up, down, ids, shares)
    y = torch.empty((num_tokens, down.out_features), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return y
    num_experts = gate_up.data.shape[0]
    rows = -(-ids.numel() // num_experts)
    pairs = sort_by_expert(ids, num_experts, 16 if rows <= 16 else 64 if rows <= 64 else 128)
    inner = gate_mul(_grouped(x, gate_up, pairs, ids.numel(), top_k), gate)
    outer = _grouped(inner, down, pairs, ids.numel(), 1)
    combine_kernel[(num_tokens, triton.cdiv(down.out_features, _COMBINE_BLOCK))](
        x_ptr=outer,
        share_ptr=shares,
        y_ptr=y,
        width=down.out_features,
        TOP_K=top_k,
        BLOCK=_COMBINE_BLOCK,
        num_warps=4,
    )
    return y


def _grouped(x: Tensor, weight: DeviceWeight, pairs: Sorted, num_pairs: int, top_k: int) -> Tensor:
    """Each pair's row of x times its expert's matrix: [num_pairs, out_features]."""
    y = torch.empty((num_pairs, weight.out_features), dtype=x.dtype, device=x.device)
    row_scales: Tensor | None = None
    if weight.kind in ("w8a8", "fp8"):
        x, row_scales = quantize_rows(x, weight.data.dtype)
    large = pairs.block_m == 128
    # sums of float8 are held three times over
    block_n = 128 if large and weight.kind != "fp8" else 64
    block_k = 32 if weight.data.dtype == torch.float32 else 64 if weight.kind == "plain" else 128
    scales = x if weight.scales is None else weight.scales
    stages = 4 if not large else 3 if is_roomy(x.device) else 2
    if weight.kind != "plain" and x.element_size() == 4:
        stages = 1 if large else 2  # as much memory as chips have
    grid = (triton.cdiv(weight.out_features, block_n), pairs.expert_of_block.shape[0])
    grouped_linear_kernel[grid](
        x_ptr=x,
        w_ptr=weight.data,
        scale_ptr=scales,
        zero_ptr=x if weight.zeros is None else weight.zeros,
        row_scale_ptr=x if row_scales is None else row_scales,
        order_ptr=pairs.order,
        expert_ptr=pairs.expert_of_block,
        y_ptr=y,
        num_pairs=num_pairs,
        num_experts=weight.data.shape[0],
        in_features=weight.in_features,
        out_features=weight.out_features,
        split=split_features(weight.kind, weight.in_features, weight.out_features),
        x_row=x.stride(0),
        w_expert=weight.data.stride(0),
        scale_expert=0 if weight.scales is None else weight.scales.stride(0),
        TOP_K=top_k,
        GROUP=weight.group,
        HAS_ZERO=weight.zeros is not None,
        WHOLE_ZERO=whole_zeros(weight),
        ACC=tl.int32 if weight.kind == "w8a8" else tl.float32,
        HAS_ROW_SCALE=row_scales is not None,
        HAS_COLUMN_SCALE=weight.kind not in ("plain", "int4"),
        EVEN_K=weight.in_features % block_k == 0,
        BLOCK_K=block_k,
        BLOCK_N=block_n,
        BLOCK_M=pairs.block_m,
        num_warps=8 if large else 4,
        num_stages=stages,
    )
    return y


def _check_weight(name: str, weight: DeviceWeight, dtype: torch.dtype) -> None:
    if weight.kind == "plain":
        check_dtype(name, weight.data, dtype)
    check_float8(name, weight)
    for part in ("bias", "permutation"):
        if getattr(weight, part) is not None:
            raise KernelArgumentError(f"{name} has a {part}, expected none of experts")
    if weight.in_features > MAX_FEATURES:
        raise KernelArgumentError(f"{name} has {weight.in_features} input features, expected at most {MAX_FEATURES}")


def _check(x: Tensor, gate_up: DeviceWeight, down: DeviceWeight, ids: Tensor, shares: Tensor) -> tuple[int, int]:
    check_shape("x", x, None, gate_up.in_features)
    check_dtype("x", x, *FLOATS)
    check_rows("x", x)
    for name, weight in (("gate_up", gate_up), ("down", down)):
        _check_weight(name, weight, x.dtype)
    if (down.in_features, down.out_features) != (gate_up.out_features // 2, gate_up.in_features):
        raise KernelArgumentError(f"down is [{down.out_features}, {down.in_features}], expected "
                                  f"[{gate_up.in_features}, {gate_up.out_features // 2}]")  # fmt: skip
    if not gate_up.num_experts:
        raise KernelArgumentError(f"gate_up has shape {list(gate_up.data.shape)}, expected weights of experts")
    if gate_up.num_experts != down.num_experts:
        raise KernelArgumentError(f"down has {down.num_experts} experts, expected {gate_up.num_experts}")
    check_shape("ids", ids, x.shape[0], None)
    check_shape("shares", shares, *ids.shape)
    check_dtype("shares", shares, torch.float32)
    check_contiguous("shares", shares)
    for name, tensor in (("gate_up", gate_up.data), ("down", down.data), ("ids", ids), ("shares", shares)):
        check_device(name, tensor, x)
    return x.shape[0], ids.shape[1]
