"""The most likely tokens of a row, and how many drafted tokens a sequence's samples agree with."""

from __future__ import annotations

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
MAX_DRAFTS = 63
_SPLIT = 4096
_NO_ID: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _pick_best(b_x, b_id, left):
    """Largest value among those left and the lowest id that has it."""
    best = tl.max(tl.where(left, b_x, float("-inf")), axis=0)
    return best, tl.min(tl.where(left & (b_x == best), b_id, _NO_ID), axis=0)


@triton.jit
def split_top_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    value_ptr,  # [num_rows, num_splits, TOP] float32, written
    id_ptr,  # [num_rows, num_splits, TOP] int32, written; no id where the split has fewer tokens
    vocab_size,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best TOP tokens of a split, in order. Grid: (num_rows, num_splits)."""
    i_r, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_v = i_s * BLOCK + tl.arange(0, BLOCK)
    left = o_v < vocab_size
    b_x = tl.load(logits_ptr + i_r * vocab_size + o_v, mask=left, other=float("-inf")).to(tl.float32)
    b_x = tl.where(b_x == b_x, b_x, float("-inf"))
    o_out = (i_r * tl.num_programs(1) + i_s) * TOP
    for i in range(TOP):
        best, best_id = _pick_best(b_x, o_v, left)
        tl.store(value_ptr + o_out + i, best)
        tl.store(id_ptr + o_out + i, best_id)
        left = left & (o_v != best_id)


@triton.jit
def merge_top_kernel(
    value_ptr,  # [num_rows, num_splits * TOP] float32
    part_id_ptr,  # [num_rows, num_splits * TOP] int32
    log_sum_ptr,  # [num_rows] float32
    id_ptr,  # [num_rows, TOP] int64, written
    logprob_ptr,  # [num_rows, TOP] float32, written
    num_parts,  # num_splits * TOP
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two >= num_parts
):
    """Grid: (num_rows,)."""
    i_r = tl.program_id(0).to(tl.int64)
    o_p = tl.arange(0, BLOCK)
    m_p = o_p < num_parts
    b_x = tl.load(value_ptr + i_r * num_parts + o_p, mask=m_p, other=float("-inf"))  # [BLOCK]
    b_id = tl.load(part_id_ptr + i_r * num_parts + o_p, mask=m_p, other=0x7FFFFFFF)  # [BLOCK]
    left = b_id != 0x7FFFFFFF
    log_sum = tl.load(log_sum_ptr + i_r)
    for i in range(TOP):
        best, best_id = _pick_best(b_x, b_id, left)
        tl.store(id_ptr + i_r * TOP + i, best_id.to(tl.int64))
        tl.store(logprob_ptr + i_r * TOP + i, best - log_sum)
        left = left & (b_id != best_id)


def top_logprobs(logits: Tensor, log_sums: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The `top` most likely tokens of each row, most likely first, ties to the lowest id.

    Args:
        logits: [num_rows, vocab_size] as given to `sample`.
        log_sums: [num_rows] float32, as `sample` gave them.
        top: 1 to `MAX_TOP`, at most vocab_size.

    Returns:
        ids [num_rows, top] int64 and log-probabilities [num_rows, top] float32.

    Raises:
        KernelArgumentError: an argument is not as above.
    """
    check_shape("logits", logits, None, None)
    check_dtype("logits", logits, *FLOATS)
    check_contiguous("logits", logits)
    num_rows, vocab_size = logits.shape
    check_shape("log_sums", log_sums, num_rows)
    check_dtype("log_sums", log_sums, torch.float32)
    check_contiguous("log_sums", log_sums)
    check_device("log_sums", log_sums, logits)
    if not 1 <= top <= min(MAX_TOP, vocab_size):
        raise KernelArgumentError(f"top is {top}, expected 1 to {min(MAX_TOP, vocab_size)}")
    splits = triton.cdiv(vocab_size, _SPLIT)
    values = torch.empty((num_rows, splits, top), dtype=torch.float32, device=logits.device)
    part_ids = torch.empty((num_rows, splits, top), dtype=torch.int32, device=logits.device)
    ids = torch.empty((num_rows, top), dtype=torch.int64, device=logits.device)
    logprobs = torch.empty((num_rows, top), dtype=torch.float32, device=logits.device)
    if num_rows == 0:
        return ids, logprobs
    split_top_kernel[(num_rows, splits)](
        logits_ptr=logits, value_ptr=values, id_ptr=part_ids, vocab_size=vocab_size, TOP=top, BLOCK=_SPLIT, num_warps=8
    )
    merge_top_kernel[(num_rows,)](
        value_ptr=values,
        part_id_ptr=part_ids,
        log_sum_ptr=log_sums,
        id_ptr=ids,
        logprob_ptr=logprobs,
        num_parts=splits * top,
        TOP=top,
        BLOCK=triton.next_power_of_2(splits * top),
        num_warps=4,
    )
    return ids, logprobs


