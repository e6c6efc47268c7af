"""Weights as small integers: what the native kernels' integer formats hold, and the plain arithmetic they do with it.

    int8  value = scale[output] * integer, -127 to 127
    int4  value = scale[output, group] * integer + minimum[output, group], 0 to 15, groups of 32, 64 or 128 inputs;
          scale and minimum are float16: a Q4_1 block of GGUF is a group of 32. Or value = scale * (integer + minimum),
          with a whole minimum, which is exact where checkpoints keep zeros: GPTQ's and AWQ's

Rows that are multiplied with them become 8-bit integers too, a scale for each group of inputs. On a GPU they stay
floats, but for the formats that only GPUs have, whose rows become 8-bit values with one scale each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

RULE = 1
"""Raised when the same weights become other integers: part of the `numerics` id."""
INT8_GROUP = 64
"""Inputs of a row that share a scale where weights are int8. One for the whole row costs a small model five times the
divergence, see docs/results/quality.txt."""
SMALLEST = 1e-30
"""What the largest magnitude of a group of a row is at least taken for."""


@dataclass(frozen=True, slots=True)
class Quant:
    """A setting: how weights are kept. `bits` 0 keeps the elements of the model's dtype."""

    name: str
    bits: int = 0
    group: int = 0  # inputs of a row that share a scale; with 4 bits, of a weight too
    in_steps: bool = False  # of 4 bits: minima count in scales
    as_kept: bool = False  # matrices stay as their checkpoint keeps them, floats too: see `kept_as`
    on_gpu: Literal["", "w8a8", "fp8"] = ""  # of `triton_weights.Kind`, where only GPUs multiply so

    @property
    def head(self) -> Quant:
        """How the output head is kept, whose errors go into every logit unmixed: never with less than 8 bits."""
        return INT8 if self.bits and not self.as_kept else NONE


NONE, INT8 = Quant("none"), Quant("int8", 8, INT8_GROUP)
QUANTS = {
    quant.name: quant
    for quant in (NONE, INT8, Quant("int4", 4, 32), Quant("int4-g64", 4, 64), Quant("int4-g128", 4, 128))
}
GPU_QUANTS = QUANTS | {name: Quant(name, 8, on_gpu=name) for name in ("w8a8", "fp8")}
"""Those, and what only GPUs multiply: 8-bit weights with 8-bit rows, integers or e4m3, a scale an output and a row."""


class Unquantizable(ValueError):
    """A weight has no integers: the message says why."""


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """[out, in] int8 and [out] float32."""

    integers: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.integers.shape

    def __getitem__(self, rows: slice) -> Int8Weight:
        return Int8Weight(self.integers[rows], self.scales[rows])

    def floats(self) -> Tensor:
        """[out, in] float32."""
        return self.integers.float() * self.scales[:, None]


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """[out, in] uint8 of 0 to 15, and [out, groups] float16 each.

    Attributes:
        in_steps: a value is scale * (integer + minimum), not scale * integer + minimum.
        order: [in] int64: column i is of input order[i]; None: of input i.
    """

    integers: Tensor
    scales: Tensor
    minima: Tensor
    group: int
    in_steps: bool = False
    order: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.integers.shape

    def __getitem__(self, rows: slice) -> Int4Weight:
        return replace(self, integers=self.integers[rows], scales=self.scales[rows], minima=self.minima[rows])

    def floats(self) -> Tensor:
        """[out, in] float32, inputs in their own order."""
        scales, minima = (spread(part.float(), self.group, self.shape[1]) for part in (self.scales, self.minima))
        integers = self.integers.float()
        values = (integers + minima) * scales if self.in_steps else integers * scales + minima
        if self.order is None:
            return values
        ordered = torch.empty_like(values)
        ordered[:, self.order] = values
        return ordered


Matrix = Tensor | Int4Weight | Int8Weight
"""[out, in], as a checkpoint keeps it."""


def floats_of(matrix: Matrix) -> Tensor:
    return matrix if isinstance(matrix, Tensor) else matrix.floats()


