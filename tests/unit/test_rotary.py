from __future__ import annotations

import math

import pytest
import torch

from kernels.rotary import rotary, rotary_table
from kernels.rotary.frequencies import plain


def test_rotates_each_half_pair_by_its_angle() -> None:
    head_dim, theta, position = 8, 10000.0, 5
    table = rotary_table(plain(head_dim, theta), 10, torch.float64)
    x = torch.randn(1, 2, head_dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before = x.clone()
    rotary(x, table[[position]])
    for i in range(head_dim // 2):
        angle = position * theta ** (-2 * i / head_dim)
        a, b = before[0, :, i], before[0, :, i + head_dim // 2]
        torch.testing.assert_close(x[0, :, i], a * math.cos(angle) - b * math.sin(angle), rtol=0, atol=1e-6)
        torch.testing.assert_close(
            x[0, :, i + head_dim // 2], b * math.cos(angle) + a * math.sin(angle), rtol=0, atol=1e-6
        )


def test_position_zero_changes_nothing() -> None:
    table = rotary_table(plain(16, 1e5), 4, torch.float32)
    x = torch.randn(3, 2, 16)
    before = x.clone()
    rotary(x, table[[0, 0, 0]])
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_rows_do_not_depend_on_their_company_in_a_strided_view(dtype: torch.dtype) -> None:
    table = rotary_table(plain(64, 1e5), 64, dtype)
    qkv = torch.randn(40, 5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    alone = qkv.clone()
    for i in range(40):
        rotary(alone[i : i + 1, :3], table[i : i + 1])
    rotary(qkv[:, :3], table[:40])
    assert torch.equal(qkv, alone)
