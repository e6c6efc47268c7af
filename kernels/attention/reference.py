"""Paged attention in plain torch: few operations per layer, all index work done once per step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

QUERY_TILE = 8
KEY_TILE = 64
SPLIT = 512
_SPLIT_TILES = SPLIT // KEY_TILE
_PIECE_TOKENS = 128
"""Query tokens handled together: bounds the score matrix, and lets early pieces skip keys they cannot see."""
_BATCH_SCORES = 16384
"""Scores per KV head handled together: keys, values and scores of a batch then stay in the cache."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some consecutive query tokens of one sequence."""

    row: int  # first token in the batch
    num_tokens: int
    position: int  # absolute, of the first token
    table: Sequence[int]

    @property
    def kv_len(self) -> int:
        return self.position + self.num_tokens


@dataclass(frozen=True, slots=True)
class _Split:
    num_tiles: int  # per piece, a power of two
    blocks: Tensor  # [num_pieces * blocks per split] int64
    hidden_slots: Tensor | None  # int64 indices into [num_pieces * num_tiles * 64]: past the end, read as zero
    mask: Tensor | None  # [num_pieces, num_tiles, query rows or 1, 64] 0 or -inf; None = all visible


@dataclass(frozen=True, slots=True)
class _Batch:
    """Pieces of one shape, computed together."""

    num_pieces: int
    num_tokens: int  # per piece
    num_rows: int  # query rows per piece and KV head, padded to QUERY_TILE
    rows: slice | Tensor  # the tokens in the batch, piece by piece
    splits: tuple[_Split, ...]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One step's attention over one layer group."""

    num_tokens: int
    block_size: int
    group_size: int  # query heads per KV head
    num_kv_heads: int
    batches: tuple[_Batch, ...]


