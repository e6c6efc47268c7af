from __future__ import annotations

import pytest
import torch

from kernels.norm import add_rms_norm, rms_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float64, 1e-14)], ids=str
)
@pytest.mark.parametrize("hidden", [16, 63, 576])
def test_matches_the_definition(hidden: int, dtype: torch.dtype, tolerance: float) -> None:
    x = torch.randn(5, hidden, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = torch.rand(hidden, generator=torch.Generator().manual_seed(1)).to(dtype)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_add_is_add_then_norm(dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    weight = torch.ones(64, dtype=dtype)
    expected_sum = residual + x
    normed = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, expected_sum)
    assert torch.equal(normed, rms_norm(expected_sum, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [63, 64, 576])
def test_rows_do_not_depend_on_their_company(hidden: int, dtype: torch.dtype) -> None:
    x = torch.randn(40, hidden, generator=torch.Generator().manual_seed(3)).to(dtype)
    weight = torch.rand(hidden, generator=torch.Generator().manual_seed(4)).to(dtype)
    whole = rms_norm(x, weight, 1e-5)
    for count in range(1, 41):
        assert torch.equal(rms_norm(x[40 - count :].clone(), weight, 1e-5), whole[40 - count :])


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(AssertionError):
        rms_norm(torch.ones(2, 8), torch.ones(7), 1e-5)