@triton.jit
def accept_kernel(
    token_ptr,  # [num_rows] int64
    draft_ptr,  # [num_rows] int64
    cu_rows_ptr,  # [num_sequences + 1] int32
    count_ptr,  # [num_sequences] int32, written
    BLOCK: tl.constexpr,
):
    """Grid: (num_sequences,)."""
    i_s = tl.program_id(0)
    first = tl.load(cu_rows_ptr + i_s)
    num_rows = tl.load(cu_rows_ptr + i_s + 1) - first
    o_r = tl.arange(0, BLOCK)
    m_r = o_r < num_rows - 1
    b_token = tl.load(token_ptr + first + o_r, mask=m_r, other=0)
    b_draft = tl.load(draft_ptr + first + o_r, mask=m_r, other=-1)
    accepted = tl.min(tl.where(m_r & (b_token == b_draft), BLOCK, o_r), axis=0)
    tl.store(count_ptr + i_s, tl.minimum(accepted + 1, num_rows))


def accept(tokens: Tensor, drafts: Tensor, cu_rows: Tensor) -> Tensor:
    """How many of each sequence's sampled tokens count: those before its first wrong draft, and the one there.

    A sequence with k drafts has k + 1 rows; row i samples the token that draft i guesses, with the draft's own noise,
    so a draft is right exactly when it equals the sample.

    Args:
        tokens: [num_rows] int64, of `sample`.
        drafts: [num_rows] int64, the guess at each row's sample; a sequence's last row has none and is not looked at.
        cu_rows: [num_sequences + 1] int32, running sum of rows; at most `MAX_DRAFTS` drafts a sequence.

    Returns:
        [num_sequences] int32, at least 1 (0 for a sequence without rows).

    Raises:
        KernelArgumentError: a tensor is not as above.
    """
    check_shape("tokens", tokens, None)
    check_shape("drafts", drafts, *tokens.shape)
    check_shape("cu_rows", cu_rows, None)
    for name, tensor, dtype in (
        ("tokens", tokens, torch.int64),
        ("drafts", drafts, torch.int64),
        ("cu_rows", cu_rows, torch.int32),
    ):
        check_dtype(name, tensor, dtype)
        check_contiguous(name, tensor)
        check_device(name, tensor, tokens)
    if cu_rows.shape[0] == 0:
        raise KernelArgumentError("cu_rows has shape [0], expected [num_sequences + 1]")
    counts = torch.empty(cu_rows.shape[0] - 1, dtype=torch.int32, device=tokens.device)
    if counts.shape[0]:
        accept_kernel[(counts.shape[0],)](
            token_ptr=tokens,
            draft_ptr=drafts,
            cu_rows_ptr=cu_rows,
            count_ptr=counts,
            BLOCK=MAX_DRAFTS + 1,
            num_warps=1,
        )
    return counts
