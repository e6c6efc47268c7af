"""Rotary position embedding, half-split form (Su et al. 2021, arXiv 2104.09864, as in Llama checkpoints)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.rotary import reference


def rotary_table(head_dim: int, theta: float, num_positions: int, dtype: torch.dtype) -> Tensor:
    """cos and signed sin of every position's angles: [num_positions, 2, head_dim].

    The angles are float32 whatever `dtype` is, as in the checkpoints' own code: position * theta^(-2i / head_dim).
    The result is float64 for float64 and float32 otherwise.
    """
    assert head_dim % 2 == 0, head_dim
    return reference.rotary_table(head_dim, theta, num_positions, dtype)


def rotary(x: Tensor, table: Tensor) -> None:
    """Rotate every head of every token, in place.

    Args:
        x: [num_tokens, num_heads, head_dim]; may be a strided view.
        table: [num_tokens, 2, head_dim], rows of `rotary_table` picked by position.
    """
    num_tokens, _, head_dim = x.shape
    assert table.shape == (num_tokens, 2, head_dim), (x.shape, table.shape)
    reference.rotary(x, table)
