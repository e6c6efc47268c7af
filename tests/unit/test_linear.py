"""Rows of a product must not depend on one another, on their number, nor on the thread count: bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.dispatch import UnknownKernels, choose
from kernels.linear import ROW_TILE, linear, onednn, pack, padded_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
SHAPES = [(576, 960), (576, 576), (576, 3072), (1536, 576), (576, 4096), (64, 128), (160, 64), (896, 1152), (48, 80)]
IMPLEMENTATIONS = sorted({"reference", choose("torch").linear})
EVERY_COUNT = (*range(1, 41), 64, 65, 96, 200)
PADDED_EDGES = (1, 7, 8, 9, 16, 17, 24, 25, 32, 33, 40, 64, 65, 96, 200)
"""Of `EVERY_COUNT`: the least and the most rows that are padded to the same number."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("dtype", "implementation"),
    [
        (dtype, name)
        for dtype in DTYPES
        for name in IMPLEMENTATIONS
        if name != "onednn" or onednn.supports(dtype)  # else `pack` makes what the reference is
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_do_not_depend_on_their_company(shape: tuple[int, int], dtype: torch.dtype, implementation: str) -> None:
    in_features, out_features = shape
    generator = torch.Generator().manual_seed(0)
    weight = pack(torch.randn(out_features, in_features, generator=generator).to(dtype), implementation)
    x = torch.randn(200, in_features, generator=generator).to(dtype)
    torch.set_num_threads(1)
    alone = torch.cat([linear(x[i : i + 1], weight) for i in range(200)])
    for threads, counts in ((1, EVERY_COUNT), (2, PADDED_EDGES)):
        torch.set_num_threads(threads)
        for count in counts:
            first = (count * 7) % (201 - count)
            rows = linear(x[first : first + count], weight)
            assert torch.equal(rows, alone[first : first + count]), (count, threads)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2), (torch.float64, 1e-14)], ids=str
)
def test_close_to_the_exact_product(dtype: torch.dtype, tolerance: float, implementation: str) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = (torch.randn(100, 1536, generator=generator) / 39).to(dtype)
    x = torch.randn(5, 1536, generator=generator).to(dtype)
    exact = x.double() @ weight.double().T
    error = (linear(x, pack(weight, implementation)).double() - exact).abs() / exact.abs().clamp(min=1)
    assert error.max() < tolerance


def test_padding_is_a_multiple_of_the_tile() -> None:
    assert [padded_rows(n) for n in (1, 8, 9, 64, 65, 97, 512)] == [8, 8, 16, 64, 96, 128, 512]
    assert all(padded_rows(n) % ROW_TILE == 0 for n in range(1, 300))


def test_neighbouring_nans_stay_where_they_are() -> None:
    weight = pack(torch.ones(16, 32), choose("torch").linear)
    x = torch.ones(9, 32)
    x[4] = float("nan")
    y = linear(x, weight)
    assert y[4].isnan().all()
    assert torch.equal(y[[0, 1, 2, 3, 5, 6, 7, 8]], torch.full((8, 16), 32.0))


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(UnknownKernels, match="fast"):
        choose("fast")
    assert choose("reference").linear == "reference"
