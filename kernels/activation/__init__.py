"""The gated activation of Llama's feed-forward block (SwiGLU, Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

from torch import Tensor

from kernels.activation import reference


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up.

    Args:
        gate_up: [num_tokens, 2 * width], gate first, contiguous.

    Returns:
        [num_tokens, width], same dtype, computed in at least float32.
    """
    assert gate_up.ndim == 2
    assert gate_up.shape[1] % 2 == 0, gate_up.shape
    assert gate_up.is_contiguous()
    return reference.silu_mul(gate_up)
