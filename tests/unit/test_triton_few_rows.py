"""The linear layer of a few rows, with norm, gate and residual, against float64; in the interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.testing import DEVICE, INTERPRETED, assert_close, require_float8

# isort: split
from kernels.arguments import KernelArgumentError
from kernels.chip import pretend
from kernels.linear.triton_few_rows import MAX_ROWS, few_rows_linear
from kernels.linear.triton_weights import (
    DeviceWeight,
    dequantized,
    fp8_channels,
    from_minimum,
    int4_groups,
    int8_channels,
    plain,
)

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
EPS = 1e-5


def randn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def normed(x: Tensor, weight: Tensor, offset: float) -> Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * (weight.double() + offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "inner", "outer"), [(1, 64, 24), (MAX_ROWS, 1100, 7)])
def test_every_form_is_its_definition(rows: int, inner: int, outer: int, dtype: torch.dtype) -> None:
    x, norm = randn(rows, inner, dtype=dtype, seed=0), randn(inner, dtype=dtype, seed=1)
    weight = randn(2 * outer, inner, dtype=dtype, seed=2) / inner**0.5
    bias, residual = randn(2 * outer, dtype=dtype, seed=3), randn(rows, 2 * outer, dtype=dtype, seed=4)

    assert_close(few_rows_linear(x, plain(weight)), x.double() @ weight.double().T, dtype)

    product = normed(x, norm, 1.0) @ weight.double().T + bias.double()
    assert_close(few_rows_linear(x, plain(weight, bias), norm=norm, eps=EPS, offset=1.0), product, dtype)

    gated = F.silu(product[:, :outer]) * product[:, outer:]
    assert_close(few_rows_linear(x, plain(weight, bias), norm=norm, eps=EPS, offset=1.0, gate="silu"), gated, dtype)

    wanted = residual.double() + x.double() @ weight.double().T
    found = few_rows_linear(x, plain(weight), residual=residual)
    assert found is residual
    assert_close(found, wanted, dtype)


def packed(kind: str, weight: Tensor, bias: Tensor | None = None) -> DeviceWeight:
    if kind == "fp8":
        return fp8_channels(weight, bias)
    if kind == "minimum":
        generator, shape = torch.Generator().manual_seed(9), (weight.shape[0], weight.shape[1] // 32)
        q = torch.randint(0, 16, weight.shape, generator=generator, dtype=torch.uint8).to(DEVICE)
        return from_minimum(
            q, *(randn(*shape, dtype=torch.float32, seed=seed) / weight.shape[1] for seed in (7, 8)), 32, bias
        )
    if kind == "symmetric":
        return replace(int4_groups(weight, 64, bias), zeros=None)
    if kind.startswith("int4"):
        return int4_groups(weight, int(kind[5:]), bias)
    return int8_channels(weight, kind, bias)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["int8", "w8a8", "fp8", "int4-32", "int4-64", "int4-128", "minimum", "symmetric"])
def test_packed_weights_are_multiplied_as_what_they_stand_for(kind: str, dtype: torch.dtype) -> None:
    """Over more than one piece of inputs, the last of which is not full."""
    require_float8(kind)
    inner, outer = 1024 + 128, 10
    x, norm = randn(2, inner, dtype=dtype, seed=0), randn(inner, dtype=dtype, seed=1)
    bias, residual = randn(2 * outer, dtype=dtype, seed=3), randn(2, 2 * outer, dtype=dtype, seed=4)
    weight = packed(kind, randn(2 * outer, inner, dtype=torch.float32, seed=2) / inner**0.5, bias)
    matrix = dequantized(weight)
    product = normed(x, norm, 1.0) @ matrix.T + bias.double()
    found = few_rows_linear(x, weight, norm=norm, eps=EPS, offset=1.0, gate="silu")
    assert_close(found, F.silu(product[:, :outer]) * product[:, outer:], dtype)
    wanted = residual.double() + x.double() @ matrix.T + bias.double()
    assert_close(few_rows_linear(x, weight, residual=residual), wanted, dtype)


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight = randn(MAX_ROWS, 130, dtype=torch.bfloat16, seed=0), randn(40, 130, dtype=torch.bfloat16, seed=1)
    norm = randn(130, dtype=torch.bfloat16, seed=2)
    together = few_rows_linear(x, plain(weight), norm=norm, eps=EPS)
    for i in range(MAX_ROWS):
        assert torch.equal(few_rows_linear(x[i : i + 1], plain(weight), norm=norm, eps=EPS)[0], together[i])


def test_what_does_not_fit_is_refused_by_name() -> None:
    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=DEVICE)

    x, weight = zeros(2, 32), plain(zeros(16, 32))
    with pytest.raises(KernelArgumentError, match=r"x has shape \[3, 32\], expected at most 2 rows"):
        few_rows_linear(zeros(MAX_ROWS + 1, 32), weight)
    with pytest.raises(KernelArgumentError, match=r"x has shape \[2, 32\], expected \[any, 30\]"):
        few_rows_linear(x, plain(zeros(16, 30)))
    with pytest.raises(KernelArgumentError, match="residual has shape"):
        few_rows_linear(x, weight, residual=zeros(2, 15))
    with pytest.raises(KernelArgumentError, match=r"norm is torch\.bfloat16"):
        few_rows_linear(x, weight, norm=zeros(32, dtype=torch.bfloat16))
    with pytest.raises(KernelArgumentError, match=r"weight is torch\.bfloat16, expected torch\.float32"):
        few_rows_linear(x, plain(zeros(16, 32, dtype=torch.bfloat16)))
    with pytest.raises(KernelArgumentError, match=r"bias is torch\.bfloat16, expected torch\.float32"):
        few_rows_linear(x, plain(zeros(16, 32), zeros(16, dtype=torch.bfloat16)))
    with pytest.raises(KernelArgumentError, match=r"gate is 'silu' for a weight of 15 outputs"):
        few_rows_linear(x, plain(zeros(15, 32)), gate="silu")
    with pytest.raises(KernelArgumentError, match="weight has a permutation"):
        few_rows_linear(x, replace(weight, permutation=torch.arange(32, device=DEVICE)))
    with pretend((8, 0)), pytest.raises(KernelArgumentError, match="weight is float8_e4m3fn, whose products"):
        few_rows_linear(x, fp8_channels(zeros(16, 32)))
