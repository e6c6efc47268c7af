"""The most likely tokens of rows, best first, and their log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import (
    FLOATS,
    KernelArgumentError,
    check_contiguous,
    check_device,
    check_dtype,
    check_shape,
)

MAX_TOP = 32
_SPLIT = 4096
NO_ID = 0x7FFFFFFF
_NO_ID: tl.constexpr = tl.constexpr(NO_ID)


@triton.jit
def _pick_best(b_x, b_id, left):
    """Largest value among those left and the lowest id that has it."""
    best = tl.max(tl.where(left, b_x, float("-inf")), axis=0)
    return best, tl.min(tl.where(left & (b_x == best), b_id, _NO_ID), axis=0)


@triton.jit
def _wanted(wanted_ptr, i_r, TOP: tl.constexpr, HAS_WANTED: tl.constexpr):
    """How many of its most likely tokens a row wants."""
    wanted = tl.full([], TOP, tl.int32)
    if HAS_WANTED:
        wanted = tl.load(wanted_ptr + i_r)
    return wanted


@triton.jit
def split_top_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    wanted_ptr,  # [num_rows] int32, with HAS_WANTED: how many, at most TOP
    value_ptr,  # [num_rows, num_splits, TOP] float32, written
    id_ptr,  # [num_rows, num_splits, TOP] int32, written; no id where the split has fewer tokens
    vocab_size,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_WANTED: tl.constexpr,
):
    """The best TOP tokens of a split, or those wanted, in order. Grid: (num_rows, num_splits)."""
    i_r, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wanted = _wanted(wanted_ptr, i_r, TOP, HAS_WANTED)
    if wanted == 0:
        return
    o_v = i_s * BLOCK + tl.arange(0, BLOCK)
    left = o_v < vocab_size
    b_x = tl.load(logits_ptr + i_r * vocab_size + o_v, mask=left, other=float("-inf")).to(tl.float32)
    b_x = tl.where(b_x == b_x, b_x, float("-inf"))
    o_out = (i_r * tl.num_programs(1) + i_s) * TOP
    for i in range(wanted):
        best, best_id = _pick_best(b_x, o_v, left)
        tl.store(value_ptr + o_out + i, best)
        tl.store(id_ptr + o_out + i, best_id)
        left = left & (o_v != best_id)


@triton.jit
def merge_top_kernel(
    value_ptr,  # [num_rows, num_splits * TOP] float32
    part_id_ptr,  # [num_rows, num_splits * TOP] int32
    log_sum_ptr,  # [num_rows] float32
    wanted_ptr,  # [num_rows] int32, with HAS_WANTED
    id_ptr,  # [num_rows, TOP] int32, written; no id behind the end of the vocabulary
    logprob_ptr,  # [num_rows, TOP] float32, written
    num_parts,  # num_splits * TOP
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= num_parts
    HAS_WANTED: tl.constexpr,
):
    """Grid: (num_rows,)."""
    i_r = tl.program_id(0).to(tl.int64)
    wanted = _wanted(wanted_ptr, i_r, TOP, HAS_WANTED)
    if wanted == 0:
        return
    o_p = tl.arange(0, BLOCK)
    # of each split those behind `wanted` were not written
    m_p = (o_p < num_parts) & (o_p % TOP < wanted)
    b_x = tl.load(value_ptr + i_r * num_parts + o_p, mask=m_p, other=float("-inf"))  # [BLOCK]
    b_id = tl.load(part_id_ptr + i_r * num_parts + o_p, mask=m_p, other=0x7FFFFFFF)  # [BLOCK]
    left = b_id != 0x7FFFFFFF
    log_sum = tl.load(log_sum_ptr + i_r)
    for i in range(wanted):
        best, best_id = _pick_best(b_x, b_id, left)
        tl.store(id_ptr + i_r * TOP + i, best_id)
        tl.store(logprob_ptr + i_r * TOP + i, best - log_sum)
        left = left & (b_id != best_id)


@dataclass(frozen=True, slots=True)
class Top:
    """The most likely tokens of rows, most likely first, ties to the lowest id; `NO_ID` behind the vocabulary's end."""

    ids: Tensor  # [num_rows, top] int32
    logprobs: Tensor  # [num_rows, top] float32

    def first(self, num_rows: int) -> Top:
        """The same memory of the first rows."""
        return Top(self.ids[:num_rows], self.logprobs[:num_rows])


def empty_top(num_rows: int, top: int, device: torch.device) -> Top:
    """Room for the `top` most likely tokens of so many rows."""
    return Top(torch.empty(num_rows, top, dtype=torch.int32, device=device), torch.empty(num_rows, top, device=device))


def top_logprobs(
    logits: Tensor, log_sums: Tensor, top: int, wanted: Tensor | None = None, out: Top | None = None
) -> Top:
    """The `top` most likely tokens of each row.

    Args:
        logits: [num_rows, vocab_size] as given to `sample`.
        log_sums: [num_rows] float32, as `sample` gave them.
        top: 1 to `MAX_TOP`.
        wanted: [num_rows] int32, how many each row wants, 0 to `top`; what is not wanted is not written.
        out: written, where given, and returned.

    Raises:
        KernelArgumentError: an argument is not as above.
    """
    check_shape("logits", logits, None, None)
    check_dtype("logits", logits, *FLOATS)
    check_contiguous("logits", logits)
    num_rows, vocab_size = logits.shape
    if not 1 <= top <= MAX_TOP:
        raise KernelArgumentError(f"top is {top}, expected 1 to {MAX_TOP}")
    if out is None:
        out = empty_top(num_rows, top, logits.device)
    _check("log_sums", log_sums, torch.float32, logits)
    _check("out.ids", out.ids, torch.int32, logits, top)
    _check("out.logprobs", out.logprobs, torch.float32, logits, top)
    if wanted is not None:
        _check("wanted", wanted, torch.int32, logits)
    if num_rows == 0:
        return out
    splits = triton.cdiv(vocab_size, _SPLIT)
    values = torch.empty((num_rows, splits, top), dtype=torch.float32, device=logits.device)
    part_ids = torch.empty((num_rows, splits, top), dtype=torch.int32, device=logits.device)
    split_top_kernel[(num_rows, splits)](
        logits_ptr=logits,
        wanted_ptr=part_ids if wanted is None else wanted,
        value_ptr=values,
        id_ptr=part_ids,
        vocab_size=vocab_size,
        TOP=top,
        BLOCK=_SPLIT,
        HAS_WANTED=wanted is not None,
        num_warps=8,
    )
    merge_top_kernel[(num_rows,)](
        value_ptr=values,
        part_id_ptr=part_ids,
        log_sum_ptr=log_sums,
        wanted_ptr=part_ids if wanted is None else wanted,
        id_ptr=out.ids,
        logprob_ptr=out.logprobs,
        num_parts=splits * top,
        TOP=top,
        BLOCK=triton.next_power_of_2(splits * top),
        HAS_WANTED=wanted is not None,
        num_warps=4,
    )
    return out


def _check(name: str, tensor: Tensor, dtype: torch.dtype, logits: Tensor, *columns: int) -> None:
    check_shape(name, tensor, logits.shape[0], *columns)
    check_dtype(name, tensor, dtype)
    check_contiguous(name, tensor)
    check_device(name, tensor, logits)
