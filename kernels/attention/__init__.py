"""Causal attention over the paged pool. See README.md for the accumulation order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.attention import reference
from kernels.attention.reference import KEY_TILE, QUERY_TILE, SPLIT, AttentionPlan


def plan_attention(
    cu_seqlens_q: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    num_q_heads: int,
    num_kv_heads: int,
) -> AttentionPlan:
    """Lower a step's ragged batch once; every layer of the group uses it.

    Args:
        cu_seqlens_q: [num_seqs + 1] running sum of query lengths, each at least 1.
        seq_lens: [num_seqs] tokens stored and visible to the last query row of each sequence.
        block_tables: per sequence its block ids in order, covering `seq_lens` tokens.
        block_size: tokens in a block; divides 64 or is a multiple of it.
    """
    assert len(cu_seqlens_q) == len(seq_lens) + 1 == len(block_tables) + 1
    assert KEY_TILE % block_size == 0 or block_size % KEY_TILE == 0, block_size
    assert num_q_heads % num_kv_heads == 0, (num_q_heads, num_kv_heads)
    for first, last, seq_len, table in zip(cu_seqlens_q[:-1], cu_seqlens_q[1:], seq_lens, block_tables, strict=True):
        assert 1 <= last - first <= seq_len, (first, last, seq_len)
        assert len(table) * block_size >= seq_len, (len(table), block_size, seq_len)
    return reference.plan_attention(
        cu_seqlens_q, seq_lens, block_tables, block_size, num_q_heads // num_kv_heads, num_kv_heads
    )


def attention(q: Tensor, pool: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """softmax(scale * q K^T, causal) V, with K and V read from the pool only: store first, then attend.

    Args:
        q: [num_tokens, num_q_heads, head_dim]; may be a strided view. Rows past the plan's are padding.
        pool: [num_blocks, 2, num_kv_heads, block_size, head_dim], one layer's view of the pool, same dtype or
            float16.
        plan: of this step.
        scale: usually head_dim ** -0.5.

    Returns:
        [num_tokens, num_q_heads, head_dim], contiguous, same dtype; padding rows are zero. A (row, head) result is the
        same bit for bit however the sequence is cut into steps and whatever else is in the batch.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    assert num_tokens >= plan.num_tokens, (q.shape, plan.num_tokens)
    assert num_q_heads == plan.num_kv_heads * plan.group_size, (q.shape, plan.num_kv_heads, plan.group_size)
    assert pool.shape[1:] == (2, plan.num_kv_heads, plan.block_size, head_dim), (q.shape, pool.shape)
    assert pool.dtype in (q.dtype, torch.float16), (q.dtype, pool.dtype)
    return reference.attention(q, pool, plan, scale)


__all__ = ["KEY_TILE", "QUERY_TILE", "SPLIT", "AttentionPlan", "attention", "plan_attention"]
