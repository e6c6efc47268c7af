"""store_kv in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_TOP = 1e-30
"""What the largest magnitude of a quantized vector is at least taken for: its scale's inverse would not be finite."""


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Where the tokens of one step go."""

    num_tokens: int
    block_size: int
    num_blocks: int  # one more than the highest block written
    rows: Tensor | None  # [num_stored] int64 token indices; None = all, in order
    blocks: Tensor  # [num_stored] int64
    offsets: Tensor  # [num_stored] int64


def plan_store(slot_mapping: Sequence[int], block_size: int) -> StorePlan:
    stored = [(row, slot) for row, slot in enumerate(slot_mapping) if slot >= 0]
    blocks = [slot // block_size for _, slot in stored]
    return StorePlan(
        num_tokens=len(slot_mapping),
        block_size=block_size,
        num_blocks=max(blocks, default=-1) + 1,
        rows=None if len(stored) == len(slot_mapping) else torch.tensor([row for row, _ in stored], dtype=torch.int64),
        blocks=torch.tensor(blocks, dtype=torch.int64),
        offsets=torch.tensor([slot % block_size for _, slot in stored], dtype=torch.int64),
    )


def store_kv(kv: Tensor, pool: Tensor, plan: StorePlan) -> None:
    if plan.blocks.numel() == 0:
        return
    rows = kv if plan.rows is None else kv.index_select(0, plan.rows)
    rows = rows if rows.dtype == pool.dtype else to_halves(rows)
    by_slot = pool.permute(0, 3, 1, 2, 4)  # [num_blocks, block_size, 2, num_kv_heads, head_dim]
    by_slot.index_put_((plan.blocks, plan.offsets), rows)


def to_halves(x: Tensor) -> Tensor:
    """As float16: beyond its largest finite number that, and a NaN for what is no finite number."""
    most = torch.finfo(torch.float16).max
    x = x if x.dtype == torch.float64 else x.float()  # bfloat16 has no such number
    return (x.clamp(-most, most) + x * 0).to(torch.float16)


def quantize(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors as 8-bit integers with a scale each, as a pool of int8 keeps them.

    Args:
        vectors: [..., head_dim], any float dtype.

    Returns:
        [..., head_dim] int8, and [...] float32 that they are multiplied by: NaN where an element is no finite number.
    """
    x = vectors.float()
    top = x.abs().amax(-1).clamp(min=LEAST_TOP) + (x * 0).sum(-1)
    integers = (x * (127 / top)[..., None]).round().nan_to_num(-127).clamp(-127, 127)
    return integers.to(torch.int8), top / 127


def dequantize(integers: Tensor, scales: Tensor) -> Tensor:
    """What `quantize` made of vectors: [..., head_dim] float32."""
    return integers.float() * scales[..., None]
