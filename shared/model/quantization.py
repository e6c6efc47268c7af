"""How a linear layer keeps and multiplies its weight: the seam where quantization enters.

A linear layer owns a `QuantMethod`. Only `Unquantized` exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.linear import LinearWeight, linear, pack
from shared.contracts.errors import SettingsError


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """This worker's rank among `size` workers that share the model."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if self.size != 1 or self.rank != 0:
            raise SettingsError(f"tensor parallel size {self.size} is not supported, only 1", param="tp_size")

    def local(self, count: int) -> int:
        """This rank's share of `count` heads or columns."""
        return count // self.size


class QuantMethod(Protocol):
    """A weight format of linear layers."""

    def load(self, parts: Sequence[Tensor], tp: TensorParallel) -> Tensor:
        """Join a checkpoint's matrices, each [out_i, in_features], and take this rank's share: [out, in_features]."""
        ...

    def load_bias(self, parts: Sequence[Tensor], tp: TensorParallel) -> Tensor:
        """Join a checkpoint's biases, each [out_i], and take this rank's share: [out]."""
        ...

    def pack(self, weight: Tensor) -> Any:
        """Bring a loaded weight into the form `apply` wants; the caller drops the plain one."""
        ...

    def apply(self, x: Tensor, packed: Any) -> Tensor:
        """[M, in_features] → [M, out]."""
        ...


class Unquantized:
    """Weights in the compute dtype."""

    def __init__(self, dtype: torch.dtype, implementation: str) -> None:
        self.dtype = dtype
        self._implementation = implementation

    def load(self, parts: Sequence[Tensor], tp: TensorParallel) -> Tensor:
        return torch.cat([part.to(self.dtype) for part in parts]) if len(parts) > 1 else parts[0].to(self.dtype)

    def load_bias(self, parts: Sequence[Tensor], tp: TensorParallel) -> Tensor:
        return torch.cat([part.to(self.dtype) for part in parts])

    def pack(self, weight: Tensor) -> LinearWeight:
        return pack(weight, self._implementation)

    def apply(self, x: Tensor, packed: LinearWeight) -> Tensor:
        return linear(x, packed)


class Linear:
    """A linear layer: the matrices of `parts` joined, and their biases where there are any."""

    def __init__(
        self, method: QuantMethod, parts: Sequence[Tensor], tp: TensorParallel, biases: Sequence[Tensor] = ()
    ) -> None:
        self._method = method
        self._packed = method.pack(method.load(parts, tp))
        self._bias = method.load_bias(biases, tp) if biases else None

    def __call__(self, x: Tensor) -> Tensor:
        y = self._method.apply(x, self._packed)
        # after the product: fused into it, a bias may be rounded otherwise for other row counts
        return y if self._bias is None else y.add_(self._bias)
