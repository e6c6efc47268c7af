"""Angular frequencies of rotary embeddings, radians a position, in the float32 operations of the checkpoints' own code.

Every function takes `head_dim` and the base `theta` and gives [head_dim / 2] float32; `trained` is the number of
positions the model was first trained on, which scaling stretches.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def plain(head_dim: int, theta: float) -> Tensor:
    """theta^(-2i / head_dim) (Su et al. 2021, arXiv 2104.09864)."""
    return 1.0 / (theta ** _exponents(head_dim))


def linear(head_dim: int, theta: float, factor: float) -> Tensor:
    """Every frequency divided by `factor`: positions are interpolated (Chen et al. 2023, arXiv 2306.15595)."""
    return plain(head_dim, theta) / factor


def dynamic(head_dim: int, theta: float, factor: float, trained: int, num_positions: int) -> Tensor:
    """A row a position, [num_positions, head_dim / 2]: the base grows with the tokens up to that position.

    NTK-aware scaling as Hugging Face transformers does it (`_compute_dynamic_ntk_parameters`): the first `trained`
    positions turn as unscaled, position p beyond them as the last one of a sequence of p + 1 tokens.
    """
    lengths = torch.arange(1, num_positions + 1, dtype=torch.int64).clamp(min=trained)[:, None]
    stretch = factor * lengths / trained - (factor - 1)
    # transformers takes the power of one number at a time, which torch computes in float64
    base = theta * (stretch.double() ** (head_dim / (head_dim - 2))).float()
    return 1.0 / (base ** _exponents(head_dim))


def llama3(head_dim: int, theta: float, factor: float, trained: int, low: float, high: float) -> Tensor:
    """Waves longer than `trained` / `low` slow down by `factor`, shorter than `trained` / `high` stay, blended between.

    As in Llama 3.1's published code (`apply_scaling`), in the order of operations of transformers.
    """
    frequencies = plain(head_dim, theta)
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > trained / low, frequencies / factor, frequencies)
    smooth = (trained / wavelengths - low) / (high - low)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    between = ~(wavelengths < trained / high) & ~(wavelengths > trained / low)
    return torch.where(between, blended, scaled)


def yarn(
    head_dim: int, theta: float, factor: float, trained: int, beta_fast: float, beta_slow: float, truncate: bool
) -> Tensor:
    """Dimensions that turn more than `beta_fast` times over the trained positions stay, fewer than `beta_slow` times
    are interpolated, a linear ramp between (Peng et al. 2023, arXiv 2309.00071). `truncate` rounds the ramp's ends."""

    def turning(rotations: float) -> float:
        """The dimension that turns so many times."""
        return (head_dim * math.log(trained / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low, high = turning(beta_fast), turning(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 if low == high else 0
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = theta ** _exponents(head_dim)
    kept = 1 - ramp
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept


def _exponents(head_dim: int) -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
