"""What a KV pool looks like: layer groups, spans, and the fingerprint two workers must share to hand blocks over.

A *block* is one contiguous span holding all layers' K and V of one layer group for `block_size` tokens, in outer order
`[num_blocks, num_layers, 2, num_kv_heads, tile]`. The element order inside a (layer, K|V, head) tile is private to
`kernels/` and named by `tile_layout`; everybody else treats a span as opaque bytes. Of 8-bit values, a float32 scale
of every token's vector, `[num_layers, 2, num_kv_heads, block_size]`, stands at the span's tail.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from kernels.tile_layouts import SCALE_BYTES
from shared.contracts.errors import SettingsError

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}
FLOAT16 = "float16"
INT8, FP8 = SCALED = "int8", "float8_e4m3fn"
"""The dtypes whose vectors have scales."""
KV_SETTINGS = {"int8": INT8, "fp8": FP8}
"""What a setting calls those dtypes."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share one pool and one block table per sequence (full attention, sliding window, ...)."""

    name: str
    layers: tuple[int, ...]  # model layer indices, ascending
    num_kv_heads: int  # local to this tensor-parallel rank
    head_dim: int
    block_size: int  # token slots in a block
    dtype: str  # a key of ITEM_BYTES
    tile_layout: str = "rows"  # a layout of kernels.tile_layouts.py; "rows": [block_size, head_dim], plain
    sliding_window: int = 0  # tokens; 0 = full attention

    @property
    def span_bytes(self) -> int:
        """Bytes of one block: the unit of allocation, sharing, hand-off and digest."""
        return self.tiles_bytes + self.scales_bytes

    @property
    def tiles_bytes(self) -> int:
        """Bytes of a span without its scales."""
        return self._vectors * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def scales_bytes(self) -> int:
        """Bytes of the scales at a span's tail."""
        return self._vectors * SCALE_BYTES if self.dtype in SCALED else 0

    @property
    def _vectors(self) -> int:
        return len(self.layers) * 2 * self.num_kv_heads * self.block_size

    @property
    def token_bytes(self) -> int:
        """KV bytes one token takes in this group: 2 * L * H_kv * (d * b + scale)."""
        return self.span_bytes // self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` token slots."""
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """The groups of a pool and how many blocks each has."""

    groups: tuple[LayerGroup, ...]
    num_blocks: tuple[int, ...]  # one entry per group

    @property
    def total_bytes(self) -> int:
        return sum(g.span_bytes * n for g, n in zip(self.groups, self.num_blocks, strict=True))

    def group_offset(self, group: int) -> int:
        """Byte offset of a group's first block in the pool."""
        pairs = list(zip(self.groups, self.num_blocks, strict=True))[:group]
        return sum(g.span_bytes * n for g, n in pairs)

    def block_offset(self, group: int, block_id: int) -> int:
        """Byte offset of a block's span in the pool. Raises IndexError outside the pool."""
        if not 0 <= block_id < self.num_blocks[group]:
            raise IndexError(f"block {block_id} is outside group {group} of {self.num_blocks[group]} blocks")
        return self.group_offset(group) + block_id * self.groups[group].span_bytes


def pool_layout(groups: tuple[LayerGroup, ...], pool_bytes: int) -> PoolLayout:
    """As many blocks as fit, of every group alike.

    Raises:
        SettingsError: there is no room for two.
    """
    block_bytes = sum(group.span_bytes for group in groups)
    num_blocks = pool_bytes // block_bytes
    if num_blocks < 2:
        raise SettingsError(
            f"kv.pool_bytes: a pool of {pool_bytes} bytes holds no two blocks of kv.block_size {groups[0].block_size}, "
            f"{block_bytes} bytes each",
            param="kv.pool_bytes",
        )
    return PoolLayout(groups, (num_blocks,) * len(groups))


def fingerprint(groups: tuple[LayerGroup, ...], model_digest: str, numerics: str) -> str:
    """Digest (32 hex digits) that two workers must share before KV may pass between them.

    Pool sizes are left out on purpose: a large prefill pool may feed a small decode pool.
    """
    parts = [model_digest, numerics]
    for g in groups:
        parts.append(
            f"{g.name}|{g.layers}|{g.num_kv_heads}|{g.head_dim}|{g.block_size}|{g.dtype}|{g.tile_layout}|{g.sliding_window}"
        )
    return hashlib.blake2b("\x00".join(parts).encode(), digest_size=16).hexdigest()
