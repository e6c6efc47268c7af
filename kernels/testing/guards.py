"""Tensors in the middle of a poisoned allocation: what writes past an edge is seen, what reads past it returns NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_GUARD_BYTES = 4096
_POISON = 0xFF
"""Repeated, it is a NaN in every float type (fp8 e4m3 too), -1 in every integer."""


@dataclass(frozen=True, slots=True)
class Guarded:
    """A tensor and the poisoned bytes round it."""

    tensor: Tensor
    _whole: Tensor

    def check(self) -> None:
        """Raises AssertionError: a byte outside the tensor was written."""
        for name, part in (("before", self._whole[:_GUARD_BYTES]), ("behind", self._whole[-_GUARD_BYTES:])):
            touched = int((part != _POISON).sum())
            assert touched == 0, f"{touched} bytes {name} the tensor of shape {tuple(self.tensor.shape)} were written"


def guarded(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Guarded:
    """A tensor of NaN (integers: -1) between two guards of 4 KiB."""
    count = dtype.itemsize
    for size in shape:
        count *= size
    whole = torch.full((2 * _GUARD_BYTES + count,), _POISON, dtype=torch.uint8, device=device)
    return Guarded(whole[_GUARD_BYTES : _GUARD_BYTES + count].view(dtype).view(*shape), whole)


def guarded_like(values: Tensor) -> Guarded:
    """A guarded copy of `values`."""
    copy = guarded(values.shape, values.dtype, values.device)
    copy.tensor.copy_(values)
    return copy
