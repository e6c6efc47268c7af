"""Write new keys and values into the paged pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.store_kv import reference
from kernels.store_kv.reference import StorePlan


def plan_store(slot_mapping: Sequence[int], block_size: int) -> StorePlan:
    """Lower a slot mapping once per step; every layer of the group uses it.

    Args:
        slot_mapping: one slot (`block_id * block_size + offset`) per token, or -1 for a token that is not stored.
            No slot occurs twice.
    """
    return reference.plan_store(slot_mapping, block_size)


def store_kv(kv: Tensor, pool: Tensor, plan: StorePlan) -> None:
    """Scatter each token's K and V into its slot.

    Args:
        kv: [num_tokens, 2, num_kv_heads, head_dim], K first; may be a strided view.
        pool: [num_blocks, 2, num_kv_heads, block_size, head_dim], one layer's view of the pool, same dtype or
            float16, as which what is beyond its largest number is that, and what is not finite a NaN.
        plan: of this step, for these tokens.
    """
    num_tokens, two, num_kv_heads, head_dim = kv.shape
    assert two == 2, kv.shape
    assert plan.num_tokens == num_tokens, (plan.num_tokens, kv.shape)
    assert pool.shape[1:] == (2, num_kv_heads, plan.block_size, head_dim), (kv.shape, pool.shape)
    assert pool.dtype in (kv.dtype, torch.float16), (kv.dtype, pool.dtype)
    assert plan.num_blocks <= pool.shape[0], (plan.num_blocks, pool.shape)
    reference.store_kv(kv, pool, plan)


__all__ = ["StorePlan", "plan_store", "store_kv"]