def plan_attention(
    cu_seqlens_q: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    group_size: int,
    num_kv_heads: int,
) -> AttentionPlan:
    by_shape: defaultdict[tuple[int, int], list[_Piece]] = defaultdict(list)
    for first, last, seq_len, table in zip(cu_seqlens_q[:-1], cu_seqlens_q[1:], seq_lens, block_tables, strict=True):
        for piece in _pieces(first, last, seq_len, table):
            by_shape[piece.num_tokens, _padded_tiles(piece.kv_len, block_size)].append(piece)
    batches = []
    for (num_tokens, num_tiles), pieces in by_shape.items():
        num_rows = _round_up(num_tokens * group_size, QUERY_TILE)
        step = max(1, _BATCH_SCORES // (num_rows * min(num_tiles, _SPLIT_TILES) * KEY_TILE))
        for i in range(0, len(pieces), step):
            batches.append(_plan_batch(pieces[i : i + step], num_tokens, num_tiles, block_size, group_size))
    return AttentionPlan(cu_seqlens_q[-1], block_size, group_size, num_kv_heads, tuple(batches))


def _pieces(first: int, last: int, seq_len: int, table: Sequence[int]) -> Iterable[_Piece]:
    for row in range(first, last, _PIECE_TOKENS):
        yield _Piece(row, min(_PIECE_TOKENS, last - row), seq_len - (last - row), table)


def _padded_tiles(kv_len: int, block_size: int) -> int:
    """Key tiles computed for `kv_len` keys: a power of two up to a split, then whole splits, so that shapes are few."""
    tiles = -(-max(kv_len, block_size) // KEY_TILE)
    if tiles > _SPLIT_TILES:
        return _round_up(tiles, _SPLIT_TILES)
    return 1 << (tiles - 1).bit_length()


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _plan_batch(pieces: Sequence[_Piece], num_tokens: int, num_tiles: int, block_size: int, group_size: int) -> _Batch:
    num_rows = _round_up(num_tokens * group_size, QUERY_TILE)
    splits = [
        _plan_split(pieces, first, min(_SPLIT_TILES, num_tiles - first), block_size, group_size, num_rows)
        for first in range(0, num_tiles, _SPLIT_TILES)
    ]
    rows = [piece.row + i for piece in pieces for i in range(num_tokens)]
    consecutive = rows[-1] - rows[0] == len(rows) - 1 and rows == sorted(rows)
    return _Batch(
        num_pieces=len(pieces),
        num_tokens=num_tokens,
        num_rows=num_rows,
        rows=slice(rows[0], rows[-1] + 1) if consecutive else torch.tensor(rows, dtype=torch.int64),
        splits=tuple(splits),
    )


def _plan_split(
    pieces: Sequence[_Piece], first_tile: int, num_tiles: int, block_size: int, group_size: int, num_rows: int
) -> _Split:
    begin, num_keys = first_tile * KEY_TILE, num_tiles * KEY_TILE
    blocks: list[int] = []
    hidden: list[int] = []
    for i, piece in enumerate(pieces):
        ids, first_hidden, last_hidden = _split_blocks(piece, begin, num_keys, block_size)
        blocks.extend(ids)
        hidden.extend(range(i * num_keys + first_hidden, i * num_keys + last_hidden))
    return _Split(
        num_tiles=num_tiles,
        blocks=torch.tensor(blocks, dtype=torch.int64),
        hidden_slots=torch.tensor(hidden, dtype=torch.int64) if hidden else None,
        mask=_mask(pieces, begin, num_tiles, group_size, num_rows),
    )


def _split_blocks(piece: _Piece, begin: int, num_keys: int, block_size: int) -> tuple[list[int], int, int]:
    """The blocks a piece reads in a split, and the range of slots in the split to be read as zero."""
    used = -(-piece.kv_len // block_size)
    first = begin // block_size
    count = num_keys // block_size
    ids = list(piece.table[first : min(used, first + count)])
    end = min(len(ids) * block_size, num_keys)
    last_hidden = end
    if len(ids) < count:
        # padding repeats the first block: wholly visible, so finite, unless it is the only one
        if used == 1:
            last_hidden = num_keys
        ids += [piece.table[0]] * (count - len(ids))
    first_hidden = min(max(piece.kv_len - begin, 0), end)
    return ids, first_hidden, last_hidden


def _mask(pieces: Sequence[_Piece], begin: int, num_tiles: int, group_size: int, num_rows: int) -> Tensor | None:
    num_keys = num_tiles * KEY_TILE
    if all(piece.position >= begin + num_keys - 1 for piece in pieces):
        return None
    num_tokens = pieces[0].num_tokens
    start = torch.tensor([piece.position for piece in pieces])
    if num_tokens == 1:
        token = torch.zeros(1, dtype=torch.int64)
    else:
        token = (torch.arange(num_rows) // group_size).clamp_(max=num_tokens - 1)
    position = start[:, None] + token  # [num_pieces, rows]
    keys = torch.arange(begin, begin + num_keys).view(1, num_tiles, 1, KEY_TILE)
    hidden = keys > position[:, None, :, None]
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


def attention(q: Tensor, pool: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    out = torch.zeros(q.shape, dtype=q.dtype)
    by_head = pool.permute(1, 2, 0, 3, 4)  # [2, num_kv_heads, num_blocks, block_size, head_dim]
    for batch in plan.batches:
        out[batch.rows] = _attend(q[batch.rows], by_head, batch, plan, scale)
    return out


def _attend(q: Tensor, by_head: Tensor, batch: _Batch, plan: AttentionPlan, scale: float) -> Tensor:
    heads, group, head_dim = plan.num_kv_heads, plan.group_size, q.shape[-1]
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    pieces, tokens = batch.num_pieces, batch.num_tokens
    used = tokens * group
    tiles = torch.zeros((heads, pieces, 1, batch.num_rows, head_dim), dtype=work)
    by_piece = q.view(pieces, tokens, heads, group, head_dim).permute(2, 0, 1, 3, 4)
    tiles[:, :, 0, :used].view(heads, pieces, tokens, group, head_dim).copy_(by_piece)
    tiles.mul_(scale)
    top: Tensor | None = None
    for split in batch.splits:
        m, l, o = _attend_split(tiles, by_head, split)
        if top is None:
            top, total, acc = m, l, o
            continue
        new_top = torch.maximum(top, m)
        old, new = (top - new_top).exp_(), (m - new_top).exp_()
        total = (total * old).add_(l * new)
        acc = (acc * old).add_(o * new)
        top = new_top
    result = acc.div_(total)[:, :, :used].view(heads, pieces, tokens, group, head_dim)
    return result.permute(1, 2, 0, 3, 4).reshape(pieces * tokens, heads * group, head_dim).to(q.dtype)


def _attend_split(tiles: Tensor, by_head: Tensor, split: _Split) -> tuple[Tensor, Tensor, Tensor]:
    """Row maximum, sum and weighted values of one split: [heads, pieces, rows, 1], the same, [..., rows, head_dim]."""
    heads, pieces, _, rows, head_dim = tiles.shape
    shape = (heads, pieces, split.num_tiles, rows)
    kv = by_head.index_select(2, split.blocks).to(tiles.dtype)
    if split.hidden_slots is not None:
        kv.view(2, heads, -1, head_dim).index_fill_(2, split.hidden_slots, 0)
    k, v = kv.view(2, heads * pieces * split.num_tiles, KEY_TILE, head_dim)
    q = tiles.expand(*shape, head_dim).reshape(-1, rows, head_dim)
    scores = torch.bmm(q, k.transpose(1, 2)).view(*shape, KEY_TILE)
    if split.mask is not None:
        scores.add_(split.mask)
    top = scores.amax(-1, keepdim=True).amax(2, keepdim=True)  # [heads, pieces, 1, rows, 1]
    if split.mask is not None:
        # a row that sees nothing here has top = -inf, and -inf - -inf is not a number
        top.clamp_(min=torch.finfo(torch.float32).min)
    p = scores.sub_(top).exp_()
    sums = _add_tiles(p.sum(-1, keepdim=True))
    values = _add_tiles(torch.bmm(p.view(-1, rows, KEY_TILE), v).view(*shape, head_dim))
    return top[:, :, 0], sums, values


def _add_tiles(x: Tensor) -> Tensor:
    """Sum over dimension 2, a power of two, as a fixed tree: elementwise adds only."""
    while (half := x.shape[2] // 2) > 0:
        x = x[:, :, :half] + x[:, :, half:]
    return x[:, :, 0]
