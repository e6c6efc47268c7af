"""A device pool's bytes, block by block: as what kernels read, copied from a peer's, and digested where they lie.

Works on any device; who may map whose memory is known elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.store_kv.triton_blocks import digest_blocks, move_blocks, zero_blocks
from shared.contracts.attempt import Attempt
from shared.kv.digest import sums_digest
from shared.kv.handoff_sink import PullItem
from shared.kv.layout import LayerGroup, PoolLayout
from shared.kv.pool import pool_views

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class KvView:
    """A layer group's part of a pool: the same bytes as they are, and as kernels read them."""

    spans: Tensor  # [num_blocks, span_bytes] uint8
    values: Tensor  # [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
    scales: Tensor | None  # [num_blocks, num_layers, 2, num_kv_heads, block_size] float32, of values of 8 bits

    def layer(self, position: int) -> tuple[Tensor, Tensor | None]:
        """Values and scales of one of the group's layers."""
        return self.values[:, position], None if self.scales is None else self.scales[:, position]

    def zero(self, block_ids: Sequence[int]) -> None:
        """Launch overwriting blocks with zeros. Raises IndexError outside the pool."""
        if not all(0 <= block_id < len(self.spans) for block_id in block_ids):
            raise IndexError(f"blocks {list(block_ids)} are not all in a pool of {len(self.spans)}")
        zero_blocks(self.spans, _ids(block_ids, self.spans.device))


def device_views(data: Tensor, layout: PoolLayout) -> tuple[KvView, ...]:
    """Per group its part of a pool's bytes: [layout.total_bytes] uint8."""
    values = pool_views(data, layout)
    return tuple(
        KvView(_spans(data, layout, index), values[index], _scales(data, layout, index))
        for index in range(len(layout.groups))
    )


def span_of(data: Tensor, layout: PoolLayout, group: int, block_id: int) -> Tensor:
    """One block's bytes in a pool's. Raises IndexError outside the pool."""
    offset = layout.block_offset(group, block_id)
    return data[offset : offset + layout.groups[group].span_bytes]


def digests_of(
    data: Tensor, layout: PoolLayout, attempt: Attempt, blocks: Sequence[tuple[int, int, int, int]]
) -> list[bytes]:
    """As `shared.kv.transfer.digest_blocks`, taken on the device: of a pool's blocks, their scales included.

    Args:
        blocks: (group, block id, generation, position) each.
    """
    sums: dict[tuple[int, int], tuple[int, int]] = {}
    for group in {group for group, *_ in blocks}:
        ids = [block_id for index, block_id, *_ in blocks if index == group]
        found = digest_blocks(_spans(data, layout, group), _ids(ids, data.device)).tolist()
        sums |= {(group, block_id): (a & _MASK, b & _MASK) for block_id, (a, b) in zip(ids, found, strict=True)}
    return [
        sums_digest(sums[group, block_id], attempt, group, generation, position)
        for group, block_id, generation, position in blocks
    ]


def pull_blocks(
    source: Tensor,
    source_layout: PoolLayout,
    own: Tensor,
    own_layout: PoolLayout,
    items: Sequence[PullItem],
    tables: Sequence[Sequence[int]],
) -> list[PullItem]:
    """Copy blocks of a peer's pool into our own, and zero what is behind their tokens. Launches, and does not wait.

    Args:
        source, own: the pools' bytes, [total_bytes] uint8, on one device.
        tables: our block ids per group, in position order.

    Returns:
        The items whose block the peer's pool has; the others are not copied.
    """
    there = [item for item in items if 0 <= item.block.block_id < source_layout.num_blocks[item.group]]
    for group in {item.group for item in there}:
        chosen = [item for item in there if item.group == group]
        theirs, ours = [item.block.block_id for item in chosen], [tables[group][item.position] for item in chosen]
        move_blocks(
            _spans(source, source_layout, group),
            _ids(theirs, own.device),
            _spans(own, own_layout, group),
            _ids(ours, own.device),
        )
        for item, block_id in zip(chosen, ours, strict=True):
            span = span_of(own, own_layout, group, block_id)
            zero_rest_on_device(span, own_layout.groups[group], item.valid_tokens)
    return there


def warm(data: Tensor, layout: PoolLayout) -> None:
    """Launch once what a hand-off and a purge launch, so that no request waits for a compiler.

    Block 0 is copied to block 1, and zeroed.

    Args:
        data: a pool's bytes, with at least two blocks a group.
    """
    for group in range(len(layout.groups)):
        spans, first, second = _spans(data, layout, group), _ids([0], data.device), _ids([1], data.device)
        move_blocks(spans, first, spans, second)
        digest_blocks(spans, second)
        zero_blocks(spans, first)


def zero_rest_on_device(span: Tensor, group: LayerGroup, valid_tokens: int) -> None:
    """Zero a block's rows, and their scales, behind its first `valid_tokens`: [span_bytes] uint8.

    Raises:
        ValueError: the tile layout is not "rows", so that only its kernel knows where a row lies.
    """
    if valid_tokens >= group.block_size:
        return
    if group.tile_layout != "rows":
        raise ValueError(f"rows of tile layout {group.tile_layout!r} are not known here")
    for part in (span[: group.tiles_bytes], span[group.tiles_bytes :]):
        if part.shape[0]:
            vectors = len(group.layers) * 2 * group.num_kv_heads
            part.view(vectors, group.block_size, -1)[:, valid_tokens:].zero_()


def _spans(data: Tensor, layout: PoolLayout, group: int) -> Tensor:
    """[num_blocks, span_bytes] uint8."""
    first, count, size = layout.group_offset(group), layout.num_blocks[group], layout.groups[group].span_bytes
    return data[first : first + count * size].view(count, size)


def _ids(ids: Sequence[int], device: torch.device) -> Tensor:
    host = torch.tensor(ids, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def _scales(data: Tensor, layout: PoolLayout, index: int) -> Tensor | None:
    group = layout.groups[index]
    if not group.scales_bytes:
        return None
    tails = _spans(data, layout, index)[:, group.tiles_bytes :].view(torch.float32)
    return tails.view(-1, len(group.layers), 2, group.num_kv_heads, group.block_size)
