"""One step's attention as work lists for the Triton kernels: pure arithmetic over lengths and block tables.

Which kernel computes a row, how many splits run side by side and what shares a tile never enters its result
(README.md), so everything here is free to choose what is fastest. Knows nothing about devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels.attention.reference import SPLIT

Ints = npt.NDArray[np.int32]

NARROW, WIDE = 64, 128
"""Query rows of a work item: tokens times the query heads of one KV head."""
_MOST_PARTIAL_ROWS = 1 << 17
"""Partial results, of head_dim floats each, that splitting prefill of few items may take."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of the attention kernel."""

    rows: int  # NARROW or WIDE
    split: bool  # every item is one split
    items: Ints  # [num_items, 7] see `attend_kernel`; split -1 = all of them


@dataclass(frozen=True, slots=True)
class Work:
    """One step's attention over one layer group."""

    num_tokens: int
    positions: Ints  # [num_tokens]
    partials: Ints  # [num_tokens] where split 0 of the token lies (or would lie)
    rows: Ints  # token indices; [0, num_tokens) is the identity
    tables: Ints  # [num_seqs, max_blocks]
    joined: Ints  # tokens whose splits are joined afterwards
    launches: tuple[Launch, ...]
    num_partials: int
    most_splits: int  # of a row whose splits are joined
    lowest_block: int  # of those that are read
    highest_block: int


