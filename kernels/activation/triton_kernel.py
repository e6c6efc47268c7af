"""Gated activations, one pass over gate and up, computed in float32."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import FLOATS, KernelArgumentError, check_dtype, check_rows, check_shape

Gate = Literal["silu", "gelu_tanh"]
GATES: tuple[Gate, ...] = ("silu", "gelu_tanh")
_BLOCK = 1024


@triton.jit
def gated(b_gate, GATE: tl.constexpr):
    """The activation of float32 values. `gelu_tanh` is 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), and
    0.5 (1 + tanh z) is sigmoid(2 z)."""
    if GATE == "silu":
        return b_gate / (1.0 + tl.exp(-b_gate))
    inner = 1.5957691216057308 * (b_gate + 0.044715 * b_gate * b_gate * b_gate)
    return b_gate / (1.0 + tl.exp(-inner))


@triton.jit
def gate_mul_kernel(
    gate_up_ptr,  # [num_tokens, 2 * width], rows contiguous, gate first
    y_ptr,  # [num_tokens, width], contiguous
    gate_up_row: tl.int64,
    width,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """gate activated, times up. Grid: (num_tokens, width / BLOCK)."""
    i_t = tl.program_id(0).to(tl.int64)
    o_w = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_w = o_w < width
    p_gate = gate_up_ptr + i_t * gate_up_row + o_w
    b_gate = tl.load(p_gate, mask=m_w, other=0.0).to(tl.float32)  # [BLOCK]
    b_up = tl.load(p_gate + width, mask=m_w, other=0.0).to(tl.float32)  # [BLOCK]
    tl.store(y_ptr + i_t * width + o_w, (gated(b_gate, GATE) * b_up).to(y_ptr.dtype.element_ty), mask=m_w)


def gate_mul(gate_up: Tensor, gate: Gate) -> Tensor:
    """gate(x) * up.

    Args:
        gate_up: [num_tokens, 2 * width] bfloat16, float16 or float32, gate first, rows contiguous.
        gate: "silu" (Llama, Qwen) or "gelu_tanh" (Gemma).

    Returns:
        [num_tokens, width], a new tensor of the same dtype.

    Raises:
        KernelArgumentError: an argument is not as above.
    """
    check_shape("gate_up", gate_up, None, None)
    check_dtype("gate_up", gate_up, *FLOATS)
    check_rows("gate_up", gate_up)
    num_tokens, both = gate_up.shape
    if both % 2:
        raise KernelArgumentError(f"gate_up has shape {list(gate_up.shape)}, expected an even width")
    if gate not in GATES:
        raise KernelArgumentError(f"gate is {gate!r}, expected one of {', '.join(GATES)}")
    y = torch.empty((num_tokens, both // 2), dtype=gate_up.dtype, device=gate_up.device)
    if y.numel() == 0:
        return y
    gate_mul_kernel[(num_tokens, triton.cdiv(both // 2, _BLOCK))](
        gate_up_ptr=gate_up,
        y_ptr=y,
        gate_up_row=gate_up.stride(0),
        width=both // 2,
        GATE=gate,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return y


def silu_mul(gate_up: Tensor) -> Tensor:
    """`gate_mul` with "silu"."""
    return gate_mul(gate_up, "silu")
