"""What is done to a row's logits before it is sampled, in numpy float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kernels.sampling.noise import Floats


@dataclass(frozen=True, slots=True)
class Adjustment:
    """Penalties for what was said, a bias by token, and what a grammar allows."""

    repetition: float = 1.0  # 1 = off; Keskar et al. 2019, arXiv 1909.05858: for tokens of the prompt and the output
    presence: float = 0.0  # taken off once for a token of the output
    frequency: float = 0.0  # taken off for each time it is there
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    bias: Mapping[int, float] = field(default_factory=dict)  # added after penalties
    allowed: frozenset[int] | None = None  # None = all
    mask: NDArray[np.uint32] | None = None  # the same as bits: [ceil(vocab_size / 32)], bit i % 32 of word i // 32


def adjust(logits: Floats, adjustment: Adjustment) -> Floats:
    """The row with penalties, then bias, then the mask (-inf) applied: [vocab_size] float32, a new array."""
    adjusted = logits.astype(np.float32, copy=True)
    if adjustment.output_ids or adjustment.prompt_ids:
        _penalize(adjusted, adjustment)
    for token_id, value in adjustment.bias.items():
        adjusted[token_id] += np.float32(value)
    if adjustment.allowed is not None:
        mask = np.ones(len(logits), dtype=bool)
        mask[list(adjustment.allowed)] = False
        adjusted[mask] = -np.inf
    if adjustment.mask is not None:
        bits = np.unpackbits(adjustment.mask.view(np.uint8), count=len(logits), bitorder="little")
        adjusted[bits == 0] = -np.inf
    return adjusted


def _penalize(adjusted: Floats, adjustment: Adjustment) -> None:
    counts = np.bincount(np.array(adjustment.output_ids, dtype=np.int64), minlength=len(adjusted))
    seen = np.unique(np.array(adjustment.prompt_ids + adjustment.output_ids, dtype=np.int64))
    repetition, values = np.float32(adjustment.repetition), adjusted[seen]
    adjusted[seen] = np.where(values > 0, values / repetition, values * repetition)
    adjusted -= np.float32(adjustment.frequency) * counts.astype(np.float32)
    adjusted -= np.where(counts > 0, np.float32(adjustment.presence), np.float32(0))
