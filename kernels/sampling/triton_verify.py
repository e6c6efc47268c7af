"""Verification of drafts: what a sequence's rows sample, and how many of its guesses that agrees with.

A row samples with the noise of its own seed and position, so a guess is right exactly when it equals the sample: what
is put out is what would have been without guesses, whoever guessed and however well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import KernelArgumentError, check_contiguous, check_device, check_dtype, check_shape
from kernels.sampling.triton_kernel import sample
from kernels.sampling.triton_rows import Drafts, Drawn, Penalties, SamplingRows

MAX_DRAFTS = 63


@dataclass(frozen=True, slots=True)
class Verified:
    """Of the rows of sequences with drafts."""

    drawn: Drawn
    accepted: Tensor  # [num_sequences] int32, leading tokens of each that count


@triton.jit
def accept_kernel(
    token_ptr,  # [num_rows] int32
    draft_ptr,  # [num_rows] int32
    cu_rows_ptr,  # [num_sequences + 1] int32
    line_ptr,  # [num_rows] int32, with COUNTS
    counts_ptr,  # [num_lines, vocab_size] int32, written
    count_ptr,  # [num_sequences] int32, written
    vocab_size,
    BLOCK: tl.constexpr,
    COUNTS: tl.constexpr,
):
    """Grid: (num_sequences,)."""
    i_s = tl.program_id(0)
    first = tl.load(cu_rows_ptr + i_s)
    num_rows = tl.load(cu_rows_ptr + i_s + 1) - first
    o_r = tl.arange(0, BLOCK)
    m_r = o_r < num_rows - 1
    b_token = tl.load(token_ptr + first + o_r, mask=o_r < num_rows, other=0)
    b_draft = tl.load(draft_ptr + first + o_r, mask=m_r, other=-1)
    agreed = tl.min(tl.where(m_r & (b_token == b_draft), BLOCK, o_r), axis=0)
    accepted = tl.minimum(agreed + 1, num_rows)
    tl.store(count_ptr + i_s, accepted)
    if COUNTS:
        line = tl.load(line_ptr + first, mask=num_rows > 0, other=-1).to(tl.int64)
        one = b_token * 0 + 1
        tl.atomic_add(counts_ptr + line * vocab_size + b_token, one, mask=(o_r < accepted) & (line >= 0))


def accept(tokens: Tensor, drafts: Tensor, cu_rows: Tensor, penalties: Penalties | None = None) -> Tensor:
    """How many of each sequence's sampled tokens count: those before its first wrong draft, and the one there.

    A sequence with k drafts has k + 1 rows; row i samples the token that draft i guesses.

    Args:
        tokens: [num_rows] int32, of `sample`.
        drafts: [num_rows] int32, the guess at each row's sample; a sequence's last row has none and is not looked at.
        cu_rows: [num_sequences + 1] int32, running sum of rows; at most `MAX_DRAFTS` drafts a sequence.
        penalties: where given, tokens that count are added to their lines.

    Returns:
        [num_sequences] int32, at least 1 (0 for a sequence without rows).

    Raises:
        KernelArgumentError: a tensor is not as above.
    """
    check_shape("tokens", tokens, None)
    check_shape("drafts", drafts, *tokens.shape)
    check_shape("cu_rows", cu_rows, None)
    for name, tensor in (("tokens", tokens), ("drafts", drafts), ("cu_rows", cu_rows)):
        check_dtype(name, tensor, torch.int32)
        check_contiguous(name, tensor)
        check_device(name, tensor, tokens)
    if cu_rows.shape[0] == 0:
        raise KernelArgumentError("cu_rows has shape [0], expected [num_sequences + 1]")
    if penalties is not None:
        check_shape("penalty lines", penalties.lines, tokens.shape[0])
        check_shape("counts", penalties.counts, None, None)
        for name, tensor in (("penalty lines", penalties.lines), ("counts", penalties.counts)):
            check_dtype(name, tensor, torch.int32)
            check_contiguous(name, tensor)
            check_device(name, tensor, tokens)
    counts = torch.empty(cu_rows.shape[0] - 1, dtype=torch.int32, device=tokens.device)
    if counts.shape[0]:
        accept_kernel[(counts.shape[0],)](
            token_ptr=tokens,
            draft_ptr=drafts,
            cu_rows_ptr=cu_rows,
            line_ptr=penalties.lines if penalties else tokens,
            counts_ptr=penalties.counts if penalties else counts,
            count_ptr=counts,
            vocab_size=penalties.counts.shape[1] if penalties else 0,
            BLOCK=MAX_DRAFTS + 1,
            COUNTS=penalties is not None,
            num_warps=1,
        )
    return counts


def verify(logits: Tensor, rows: SamplingRows, drafts: Tensor, cu_rows: Tensor, out: Drawn | None = None) -> Verified:
    """Sample every row as if the drafts before it had been put out, and tell how many of the tokens count.

    No launch waits for the host. Masks and biases are those of rows; penalties count a row's earlier drafts, and the
    lines of `rows.penalties` then get the tokens that count.

    Args:
        logits, rows, out: as of `sample`; `rows.drafts` is not looked at.
        drafts, cu_rows: as of `accept`.

    Raises:
        KernelArgumentError: a tensor is not as described.
    """
    check_shape("logits", logits, None, None)
    check_shape("drafts", drafts, logits.shape[0])
    check_shape("cu_rows", cu_rows, None)
    for name, tensor in (("drafts", drafts), ("cu_rows", cu_rows)):
        check_dtype(name, tensor, torch.int32)
        check_contiguous(name, tensor)
        check_device(name, tensor, logits)
    firsts = torch.repeat_interleave(cu_rows[:-1], cu_rows.diff(), output_size=logits.shape[0])
    drawn = sample(logits, replace(rows, drafts=Drafts(drafts, firsts)), out)
    return Verified(drawn, accept(drawn.tokens, drafts, cu_rows, rows.penalties))
