from __future__ import annotations

import pytest
import torch

from kernels.activation import silu_mul


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float64, 1e-14)], ids=str
)
@pytest.mark.parametrize("width", [1, 63, 160, 1536])
def test_matches_the_definition(width: int, dtype: torch.dtype, tolerance: float) -> None:
    gate_up = (torch.randn(7, 2 * width, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    gate, up = gate_up.double().split(width, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    result = silu_mul(gate_up)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("width", [63, 160, 1536])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_value_does_not_depend_on_its_place(width: int, dtype: torch.dtype, threads: int) -> None:
    before = torch.get_num_threads()
    gate_up = (torch.randn(40, 2 * width, generator=torch.Generator().manual_seed(1)) * 4).to(dtype)
    torch.set_num_threads(1)
    alone = torch.cat([silu_mul(gate_up[i : i + 1]) for i in range(40)])
    torch.set_num_threads(threads)
    try:
        for count in range(1, 41):
            assert torch.equal(silu_mul(gate_up[40 - count :].clone()), alone[40 - count :])
    finally:
        torch.set_num_threads(before)


def test_extremes_stay_finite() -> None:
    gate = torch.tensor([[-1e4, 1e4, 0.0, 2.0]])
    assert silu_mul(gate).isfinite().all()
