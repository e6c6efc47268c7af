"""What the GPU at hand can do at most, measured now: bytes per second copied, operations per second multiplied."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.bench.timing import seconds_launched

_COPY_BYTES = 4 << 30
_MATRIX = 8192


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one run on one card."""

    bytes_per_s: float  # read plus written
    flops: float  # bfloat16, random data, the vendor's library


def measure() -> Limits:
    """A large copy and a large product."""
    return Limits(_copy(), _product())


def _copy() -> float:
    # not in a graph: there a copy is left to the copy engines, which are slower than a kernel
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / seconds_launched(lambda: target.copy_(source))


def _product() -> float:
    a, b = (torch.randn(_MATRIX, _MATRIX, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * _MATRIX**3 / seconds_launched(lambda: a @ b)
