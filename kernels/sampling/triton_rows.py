"""How rows are sampled, and what comes of it, as tensors on a device; checked before a launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernels.arguments import FLOATS, KernelArgumentError, check_contiguous, check_device, check_dtype, check_shape

MAX_BIASES = 2048
"""Entries of a line of biases: what the API allows, and what may not be drawn yet."""
NO_BIAS = 0x7FFFFFFF
"""The id that fills a line of biases up."""


@dataclass(frozen=True, slots=True)
class Penalties:
    """What has been said before. Rows of one sequence share a line of `counts` and `prompts`; no others do.

    A sampled token is added to its line, but where rows have drafts: `verify` adds those that count.
    """

    repetition: Tensor  # [num_rows] float32; 1 = off; divides or multiplies logits of tokens of prompt and output
    presence: Tensor  # [num_rows] float32; taken off once for a token of the output
    frequency: Tensor  # [num_rows] float32; taken off for each time
    lines: Tensor  # [num_rows] int32, the row's line of the next two; -1 = no penalties
    counts: Tensor  # [num_lines, vocab_size] int32, how often a token was put out; written
    prompts: Tensor  # [num_lines, ceil(vocab_size / 32)] int32, bit i % 32 of word i / 32 for tokens of the prompt


@dataclass(frozen=True, slots=True)
class Bias:
    """Added after penalties; -inf forbids a token."""

    lines: Tensor  # [num_rows] int32, the row's line of the next two; -1 = none
    ids: Tensor  # [num_lines, at most MAX_BIASES] int32, ascending, filled up with NO_BIAS
    values: Tensor  # [num_lines, as many] float32


@dataclass(frozen=True, slots=True)
class Mask:
    """What grammars allow."""

    lines: Tensor  # [num_rows] int32, the row's line of `bits`; -1 = everything
    bits: Tensor  # [num_lines, ceil(vocab_size / 32)] int32, bit i % 32 of word i / 32 set = allowed


@dataclass(frozen=True, slots=True)
class Drafts:
    """Guesses, of rows that follow one another in one sequence. Penalties count those before a row as put out."""

    tokens: Tensor  # [num_rows] int32, the guess at each row's sample
    firsts: Tensor  # [num_rows] int32, the first row of the row's sequence


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each row is sampled: `RowSampling` as tensors on the device."""

    temperature: Tensor  # [num_rows] float32
    top_k: Tensor  # [num_rows] int32
    top_p: Tensor  # [num_rows] float64
    min_p: Tensor  # [num_rows] float64; 0 = off
    seed: Tensor  # [num_rows] int64, the seed's 64 bits
    position: Tensor  # [num_rows] int64
    penalties: Penalties | None = None
    bias: Bias | None = None
    mask: Mask | None = None
    drafts: Drafts | None = None
    scored: Tensor | None = None  # [num_rows] int32, the token whose log-probability is told; -1 = the one sampled


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token a row. Log-probabilities are those of the logits as given, before penalties, temperature, filters."""

    tokens: Tensor  # [num_rows] int32; of a row that is not finite, any of the vocabulary
    finite: Tensor  # [num_rows] int32, 1 where the largest logit is finite as given and adjusted
    logprobs: Tensor  # [num_rows] float32, of the tokens, or of those scored
    log_sums: Tensor  # [num_rows] float32, log of the sum of exp of the row's logits

    def first(self, num_rows: int) -> Drawn:
        """The same memory of the first rows."""
        parts = (self.tokens, self.finite, self.logprobs, self.log_sums)
        return Drawn(*(part[:num_rows] for part in parts))


def empty_drawn(num_rows: int, device: torch.device) -> Drawn:
    """Room for the draws of so many rows."""
    tokens, finite = torch.empty(2, num_rows, dtype=torch.int32, device=device)
    return Drawn(tokens, finite, *torch.empty(2, num_rows, device=device))


def check_rows_of(logits: Tensor, rows: SamplingRows) -> None:
    """Raise `KernelArgumentError` unless everything is as described above."""
    check_shape("logits", logits, None, None)
    check_dtype("logits", logits, *FLOATS)
    check_contiguous("logits", logits)
    num_rows, vocab_size = logits.shape
    words = triton.cdiv(vocab_size, 32)

    def check(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int | None) -> None:
        check_shape(name, tensor, *shape)
        check_dtype(name, tensor, dtype)
        check_contiguous(name, tensor)
        check_device(name, tensor, logits)

    check("temperature", rows.temperature, torch.float32, num_rows)
    check("top_k", rows.top_k, torch.int32, num_rows)
    check("top_p", rows.top_p, torch.float64, num_rows)
    check("min_p", rows.min_p, torch.float64, num_rows)
    check("seed", rows.seed, torch.int64, num_rows)
    check("position", rows.position, torch.int64, num_rows)
    if rows.penalties is not None:
        penalties = rows.penalties
        check("repetition", penalties.repetition, torch.float32, num_rows)
        check("presence", penalties.presence, torch.float32, num_rows)
        check("frequency", penalties.frequency, torch.float32, num_rows)
        check("penalty lines", penalties.lines, torch.int32, num_rows)
        check("counts", penalties.counts, torch.int32, None, vocab_size)
        check("prompts", penalties.prompts, torch.int32, penalties.counts.shape[0], words)
    if rows.bias is not None:
        check("bias lines", rows.bias.lines, torch.int32, num_rows)
        check("bias ids", rows.bias.ids, torch.int32, None, None)
        check("bias values", rows.bias.values, torch.float32, *rows.bias.ids.shape)
        if rows.bias.ids.shape[1] > MAX_BIASES:
            raise KernelArgumentError(f"bias ids have {rows.bias.ids.shape[1]} a line, expected at most {MAX_BIASES}")
    if rows.mask is not None:
        check("mask lines", rows.mask.lines, torch.int32, num_rows)
        check("mask bits", rows.mask.bits, torch.int32, None, words)
    if rows.drafts is not None:
        check("draft tokens", rows.drafts.tokens, torch.int32, num_rows)
        check("draft firsts", rows.drafts.firsts, torch.int32, num_rows)
    if rows.scored is not None:
        check("scored", rows.scored, torch.int32, num_rows)


def check_drawn(out: Drawn, logits: Tensor) -> None:
    """Raise `KernelArgumentError` unless `out` has room for the draws of these logits."""
    for name, tensor, dtype in (
        ("out.tokens", out.tokens, torch.int32),
        ("out.finite", out.finite, torch.int32),
        ("out.logprobs", out.logprobs, torch.float32),
        ("out.log_sums", out.log_sums, torch.float32),
    ):
        check_shape(name, tensor, logits.shape[0])
        check_dtype(name, tensor, dtype)
        check_contiguous(name, tensor)
        check_device(name, tensor, logits)
