"""Drawing tokens: argmax over the surviving tokens of log p + Gumbel(seed, position, token id).

The Gumbel-max trick (Gumbel 1954; Maddison et al. 2014) makes a draw a pure function of the row's logits and
(seed, absolute position): neighbours, batching and failover cannot move it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampling import reference
from kernels.sampling.adjustment import Adjustment, adjust
from kernels.sampling.logprobs import row_logprobs
from kernels.sampling.noise import Floats, gumbel, gumbel_all, uniform

GREEDY_BELOW = 1e-6
"""The noise left at a temperature this low is nothing, while a division by it can pass float32."""


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


def sample(logits: Tensor, rows: list[RowSampling]) -> list[int]:
    """One token id per row.

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
    if row.adjustment is not None:
        logits = adjust(logits, row.adjustment)
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


__all__ = ["Adjustment", "RowSampling", "greedy_rows", "gumbel", "gumbel_all", "row_logprobs", "sample", "uniform"]
