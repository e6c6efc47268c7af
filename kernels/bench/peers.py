"""The same work by torch's own operations, as the bench's peers: with the same inputs, to nearly the same results."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.sampling.triton_rows import Bias, Mask, Penalties


def store(kv: Tensor, pool: Tensor, slots: Tensor) -> None:
    """Rows [num_tokens, 2, heads, head_dim] into a pool [blocks, 2, heads, block_size, head_dim]."""
    size = pool.shape[3]
    pool.permute(0, 3, 1, 2, 4)[slots // size, slots % size] = kv.to(pool.dtype)


def store_quantized(kv: Tensor, pool: Tensor, scales: Tensor, slots: Tensor) -> None:
    """As `store`, into int8 or e4m3 with a scale for each token's head, of `scales` [blocks, 2, heads, block_size]."""
    size, most = pool.shape[3], 127 if pool.dtype == torch.int8 else 448
    values = kv.float()
    each = values.abs().amax(-1) / most
    values = values / each.clamp(min=1e-30)[..., None]
    at = slots // size, slots % size
    pool.permute(0, 3, 1, 2, 4)[at] = (values.round() if pool.dtype == torch.int8 else values).to(pool.dtype)
    scales.permute(0, 3, 1, 2)[at] = each


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


def adjusted(logits: Tensor, asked: int, penalties: Penalties, bias: Bias, mask: Mask) -> Tensor:
    """Logits [num_rows, vocab_size] as float32, the first `asked` rows with penalties, biases and mask of their lines.

    Row i has line i, and every entry of its biases is one.
    """
    vocab, x, counts = logits.shape[1], logits[:asked].float(), penalties.counts[:asked]
    said, by = counts > 0, penalties.repetition[:asked, None]
    x = torch.where(said | _bits(penalties.prompts[:asked], vocab), torch.where(x > 0, x / by, x * by), x)
    x = x - counts * penalties.frequency[:asked, None] - said * penalties.presence[:asked, None]
    x = x.scatter_add(1, bias.ids[:asked].long(), bias.values[:asked])
    x = x.masked_fill(~_bits(mask.bits[:asked], vocab), float("-inf"))
    return torch.cat([x, logits[asked:].float()])


def _bits(words: Tensor, count: int) -> Tensor:
    """[lines, count] bool of words [lines, any] of 32 bits, lowest first."""
    shifts = torch.arange(32, device=words.device, dtype=torch.int32)
    return ((words[..., None] >> shifts) & 1).flatten(1)[:, :count].bool()


def experts(x: Tensor, up: Tensor, down: Tensor, router: Tensor, top_k: int) -> Tensor:
    """Every expert's product [experts, out, in] of every token, weighed: no sorting, and no more bytes of weights."""
    shares, ids = router.softmax(-1).topk(top_k)
    weights = torch.zeros_like(router).scatter(-1, ids, shares / shares.sum(-1, keepdim=True))
    gate, value = torch.einsum("th,eoh->eto", x, up).chunk(2, -1)
    out = torch.einsum("eto,eho->eth", F.silu(gate) * value, down)
    return torch.einsum("eth,te->th", out, weights.to(out.dtype))


def grouped_experts(x: Tensor, up: Tensor, down: Tensor, router: Tensor, top_k: int) -> Tensor:
    """As `experts`, of each token's own experts alone: sorted by expert, one grouped product a layer."""
    shares, ids = router.softmax(-1).topk(top_k)
    shares = shares / shares.sum(-1, keepdim=True)
    flat = ids.flatten()
    order = flat.argsort()
    # no bincount: it waits for the host, which a graph cannot hold
    ends = (flat[:, None] == torch.arange(len(up), device=x.device)).sum(0).cumsum(0).int()
    gate, value = F.grouped_mm(x[order // top_k], up.mT, offs=ends).chunk(2, -1)
    out = F.grouped_mm(F.silu(gate) * value, down.mT, offs=ends)
    weighed = torch.empty_like(out)
    weighed[order] = out * shares.flatten()[order, None].to(out.dtype)
    return weighed.view(len(x), top_k, -1).sum(1)
