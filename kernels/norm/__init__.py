"""Root-mean-square normalization (Zhang and Sennrich 2019, arXiv 1910.07467)."""

from __future__ import annotations

from torch import Tensor

from kernels.norm import reference


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, per row, computed in at least float32.

    Args:
        x: [num_tokens, hidden], contiguous.
        weight: [hidden], same dtype.
        eps: added to the mean square.

    Returns:
        [num_tokens, hidden], a new tensor.
    """
    _check(x, weight)
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `x` to `residual` in place, then normalize the sum.

    Args:
        x, residual: [num_tokens, hidden], contiguous; `residual` is changed.
        weight: [hidden], same dtype.

    Returns:
        [num_tokens, hidden], a new tensor; the sum stays in `residual`.
    """
    assert x.shape == residual.shape, (x.shape, residual.shape)
    assert x.dtype == residual.dtype, (x.dtype, residual.dtype)
    _check(residual, weight)
    return reference.rms_norm(residual.add_(x), weight, eps)


def _check(x: Tensor, weight: Tensor) -> None:
    assert x.ndim == 2
    assert x.is_contiguous()
    assert weight.shape == x.shape[1:], (x.shape, weight.shape)
    assert weight.dtype == x.dtype, (weight.dtype, x.dtype)
