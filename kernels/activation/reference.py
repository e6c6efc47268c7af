"""SiLU gating in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    width = gate_up.shape[1] // 2
    gate, up = gate_up[:, :width], gate_up[:, width:]
    if gate.dtype == torch.bfloat16:
        gate = gate.float()
    # not F.silu: it takes another exp in vector tails, so a value would depend on its place in the batch
    denominator = gate.neg().exp_().add_(1.0)
    return torch.div(gate, denominator, out=denominator).mul_(up).to(gate_up.dtype)
