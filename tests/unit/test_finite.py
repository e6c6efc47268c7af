"""What is no number in a span is found, whatever KV is kept in."""

from __future__ import annotations

import pytest
import torch

from kernels.tile_layouts import LANES16
from shared.kv.finite import span_is_finite
from shared.kv.layout import FP8, INT8, ITEM_BYTES, LayerGroup

NUMBERS = sorted(set(ITEM_BYTES) - {INT8})


def span_of(group: LayerGroup) -> torch.Tensor:
    """Of the largest numbers there are, and their negatives."""
    dtype = getattr(torch, group.dtype)
    count = group.tiles_bytes // ITEM_BYTES[group.dtype]
    if group.dtype == INT8:
        tiles = torch.arange(count).to(torch.int8)
    else:
        tiles = torch.full((count,), torch.finfo(dtype).max, dtype=torch.float64).mul_(-1).to(dtype)
    scales = torch.full((group.scales_bytes // 4,), 3e38)
    return torch.cat([tiles.view(torch.uint8), scales.view(torch.uint8)])


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
def test_numbers_are_finite(dtype: str) -> None:
    group = LayerGroup("full", (0, 1), 2, 16, 32, dtype, LANES16)
    assert span_is_finite(memoryview(span_of(group).numpy()), group)
    assert span_is_finite(memoryview(bytes(group.span_bytes)), group)


@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", NUMBERS)
def test_one_element_that_is_no_number_is_found(dtype: str, value: float) -> None:
    group = LayerGroup("full", (0, 1), 2, 16, 32, dtype, LANES16)
    kind = getattr(torch, dtype)
    # float8_e4m3fn has no infinity
    bad = torch.tensor([float("nan") if dtype == FP8 else value], dtype=torch.float64).to(kind)
    count = group.tiles_bytes // ITEM_BYTES[dtype]
    for at in (0, count // 2, count - 1):
        span = span_of(group)
        span[: group.tiles_bytes].view(kind)[at] = bad[0]
        assert not span_is_finite(memoryview(span.numpy()), group)


@pytest.mark.parametrize("dtype", [INT8, FP8])
def test_one_scale_that_is_no_number_is_found(dtype: str) -> None:
    group = LayerGroup("full", (0, 1), 2, 16, 32, dtype, LANES16)
    span = span_of(group)
    span[group.tiles_bytes :].view(torch.float32)[-1] = float("inf")
    assert not span_is_finite(memoryview(span.numpy()), group)
