"""y = x W^T with rows that do not depend on one another, nor on how many there are.

BLAS libraries pick other code for a few rows than for many, and the sum of a row then changes in its last bits. Rows
are therefore padded to a multiple of `ROW_TILE`; the tests and the start-up check hold that this is enough.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kernels.linear import onednn, reference

ROW_TILE = 8
"""Rows are padded to a multiple of this."""
_COARSE_ABOVE = 64
_COARSE_TILE = 32


class LinearWeight(Protocol):
    """A weight matrix in the form its implementation wants."""

    in_features: int
    out_features: int

    def apply(self, x: Tensor) -> Tensor:
        """[M, in_features] → [M, out_features] for M a multiple of `ROW_TILE`."""
        ...


def padded_rows(num_rows: int) -> int:
    """The row count a batch is padded to. Coarser above 64 rows, so that few distinct shapes are compiled."""
    tile = ROW_TILE if num_rows <= _COARSE_ABOVE else _COARSE_TILE
    return -(-num_rows // tile) * tile


def pack(weight: Tensor, implementation: str) -> LinearWeight:
    """Bring `weight`, [out_features, in_features], into an implementation's form. `implementation` is from dispatch."""
    assert weight.ndim == 2
    if implementation == "onednn" and onednn.supports(weight.dtype):
        return onednn.OneDnnWeight(weight)
    return reference.PlainWeight(weight)


def linear(x: Tensor, weight: LinearWeight) -> Tensor:
    """x W^T.

    Args:
        x: [M, in_features], any M >= 1, the dtype of the weight.
        weight: made by `pack`.

    Returns:
        [M, out_features], same dtype. Row i depends on row i of x alone, bit for bit.
    """
    num_rows, in_features = x.shape
    assert in_features == weight.in_features, (x.shape, weight.in_features)
    if num_rows % ROW_TILE == 0:
        return weight.apply(x)
    padded = x.new_zeros(padded_rows(num_rows), in_features)
    padded[:num_rows] = x
    return weight.apply(padded)[:num_rows]
