"""What the kernels' tuning asks about a GPU. Knows no kernel."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_pretended: list[tuple[int, int]] = []
FP8_CAPABILITY = (8, 9)
"""The first chips with float8."""
SHARED_BYTES = {(8, 0): 163 * 1024, (8, 6): 99 * 1024, (8, 9): 99 * 1024, (9, 0): 227 * 1024}
"""Shared memory a block may have, by compute capability (CUDA C++ Programming Guide, "Compute Capabilities")."""
_LEAST_SHARED = 99 * 1024


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability; what `pretend` says, or an H200's, where there is no GPU."""
    if _pretended:
        return _pretended[-1]
    return _capability(device) if device.type == "cuda" else (9, 0)


def interpreted(device: torch.device) -> bool:
    """Whether kernels on `device` run in Triton's interpreter: there a launch's size costs, not its shape."""
    return device.type != "cuda" and not _pretended


def shared_bytes(device: torch.device) -> int:
    """Shared memory a block may have."""
    return SHARED_BYTES.get(capability(device), _LEAST_SHARED)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 0 on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


@contextmanager
def pretend(chip: tuple[int, int]) -> Iterator[None]:
    """Tune for another chip than this machine's: for compiling ahead of time."""
    _pretended.append(chip)
    try:
        yield
    finally:
        _pretended.pop()


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
