"""Mixture of experts in plain torch, a token and an expert at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    shares = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32).softmax(-1)
    # a stable sort: ties stay in the order of ids
    chosen, ids = shares.sort(dim=-1, descending=True, stable=True)
    chosen, ids = chosen[:, :top_k], ids[:, :top_k]
    if renormalize:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return ids.to(torch.int32), chosen


def experts(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, shares: Tensor, gate: str) -> Tensor:
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = torch.zeros(x.shape, dtype=work, device=x.device)
    for t, (row, weights) in enumerate(zip(ids.tolist(), shares.to(work), strict=True)):
        for expert, share in zip(row, weights, strict=True):
            gates, ups = (gate_up[expert].to(work) @ x[t].to(work)).chunk(2)
            active = F.silu(gates) if gate == "silu" else F.gelu(gates, approximate="tanh")
            y[t] += share * (down[expert].to(work) @ (active * ups))
    return y.to(x.dtype)
