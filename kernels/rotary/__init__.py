"""Rotary position embedding, half-split form (Su et al. 2021, arXiv 2104.09864, as in Llama checkpoints)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.rotary import reference


def rotary_table(frequencies: Tensor, num_positions: int, dtype: torch.dtype, attention_factor: float = 1.0) -> Tensor:
    """cos and signed sin of every position's angles: [num_positions, 2, head_dim].

    Args:
        frequencies: [head_dim / 2], or a row a position, [num_positions, head_dim / 2]; float32, as the angles are,
            whatever `dtype` is and as in the checkpoints' own code. See `kernels.rotary.frequencies`.
        attention_factor: multiplies cos and sin.

    The result is float64 for float64 and float32 otherwise.
    """
    assert frequencies.dtype == torch.float32, frequencies.dtype
    assert frequencies.ndim == 1 or frequencies.shape[0] == num_positions, (frequencies.shape, num_positions)
    return reference.rotary_table(frequencies, num_positions, dtype, attention_factor)


def rotary(x: Tensor, table: Tensor) -> None:
    """Rotate every head of every token, in place.

    Args:
        x: [num_tokens, num_heads, head_dim]; may be a strided view.
        table: [num_tokens, 2, head_dim], rows of `rotary_table` picked by position.
    """
    num_tokens, _, head_dim = x.shape
    assert table.shape == (num_tokens, 2, head_dim), (x.shape, table.shape)
    reference.rotary(x, table)
