"""Where a token's keys and values lie inside a (layer, K|V, head) tile of the pool: what `tile_layout` names.

rows     [block_size, head_dim], plain: what torch and Triton read
lanes16  keys [block_size / 16][words of a head][16], values [block_size / pack][head_dim][pack], where a word is 32
         bits and holds `pack` elements, of float16 one of 16 bits: what the native kernels read (store_kv/cpu_kernel.h)

Of 8-bit integers every (layer, K|V, head, token) has a scale of its own, float32: [layers, 2, heads, block_size] of
them stand behind all tiles of a block.
"""

from __future__ import annotations

ROWS, LANES16 = "rows", "lanes16"
LEAST_BLOCK = {ROWS: 1, LANES16: 16}
"""Fewest tokens of a block, by layout."""
SCALE_BYTES = 4
"""Of one vector's scale, where elements are 8-bit integers."""
_LANES, _WORD_BYTES = 16, 4


def tokens_of_bytes(
    layout: str, block_size: int, head_dim: int, item_bytes: int, dtype: str = ""
) -> tuple[list[int], list[int]]:
    """Which token of the block each byte of a tile is part of: a tile of keys, and one of values.

    Args:
        dtype: of the elements; only float16 lies otherwise than others of its size.

    Raises:
        ValueError: the layout is unknown, or has no elements or blocks of this size.
    """
    if layout == ROWS:
        tokens = [token for token in range(block_size) for _ in range(head_dim * item_bytes)]
        return tokens, tokens
    if layout != LANES16:
        raise ValueError(f"tile layout {layout!r} is none of {', '.join(LEAST_BLOCK)}")
    pack = 1 if dtype == "float16" else _WORD_BYTES // item_bytes
    if item_bytes not in (1, 2, 4) or block_size % _LANES or head_dim % pack:
        raise ValueError(
            f"{layout} holds no blocks of {block_size} tokens of {head_dim} elements of {item_bytes} bytes"
        )
    runs, words = range(0, block_size, _LANES), range(head_dim // pack)
    keys = [run + lane for run in runs for _ in words for lane in range(_LANES) for _ in range(pack * item_bytes)]
    groups, elements = range(0, block_size, pack), range(head_dim)
    values = [first + i for first in groups for _ in elements for i in range(pack) for _ in range(item_bytes)]
    return keys, values
