"""What host wrappers check before a launch: a kernel given a wrong tensor writes where it should not.

Knows tensors; knows no operation.
"""

from __future__ import annotations

import torch
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class KernelArgumentError(ValueError):
    """A tensor that a kernel cannot take; the message names the argument and what it should have been."""


def check_shape(name: str, tensor: Tensor, *expected: int | None) -> None:
    """Raise `KernelArgumentError` unless `tensor` has the shape `expected`, where None stands for any size."""
    same = tensor.ndim == len(expected)
    if not same or any(want is not None and want != got for want, got in zip(expected, tensor.shape, strict=True)):
        wanted = ", ".join("any" if want is None else str(want) for want in expected)
        raise KernelArgumentError(f"{name} has shape {list(tensor.shape)}, expected [{wanted}]")


def check_dtype(name: str, tensor: Tensor, *allowed: torch.dtype) -> None:
    """Raise `KernelArgumentError` unless `tensor` has one of the dtypes."""
    if tensor.dtype not in allowed:
        raise KernelArgumentError(f"{name} is {tensor.dtype}, expected {' or '.join(str(dtype) for dtype in allowed)}")


def check_rows(name: str, tensor: Tensor) -> None:
    """Raise `KernelArgumentError` unless the last dimension of `tensor` is contiguous."""
    if tensor.numel() > 0 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise KernelArgumentError(
            f"{name} of shape {list(tensor.shape)} has strides {list(tensor.stride())}, expected 1 in the last"
        )


def check_contiguous(name: str, tensor: Tensor) -> None:
    """Raise `KernelArgumentError` unless `tensor` is contiguous."""
    if not tensor.is_contiguous():
        raise KernelArgumentError(
            f"{name} of shape {list(tensor.shape)} has strides {list(tensor.stride())}, expected contiguous"
        )


def check_device(name: str, tensor: Tensor, like: Tensor) -> None:
    """Raise `KernelArgumentError` unless `tensor` lies where `like` does."""
    if tensor.device != like.device:
        raise KernelArgumentError(f"{name} is on {tensor.device}, expected {like.device}")


def check_range(name: str, value: int, allowed: tuple[int, ...]) -> None:
    """Raise `KernelArgumentError` unless `value` is one of `allowed`."""
    if value not in allowed:
        raise KernelArgumentError(f"{name} is {value}, expected one of {', '.join(map(str, allowed))}")
