"""The linear layer of a few rows, with norm, gate and residual, against float64; in the interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.testing import DEVICE, INTERPRETED, assert_close

# isort: split
from kernels.arguments import KernelArgumentError
from kernels.linear.triton_few_rows import MAX_ROWS, few_rows_linear
from kernels.linear.triton_weights import dequantized, int8_channels

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

    assert_close(few_rows_linear(x, weight), x.double() @ weight.double().T, dtype)

    product = normed(x, norm, 1.0) @ weight.double().T + bias.double()
    assert_close(few_rows_linear(x, weight, bias, norm=norm, eps=EPS, offset=1.0), product, dtype)

    gated = F.silu(product[:, :outer]) * product[:, outer:]
    assert_close(few_rows_linear(x, weight, bias, norm=norm, eps=EPS, offset=1.0, gate="silu"), gated, dtype)

    wanted = residual.double() + x.double() @ weight.double().T
    found = few_rows_linear(x, weight, residual=residual)
    assert found is residual
    assert_close(found, wanted, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_integers_are_multiplied_as_what_they_stand_for(dtype: torch.dtype) -> None:
    inner, outer = 72, 10
    x, norm = randn(2, inner, dtype=dtype, seed=0), randn(inner, dtype=dtype, seed=1)
    weight = int8_channels(randn(2 * outer, inner, dtype=torch.float32, seed=2))
    bias, residual = randn(2 * outer, dtype=dtype, seed=3), randn(2, 2 * outer, dtype=dtype, seed=4)
    product = normed(x, norm, 0.0) @ dequantized(weight).T + bias.double()
    found = few_rows_linear(x, weight.data, bias, scales=weight.scales, norm=norm, eps=EPS, gate="silu")
    assert_close(found, F.silu(product[:, :outer]) * product[:, outer:], dtype)
    wanted = residual.double() + x.double() @ dequantized(weight).T
    assert_close(few_rows_linear(x, weight.data, scales=weight.scales, residual=residual), wanted, dtype)


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight = randn(MAX_ROWS, 130, dtype=torch.bfloat16, seed=0), randn(40, 130, dtype=torch.bfloat16, seed=1)
    norm = randn(130, dtype=torch.bfloat16, seed=2)
    together = few_rows_linear(x, weight, norm=norm, eps=EPS)
    for i in range(MAX_ROWS):
        assert torch.equal(few_rows_linear(x[i : i + 1], weight, norm=norm, eps=EPS)[0], together[i])


def test_what_does_not_fit_is_refused_by_name() -> None:
    x, weight = torch.zeros(2, 32, device=DEVICE), torch.zeros(16, 32, device=DEVICE)
    with pytest.raises(KernelArgumentError, match="x has shape"):
        few_rows_linear(torch.zeros(MAX_ROWS + 1, 32, device=DEVICE), weight)
    with pytest.raises(KernelArgumentError, match=r"weight has shape \[16, 30\]"):
        few_rows_linear(x, torch.zeros(16, 30, device=DEVICE))
    with pytest.raises(KernelArgumentError, match="residual has shape"):
        few_rows_linear(x, weight, residual=torch.zeros(2, 15, device=DEVICE))
    with pytest.raises(KernelArgumentError, match=r"norm is torch\.bfloat16"):
        few_rows_linear(x, weight, norm=torch.zeros(32, dtype=torch.bfloat16, device=DEVICE))
    with pytest.raises(KernelArgumentError, match=r"weight is torch\.float32, expected torch\.int8"):
        few_rows_linear(x, weight, scales=torch.zeros(16, device=DEVICE))
    with pytest.raises(KernelArgumentError, match=r"scales has shape \[15\], expected \[16\]"):
        few_rows_linear(x, weight.to(torch.int8), scales=torch.zeros(15, device=DEVICE))
    with pytest.raises(KernelArgumentError, match="gate is"):
        few_rows_linear(x, torch.zeros(15, 32, device=DEVICE), gate="silu")
