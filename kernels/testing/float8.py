"""Tests of float8 skip, saying so, on a card that has none of it; the interpreter has it always."""

from __future__ import annotations

import pytest
import torch

from kernels.chip import FP8_CAPABILITY, capability
from kernels.testing.device import DEVICE

_NAMES = ("fp8", "float8_e4m3fn", torch.float8_e4m3fn)


def require_float8(kind: str | torch.dtype | None) -> None:
    """Skip the test that asks where `kind`, of weights or of KV, by name or dtype, is float8 and the card has none."""
    if kind in _NAMES and capability(DEVICE) < FP8_CAPABILITY:
        pytest.skip("this card has no float8")
