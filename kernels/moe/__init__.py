"""A mixture of experts as the feed-forward block (Shazeer et al. 2017, arXiv 1701.06538; as in Mixtral, Qwen3-MoE)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.moe import reference


def route(logits: Tensor, top_k: int, renormalize: bool = True) -> tuple[Tensor, Tensor]:
    """The experts of each token and their shares.

    Args:
        logits: [num_tokens, num_experts], of the router.
        renormalize: shares of the chosen experts add up to 1; without it they are the softmax over all experts.

    Returns:
        ids [num_tokens, top_k] int32, largest share first, ties to the lowest id; shares of the same shape, float32
        (float64 for float64).
    """
    assert logits.ndim == 2
    assert 1 <= top_k <= logits.shape[1], (top_k, logits.shape)
    return reference.route(logits, top_k, renormalize)


def experts(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, shares: Tensor, gate: str = "silu") -> Tensor:
    """Sum over a token's experts of share * down(act(gate) * up).

    Args:
        x: [num_tokens, hidden].
        gate_up: [num_experts, 2 * width, hidden], gate first.
        down: [num_experts, hidden, width].
        ids, shares: of `route`.
        gate: "silu" or "gelu_tanh".

    Returns:
        [num_tokens, hidden], dtype of x.
    """
    num_experts, both, hidden = gate_up.shape
    assert x.shape[1:] == (hidden,), (x.shape, gate_up.shape)
    assert down.shape == (num_experts, hidden, both // 2), (gate_up.shape, down.shape)
    assert ids.shape == shares.shape, (ids.shape, shares.shape)
    assert ids.shape[0] == x.shape[0], (ids.shape, x.shape)
    assert ids.dtype == torch.int32, ids.dtype
    return reference.experts(x, gate_up, down, ids, shares, gate)