def tile_heads(group_size: int) -> tuple[int, int]:
    """Places for query heads of a KV head in an item, a power of two, and how many items its heads need."""
    heads = min(1 << (group_size - 1).bit_length(), NARROW)
    return heads, -(-group_size // heads)


def plan_work(
    cu_seqlens_q: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    num_q_heads: int,
    num_kv_heads: int,
    *,
    window: int = 0,
    programs: int = 264,
    wide: int = WIDE,
) -> Work:
    """Cut a ragged batch into work items.

    Args:
        cu_seqlens_q: [num_seqs + 1] running sum of query lengths; a sequence may have none.
        seq_lens: [num_seqs] tokens stored and visible to the last query row of each sequence.
        block_tables: per sequence its block ids in order, covering `seq_lens` tokens; entries wholly before the
            window of every row are not read.
        window: sliding window in tokens, 0 = full attention.
        programs: how many items the device computes at a time.
        wide: rows of an item of prefill, NARROW or WIDE; 0: prefill goes by splits as well.

    Raises:
        ValueError: an argument is inconsistent; the message names it.
    """
    cu = np.asarray(cu_seqlens_q, dtype=np.int64)
    lens = np.asarray(seq_lens, dtype=np.int64)
    _check(cu, lens, block_tables, block_size, num_q_heads, num_kv_heads, window)
    queries = np.diff(cu)
    num_tokens = int(cu[-1])
    heads, head_tiles = tile_heads(num_q_heads // num_kv_heads)
    slots = num_kv_heads * head_tiles
    seq_of = np.repeat(np.arange(len(lens)), queries)
    positions = np.arange(num_tokens) - cu[seq_of + 1] + lens[seq_of]
    oldest = np.maximum(lens - queries - window + 1, 0) if window else np.zeros_like(lens)  # first key that is read
    tables = _table(block_tables)
    low, high = _read_blocks(tables, oldest, lens, queries, block_size)

    tokens = NARROW // heads
    first_split, end_split = oldest // SPLIT, -(-lens // SPLIT)
    narrow = np.flatnonzero((queries > 0) & (queries <= tokens))
    broad = np.flatnonzero(queries > tokens)
    shared, shared_rows, covered = _share(
        narrow, cu, queries, lens, tables, first_split, block_size, tokens, num_tokens
    )
    wide_items = _wide_items(broad, cu, queries, (wide or NARROW) // heads)
    splits = end_split - first_split
    cost = int((queries[broad] * splits[broad]).sum()) * num_q_heads
    split_broad = not wide or (len(wide_items) * slots < programs // 2 and cost <= _MOST_PARTIAL_ROWS)

    row_list = np.concatenate([np.arange(num_tokens), shared_rows])

    def launch(rows: int, split: bool, items: npt.NDArray[np.int64]) -> Launch:
        shift = np.full((len(items), 1), heads.bit_length() - 1)
        return Launch(rows, split, _int32(np.concatenate([items, shift, _extent(items, positions[row_list])], 1)))

    launches = []
    if len(narrow):
        own = _split_items(np.stack([cu[narrow], queries[narrow], narrow], 1), first_split + covered, end_split)
        launches.append(launch(NARROW, True, np.concatenate([shared, own])))
    if split_broad and len(broad):
        narrow_items = _wide_items(broad, cu, queries, tokens)
        launches.append(launch(NARROW, True, _split_items(narrow_items, first_split, end_split)))
    elif len(broad):
        ends = positions[wide_items[:, 0] + wide_items[:, 1] - 1]
        launches.append(launch(wide, False, _whole_items(wide_items[np.argsort(-ends, kind="stable")])))

    is_split = np.zeros(len(lens), bool)
    is_split[narrow] = True
    is_split[broad] = split_broad
    joined = np.flatnonzero(is_split[seq_of])
    room = splits[seq_of][joined]
    partials = np.zeros(num_tokens, np.int64)
    partials[joined] = np.cumsum(room) - room - first_split[seq_of][joined]
    return Work(
        num_tokens, _int32(positions), _int32(partials), _int32(row_list),
        tables, _int32(joined), tuple(launches), int(room.sum()), int(room.max(initial=0)), low, high,
    )  # fmt: skip


def _check(
    cu: npt.NDArray[np.int64],
    lens: npt.NDArray[np.int64],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    num_q_heads: int,
    num_kv_heads: int,
    window: int,
) -> None:
    if not len(cu) == len(lens) + 1 == len(block_tables) + 1:
        raise ValueError(f"cu_seqlens_q {cu.shape}, seq_lens {lens.shape} and {len(block_tables)} block_tables differ")
    if block_size < 1 or block_size & (block_size - 1):
        raise ValueError(f"block_size {block_size} is not a power of two")
    if num_kv_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(f"num_q_heads {num_q_heads} is not a multiple of num_kv_heads {num_kv_heads}")
    if window < 0:
        raise ValueError(f"window {window} is negative")
    queries = np.diff(cu)
    if cu[0] != 0 or (queries < 0).any():
        raise ValueError("cu_seqlens_q does not rise from 0")
    for bad in np.flatnonzero(queries > lens):
        raise ValueError(f"cu_seqlens_q gives sequence {bad} {queries[bad]} query rows, seq_lens {lens[bad]} tokens")
    for i, table in enumerate(block_tables):
        if len(table) * block_size < lens[i]:
            raise ValueError(f"block_tables[{i}] has {len(table)} blocks of {block_size} for seq_lens {lens[i]} tokens")


def _table(block_tables: Sequence[Sequence[int]]) -> Ints:
    width = max((len(table) for table in block_tables), default=0)
    tables = np.zeros((len(block_tables), max(width, 1)), np.int32)
    for i, table in enumerate(block_tables):
        tables[i, : len(table)] = table
    return tables


def _read_blocks(
    tables: Ints, oldest: npt.NDArray[np.int64], lens: npt.NDArray[np.int64], queries: npt.NDArray[np.int64], size: int
) -> tuple[int, int]:
    column = np.arange(tables.shape[1])
    is_read = (column >= (oldest // size)[:, None]) & (column < np.where(queries > 0, -(-lens // size), 0)[:, None])
    ids = tables[is_read]
    return (int(ids.min()), int(ids.max())) if len(ids) else (0, -1)


def _wide_items(
    seqs: npt.NDArray[np.int64], cu: npt.NDArray[np.int64], queries: npt.NDArray[np.int64], tokens: int
) -> npt.NDArray[np.int64]:
    """[num_items, 3] first token, tokens, sequence: each sequence's rows cut into pieces of `tokens`."""
    items = [
        (cu[i] + first, min(tokens, queries[i] - first), i) for i in seqs for first in range(0, int(queries[i]), tokens)
    ]
    return np.array(items, np.int64).reshape(-1, 3)


def _extent(items: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[num_items, 2] lowest and highest position of each item's rows."""
    padded = np.append(positions, 0)  # an end may lie behind the last
    bounds = np.stack([items[:, 0], items[:, 0] + items[:, 1]], 1).reshape(-1)
    low, high = (extreme.reduceat(padded, bounds)[::2] for extreme in (np.minimum, np.maximum))
    return np.stack([low, high], 1)


def _whole_items(items: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([items, np.full((len(items), 1), -1)], 1)


def _split_items(
    items: npt.NDArray[np.int64], first_split: npt.NDArray[np.int64], end_split: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Each item once for every split of its sequence."""
    first, end = first_split[items[:, 2]], end_split[items[:, 2]]
    count = end - first
    repeated = np.repeat(items, count, axis=0)
    start = np.cumsum(count) - count
    split = np.arange(len(repeated)) - np.repeat(start - first, count)
    return np.concatenate([repeated, split[:, None]], 1)


def _share(
    narrow: npt.NDArray[np.int64],
    cu: npt.NDArray[np.int64],
    queries: npt.NDArray[np.int64],
    lens: npt.NDArray[np.int64],
    tables: Ints,
    first_split: npt.NDArray[np.int64],
    block_size: int,
    tokens: int,
    num_tokens: int,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Items for splits whose blocks several sequences have in common, so that their K and V are read once.

    Returns:
        [num_items, 4] the items; the token indices they name, which follow the `num_tokens` of the identity; and per
        sequence how many of its first splits they cover.
    """
    items: list[tuple[int, int, int, int]] = []
    rows: list[int] = []
    covered = np.zeros(len(lens), np.int64)
    alive = narrow[first_split[narrow] == 0] if len(narrow) else narrow
    per_split = max(SPLIT // block_size, 1)
    split = 0
    while len(alive) > 1:
        alive = alive[lens[alive] - queries[alive] + 1 >= (split + 1) * SPLIT]
        column = split * SPLIT // block_size
        by_blocks: dict[bytes, list[int]] = {}
        for i in alive:
            by_blocks.setdefault(tables[i, column : column + per_split].tobytes(), []).append(int(i))
        groups = [seqs for seqs in by_blocks.values() if len(seqs) > 1]
        for seqs in groups:
            _pack(seqs, cu, queries, tokens, split, num_tokens, items, rows)
        alive = np.array(sorted(i for seqs in groups for i in seqs), np.int64)
        covered[alive] += 1
        split += 1
    return np.array(items, np.int64).reshape(-1, 4), np.array(rows, np.int64), covered


def _pack(
    seqs: Sequence[int],
    cu: npt.NDArray[np.int64],
    queries: npt.NDArray[np.int64],
    tokens: int,
    split: int,
    num_tokens: int,
    items: list[tuple[int, int, int, int]],
    rows: list[int],
) -> None:
    """Append the items of one split that `seqs` share, as many of their tokens to an item as fit."""
    wanted = [token for i in seqs for token in range(int(cu[i]), int(cu[i + 1]))]
    for first in range(0, len(wanted), tokens):
        part = wanted[first : first + tokens]
        items.append((num_tokens + len(rows), len(part), seqs[0], split))
        rows.extend(part)


def _int32(values: npt.NDArray[np.int64]) -> Ints:
    return values.astype(np.int32)
