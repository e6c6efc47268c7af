"""Rotary embedding in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_table(frequencies: Tensor, num_positions: int, dtype: torch.dtype, attention_factor: float) -> Tensor:
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies  # [num_positions, head_dim / 2]
    cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
    return table.to(torch.float64 if dtype == torch.float64 else torch.float32)


def rotary(x: Tensor, table: Tensor) -> None:
    half = x.shape[-1] // 2
    cos, sin = table[:, :1], table[:, 1:]  # [num_tokens, 1, head_dim]
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    # products and sum are separate operations: a fused one may round differently in vector tails
    x.copy_((x * cos).add_(swapped * sin))
