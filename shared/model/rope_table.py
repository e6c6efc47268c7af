"""The rotary table of a model: which frequencies its configuration means, and cos and sin of all its positions."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.rotary import frequencies, rotary_table
from shared.model.rope import DYNAMIC, LINEAR, LLAMA3, YARN, Rope


def rope_frequencies(rope: Rope, head_dim: int, num_positions: int) -> Tensor:
    """[head_dim / 2] float32, or [num_positions, head_dim / 2] for the dynamic kind."""
    theta, factor, trained = rope.theta, rope.factor, rope.positions
    if rope.kind == LINEAR:
        return frequencies.linear(head_dim, theta, factor)
    if rope.kind == DYNAMIC:
        return frequencies.dynamic(head_dim, theta, factor, trained, num_positions)
    if rope.kind == LLAMA3:
        return frequencies.llama3(head_dim, theta, factor, trained, rope.low_freq_factor, rope.high_freq_factor)
    if rope.kind == YARN:
        return frequencies.yarn(head_dim, theta, factor, trained, rope.beta_fast, rope.beta_slow, rope.truncate)
    return frequencies.plain(head_dim, theta)


def rope_table(rope: Rope, head_dim: int, num_positions: int, dtype: torch.dtype) -> Tensor:
    """[num_positions, 2, head_dim] as `kernels.rotary.rotary_table`."""
    return rotary_table(rope_frequencies(rope, head_dim, num_positions), num_positions, dtype, rope.attention_factor)