def kept_as(parts: Sequence[Matrix]) -> Quant:
    """How matrices of the same inputs are kept that stay as they are.

    Raises:
        Unquantizable: they differ in that, so that no one product computes them.
    """
    first = parts[0]
    quant, order = _quant_of(first), order_of(first)
    for part in parts[1:]:
        if (other := _quant_of(part)) != quant:
            raise Unquantizable(f"some is kept as {quant.name} and some as {other.name}, which are multiplied together")
        its = order_of(part)
        if (its is None) != (order is None) or (its is not None and order is not None and not torch.equal(its, order)):
            raise Unquantizable("what is multiplied together differs in the order of its inputs")
    return quant


def order_of(matrix: Matrix) -> Tensor | None:
    """See `Int4Weight`."""
    return matrix.order if isinstance(matrix, Int4Weight) else None


def _quant_of(matrix: Matrix) -> Quant:
    if isinstance(matrix, Tensor):
        return NONE
    if isinstance(matrix, Int8Weight):
        return INT8
    return Quant(f"int4-g{matrix.group}", 4, matrix.group, in_steps=matrix.in_steps)


def to_int8(weight: Tensor) -> Int8Weight:
    """[out, in] of any float dtype. Raises Unquantizable for NaN and infinities."""
    values = finite(weight)
    scales = values.abs().amax(1) / 127
    integers = (values / _divisor(scales)[:, None]).round_().to(torch.int8)
    return Int8Weight(integers, scales)


def to_int4(weight: Tensor, group: int) -> Int4Weight:
    """[out, in] of any float dtype; a group spans from its least to its largest value.

    Raises:
        Unquantizable: NaN, infinities, or values outside float16.
    """
    values = finite(weight)
    out_features, in_features = values.shape
    groups = -(-in_features // group)
    # what pads the last group must not widen its span
    padded = F.pad(values, (0, groups * group - in_features), mode="constant", value=0.0)
    if groups * group > in_features:
        padded[:, in_features:] = values[:, -1:]
    padded = padded.view(out_features, groups, group)
    minima = padded.amin(2).half()
    scales = ((padded.amax(2) - minima.float()) / 15).clamp_min_(0).half()
    if not bool((minima.isfinite() & scales.isfinite()).all()):
        raise Unquantizable("a weight is too large for int4, whose scales are float16")
    integers = (padded - minima.float()[:, :, None]) / _divisor(scales.float())[:, :, None]
    integers = integers.round_().clamp_(0, 15).to(torch.uint8).view(out_features, -1)[:, :in_features]
    return Int4Weight(integers.contiguous(), scales, minima, group)


def quantized_rows(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Rows as the kernels quantize them, bit for bit: [M, in] → [M, groups, group] int32 and [M, groups] float32."""
    padded = F.pad(x.float(), (0, -x.shape[1] % group)).view(len(x), -1, group)
    largest = padded.abs().amax(2).clamp_min_(SMALLEST)
    # not 127 / largest, which torch computes by a rounded reciprocal
    inverse = torch.full_like(largest, 127.0).div_(largest)
    return (padded * inverse[:, :, None]).round().to(torch.int32), largest / 127.0


def quantized_linear(x: Tensor, weight: Int8Weight | Int4Weight) -> Tensor:
    """[M, in] finite rows → [M, out] float64: the product of what was quantized, without rounding."""
    group = weight.group if isinstance(weight, Int4Weight) else INT8_GROUP
    integers, scales = quantized_rows(x, group)
    values = (integers.double() * scales.double()[:, :, None]).view(len(x), -1)[:, : x.shape[1]]
    return values @ weight.floats().double().T


def spread(values: Tensor, group: int, in_features: int) -> Tensor:
    """[out, groups] → [out, in]: each value for every input of its group."""
    return values.repeat_interleave(group, dim=1)[:, :in_features]


def finite(weight: Tensor) -> Tensor:
    """The same in float32. Raises Unquantizable for NaN and infinities."""
    values = weight.float()
    if not bool(values.isfinite().all()):
        raise Unquantizable("a weight is not finite")
    return values


def _divisor(scales: Tensor) -> Tensor:
    return torch.where(scales > 0, scales, 1.0)
