"""How far a kernel's result may be from the float64 reference: one table, for every operation, never softened."""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-6,
    torch.float16: 1.2e-3,
    torch.bfloat16: 8e-3,
    torch.int8: 1.5e-2,
    torch.float8_e4m3fn: 5e-2,
}
"""Bound on |got - wanted| / |wanted| (Frobenius norms) by the narrowest dtype on the way: a few of its half-ulps."""


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """|got - wanted| / |wanted| in float64; 0 if both are zero, NaN or infinity if `got` holds one."""
    got, wanted = got.detach().cpu().double(), wanted.detach().cpu().double()
    norm = float(wanted.norm())
    distance = float((got - wanted).norm())
    return distance / norm if norm else distance


def assert_close(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Raises AssertionError: the shapes differ or the relative error is not within `TOLERANCE[dtype]`."""
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    error = relative_error(got, wanted)
    assert error <= TOLERANCE[dtype], f"relative error {error:.2e}, allowed {TOLERANCE[dtype]:.0e} for {dtype}"
