"""Drawing tokens: argmax over the surviving tokens of log p + Gumbel(seed, position, token id).

The Gumbel-max trick (Gumbel 1954; Maddison et al. 2014) makes a draw a pure function of the row's logits and
(seed, absolute position): neighbours, batching and failover cannot move it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.sampling import reference
from kernels.sampling.adjustment import Adjustment, adjust
from kernels.sampling.logprobs import row_logprobs
from kernels.sampling.noise import Floats, gumbel, gumbel_all, uniform
from kernels.sampling.reference import NO_TOKEN

GREEDY_BELOW = 1e-6
"""The noise left at a temperature this low is nothing, while a division by it can pass float32."""

RowLogprobs = tuple[float, list[tuple[int, float]]]
"""Of one token, and the most likely (token id, log-probability), best first."""
WantedLogprobs = tuple[int, int, int]
"""Row of the logits, token id, and how many of the most likely tokens."""


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How one row is sampled."""

    temperature: float  # 0 = greedy, and below GREEDY_BELOW as good as that
    top_k: int  # 0 = off
    top_p: float  # 1 = off
    seed: int  # 64 bit
    position: int  # absolute position of the token drawn
    min_p: float = 0.0  # share of the best token's probability below which a token is dropped; 0 = off
    adjustment: Adjustment | None = None  # done to the logits first


def sample(logits: Tensor, rows: Sequence[RowSampling]) -> list[int]:
    """One token id per row, or NO_TOKEN.

    Order: adjustment, temperature, then top-k (exactly k survive, ties to the lowest ids), then top-p (the smallest
    set whose mass reaches p, at least one token, ties to the lowest ids), then min-p, then the draw in float32, ties to
    the lowest id.
    log p stands up to the row's constant, which cannot move the argmax.

    Args:
        logits: [num_rows, vocab_size] float32 (or float64, rounded to float32 first), contiguous, on the CPU.
    """
    assert logits.ndim == 2
    assert logits.shape[0] == len(rows), (logits.shape, len(rows))
    assert logits.dtype in (torch.float32, torch.float64), logits.dtype
    assert logits.is_contiguous()
    assert logits.device.type == "cpu", logits.device
    values = logits.to(torch.float32).numpy()
    return [_sample_row(values[i], row) for i, row in enumerate(rows)]


def _sample_row(logits: Floats, row: RowSampling) -> int:
    if not math.isfinite(logits.max()):
        return NO_TOKEN
    if row.adjustment is not None:
        logits = adjust(logits, row.adjustment)
        if not math.isfinite(logits.max()):
            return NO_TOKEN
    if row.temperature < GREEDY_BELOW:
        return reference.greedy(logits)
    return reference.sample(logits, row.temperature, row.top_k, row.top_p, row.seed, row.position, row.min_p)


def greedy_rows(logits: Tensor) -> list[int]:
    """The lowest id of each row's largest logit, as `sample` takes it; -1 where that is an infinity or a NaN.

    Args:
        logits: as `sample`.
    """
    assert logits.ndim == 2
    assert logits.dtype in (torch.float32, torch.float64), logits.dtype
    assert logits.device.type == "cpu", logits.device
    return reference.greedy_rows((logits if logits.dtype == torch.float32 else logits.float()).numpy())


def tell_logprobs(logits: Tensor, wanted: Sequence[WantedLogprobs]) -> list[RowLogprobs]:
    """Log-probabilities of the logits as given: see `row_logprobs`. Rows must have a finite largest logit.

    Args:
        logits: as `sample`.
    """
    return [row_logprobs(logits[row].to(torch.float32).numpy(), token, top) for row, token, top in wanted]


class Sampler(Protocol):
    """Draws tokens and tells their probabilities, whatever computes it."""

    def sample(self, logits: Tensor, rows: Sequence[RowSampling]) -> list[int]:
        """As `sample`."""
        ...

    def logprobs(self, logits: Tensor, wanted: Sequence[WantedLogprobs]) -> list[RowLogprobs]:
        """As `tell_logprobs`."""
        ...


class ReferenceSampler:
    """Computes in numpy, on the calling thread."""

    def sample(self, logits: Tensor, rows: Sequence[RowSampling]) -> list[int]:
        return sample(logits, rows)

    def logprobs(self, logits: Tensor, wanted: Sequence[WantedLogprobs]) -> list[RowLogprobs]:
        return tell_logprobs(logits, wanted)


__all__ = [
    "NO_TOKEN",
    "Adjustment",
    "ReferenceSampler",
    "RowLogprobs",
    "RowSampling",
    "Sampler",
    "WantedLogprobs",
    "greedy_rows",
    "gumbel",
    "gumbel_all",
    "row_logprobs",
    "sample",
    "tell_logprobs",
    "uniform",
]
