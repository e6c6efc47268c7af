"""Linear kernels over every weight format, in Triton's interpreter or on a GPU, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.testing import DEVICE, INTERPRETED, assert_close, guarded_like, require_float8

# isort: split
from kernels.arguments import KernelArgumentError
from kernels.chip import pretend
from kernels.linear.triton_kernel import linear, quantize_rows
from kernels.linear.triton_parts import split_features
from kernels.linear.triton_weights import (
    DeviceWeight,
    dequantized,
    fp8_channels,
    from_int4,
    from_minimum,
    int4_groups,
    int8_channels,
    plain,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, in the interpreter
    *([] if INTERPRETED else [pytest.mark.gpu]),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def randint(high: int, *shape: int, dtype: torch.dtype = torch.uint8, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, high, shape, generator=generator, dtype=torch.int64).to(dtype).to(DEVICE)


def expected(x: Tensor, weight: DeviceWeight) -> Tensor:
    if weight.kind in ("w8a8", "fp8"):
        q, scales = quantize_rows(x, weight.data.dtype)
        x = q.double() * scales.double()[:, None]
    y = x.double() @ dequantized(weight).T
    return y if weight.bias is None else y + weight.bias.double()


def made(kind: str, out_features: int, in_features: int, dtype: torch.dtype) -> DeviceWeight:
    weight, bias = randn(out_features, in_features, seed=1), randn(out_features, dtype=dtype, seed=2)
    if kind == "plain":
        return plain(weight.to(dtype), bias)
    if kind == "fp8":
        return fp8_channels(weight, bias)
    if kind.startswith("int4"):
        return int4_groups(weight, int(kind.partition("-")[2]), bias)
    return int8_channels(weight, kind, bias)  # type: ignore[arg-type]


KINDS = ["plain", "int8", "w8a8", "fp8", "int4-32", "int4-64", "int4-128"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_of_the_matrix(kind: str, dtype: torch.dtype) -> None:
    require_float8(kind)
    weight = made(kind, 72, 384, dtype)
    x = guarded_like(randn(5, 384, dtype=dtype, seed=3))
    # tensor cores add products of float8 in fewer bits than float32 has
    narrowest = torch.bfloat16 if kind == "fp8" else dtype
    assert_close(linear(x.tensor, weight), expected(x.tensor, weight), narrowest)


@pytest.mark.parametrize("group", [32, 64])
def test_groups_that_do_not_fill_a_block(group: int) -> None:
    weight = int4_groups(randn(24, 576 - 32 * (group == 32), seed=1), group)
    x = randn(3, weight.in_features, dtype=torch.bfloat16, seed=2)
    assert_close(linear(x, weight), expected(x, weight), torch.bfloat16)


@pytest.mark.parametrize(("num_rows", "out_features", "in_features"), [(1, 1, 31), (17, 65, 63), (70, 130, 200)])
@pytest.mark.parametrize("kind", ["plain", "w8a8"])
def test_odd_sizes(kind: str, num_rows: int, out_features: int, in_features: int) -> None:
    weight = made(kind, out_features, in_features, torch.float16)
    wide = guarded_like(randn(num_rows, in_features + 3, dtype=torch.float16, seed=3))
    x = wide.tensor[:, :in_features]
    assert_close(linear(x, weight), expected(x, weight), torch.float16)


@pytest.mark.parametrize("kind", ["plain", "w8a8", "int4-64"] if INTERPRETED else KINDS)
def test_rows_do_not_depend_on_how_many_there_are(kind: str) -> None:
    """The split grid, the persistent grid and every tile height give a row the same bits."""
    require_float8(kind)
    out_features, in_features = (72, 640) if INTERPRETED else (1032, 4224)
    weight = made(kind, out_features, in_features, torch.bfloat16)
    assert in_features > split_features(weight.kind, in_features, out_features)
    counts = (1, 20) if INTERPRETED else (1, 2, 16, 17, 33, 64, 65, 200, 256, 257)
    x = randn(257 if INTERPRETED else 700, in_features, dtype=torch.bfloat16, seed=4)
    whole = linear(x, weight)
    for count in counts:
        assert torch.equal(linear(x[:count].clone(), weight), whole[:count]), count
    assert torch.equal(linear(x, weight, programs=3), whole)


def test_splits_depend_on_the_weight_alone_and_cover_it() -> None:
    for in_features, out_features in [(4096, 4096), (14336, 4096), (4096, 28672), (576, 960), (2048, 128256), (64, 8)]:
        for kind in KINDS:
            split = split_features(kind, in_features, out_features)
            assert split % 128 == 0
            assert split >= min(512, in_features)
    assert split_features("plain", 4096, 128256) == 4096
    assert split_features("plain", 4096, 4096) == 1024


def test_minimums_of_gguf() -> None:
    q, scales, minimums = randint(16, 40, 128), randn(40, 4, seed=1).abs(), randn(40, 4, seed=2)
    scales[3, 2], scales[:, 1] = 0.0, 0.0  # such a group is its minimum, whatever its values
    weight = from_minimum(q, scales, minimums, 32)
    plain_values = q.double().view(40, 4, 32) * scales.double()[..., None] + minimums.double()[..., None]
    assert_close(dequantized(weight), plain_values.view(40, 128), torch.float32)
    x = randn(3, 128, dtype=torch.bfloat16, seed=3)
    assert_close(linear(x, weight), x.double() @ plain_values.view(40, 128).T, torch.bfloat16)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_whole_zeros_with_and_without_a_permutation(group: int, ordered: bool) -> None:
    in_features, out_features = 256, 48
    q, zeros = randint(16, out_features, in_features), randint(17, out_features, in_features // group, seed=1)
    scales = randn(out_features, in_features // group, dtype=torch.float16, seed=2).abs() * 0.1 + 0.01
    order = None if ordered else torch.randperm(in_features, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    places = torch.arange(in_features, device=DEVICE) // group
    values = (q.double() - zeros.double()[:, places]) * scales.double()[:, places]
    matrix = values if order is None else torch.empty_like(values).index_copy_(1, order, values)
    weight = from_int4(q, scales, zeros, group, order)
    assert torch.equal(dequantized(weight), matrix)
    x = randn(2, in_features, dtype=torch.float16, seed=4)
    assert_close(linear(x, weight), x.double() @ matrix.T, torch.float16)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_rows_are_quantized_by_their_own_scale(dtype: torch.dtype) -> None:
    require_float8(dtype)
    x = randn(4, 130, seed=5)
    x[1], x[2, 7], x[3, 0] = 0.0, 1e6, torch.nan
    q, scales = quantize_rows(x, dtype)
    back = q.double() * scales.double()[:, None]
    assert_close(back[0], x[0].double(), dtype)
    assert torch.equal(back[1], torch.zeros_like(back[1]))
    assert back[2, 7].item() == pytest.approx(1e6)
    assert back[3].isnan().all()
    if dtype == torch.int8:
        assert (back[0] - x[0].double()).abs().max() <= scales[0] * 0.5001
    else:
        assert torch.equal(q[0].float(), (x[0] / scales[0]).to(dtype).float())


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_row_spoils_only_itself(kind: str) -> None:
    require_float8(kind)
    x = randn(3, 128, dtype=torch.bfloat16)
    for bad in (torch.nan, torch.inf):
        x[1, 5] = bad
        y = linear(x, made(kind, 16, 128, torch.bfloat16))
        assert not y[1].isfinite().all()
        assert y[[0, 2]].isfinite().all()


def test_float8_is_refused_where_the_card_has_none_of_it() -> None:
    """And its tests skip there."""
    weight = fp8_channels(randn(8, 64))
    with pretend((8, 0)):
        with pytest.raises(KernelArgumentError, match="weight is float8_e4m3fn"):
            linear(randn(2, 64), weight)
        with pytest.raises(KernelArgumentError, match=r"dtype is float8_e4m3fn, whose products this card"):
            quantize_rows(randn(2, 64), torch.float8_e4m3fn)
        assert quantize_rows(torch.empty(0, 64, device=DEVICE), torch.int8)[0].shape == (0, 64)
        for kind in ("fp8", "float8_e4m3fn", torch.float8_e4m3fn):
            with pytest.raises(pytest.skip.Exception, match="this card has no float8"):
                require_float8(kind)
        for kind in ("int8", "w8a8", torch.int8, None):
            require_float8(kind)
    with pretend((8, 9)):
        require_float8("fp8")


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: linear(randn(2, 64), plain(randn(8, 63))), r"x has shape \[2, 64\], expected \[any, 63\]"),
        (lambda: linear(randn(2, 64).bfloat16(), plain(randn(8, 64))), r"x is torch.bfloat16, expected torch.float32"),
        (lambda: linear(randn(64, 2).T, plain(randn(8, 64))), r"x .*strides"),
        (lambda: int4_groups(randn(8, 96), 64), r"96 input features.*group 64"),
        (lambda: int4_groups(randn(8, 96), 48), r"group is 48"),
        (lambda: from_int4(randint(16, 8, 64), randn(8, 1), None, 32), r"scales has shape \[8, 1\], expected \[8, 2\]"),
        (lambda: plain(randn(8, 64), randn(7)), r"bias has shape \[7\], expected \[8\]"),
        (lambda: quantize_rows(randn(2, 8), torch.int32), r"dtype is torch.int32"),
        (
            lambda: from_int4(randint(16, 8, 64), randn(8, 2), None, 32, randint(8, 63, dtype=torch.int64)),
            r"permutation has shape \[63\], expected \[64\]",
        ),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], object], told: str) -> None:
    with pytest.raises(KernelArgumentError, match=told):
        call()
