"""The same work by torch's own operations, as the bench's peers: with the same inputs, to nearly the same results."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def store(kv: Tensor, pool: Tensor, slots: Tensor) -> None:
    """Rows [num_tokens, 2, heads, head_dim] into a pool [blocks, 2, heads, block_size, head_dim]."""
    size = pool.shape[3]
    pool.permute(0, 3, 1, 2, 4)[slots // size, slots % size] = kv.to(pool.dtype)


def rotary_store(qkv: Tensor, table: Tensor, positions: Tensor, pool: Tensor, slots: Tensor, num_q_heads: int) -> None:
    """Rotate the first heads and the keys of qkv [num_rows, heads, head_dim], in place; keys and values into the pool.

    `table` [positions, 2, head_dim] holds cosines and signed sines.
    """
    kv_heads = pool.shape[2]
    cos, sin = table[positions].unbind(1)
    turned = qkv[:, : num_q_heads + kv_heads].float()
    low, high = turned.chunk(2, -1)
    turned = turned * cos[:, None] + torch.cat([high, low], -1) * sin[:, None]
    qkv[:, :num_q_heads] = turned[:, :num_q_heads].to(qkv.dtype)
    keys = turned[:, num_q_heads:].to(qkv.dtype)
    store(torch.stack([keys, qkv[:, num_q_heads + kv_heads :]], 1), pool, slots)


def sample(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """[num_rows] token ids; 0 of `top_k` and `min_p`, 1 of `top_p` ask for nothing."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if top_p < 1:
        ordered, order = logits.sort(-1, descending=True)
        shares = ordered.softmax(-1)
        dropped = shares.cumsum(-1) - shares > top_p
        logits = logits.masked_fill(dropped.scatter(-1, order, dropped), float("-inf"))
    shares = logits.softmax(-1)
    if min_p:
        shares = shares.masked_fill(shares < min_p * shares.amax(-1, keepdim=True), 0.0)
    # as multinomial does, which a graph cannot hold everywhere
    return (shares / torch.empty_like(shares).exponential_()).argmax(-1)


def experts(x: Tensor, up: Tensor, down: Tensor, router: Tensor, top_k: int) -> Tensor:
    """Every expert's product [experts, out, in] of every token, weighed: no sorting, and no more bytes of weights."""
    shares, ids = router.softmax(-1).topk(top_k)
    weights = torch.zeros_like(router).scatter(-1, ids, shares / shares.sum(-1, keepdim=True))
    gate, value = torch.einsum("th,eoh->eto", x, up).chunk(2, -1)
    out = torch.einsum("eto,eho->eth", F.silu(gate) * value, down)
    return torch.einsum("eth,te->th", out, weights.to(out.dtype))
