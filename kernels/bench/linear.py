"""Linear layers of an 8B model in every format, beside the vendor's bfloat16 product."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from kernels.bench.row import Case
from kernels.linear.triton_kernel import linear
from kernels.linear.triton_weights import DeviceWeight, fp8_channels, int4_groups, int8_channels, plain

SHAPES = ((6144, 4096), (4096, 14336), (28672, 4096))  # out_features, in_features
ROWS = (1, 16, 64, 256, 4096)
FORMATS: dict[str, Callable[[torch.Tensor], DeviceWeight]] = {
    "plain": plain,
    "int8": int8_channels,
    "int4 g128": lambda weight: int4_groups(weight, 128),
    "int4 g32": lambda weight: int4_groups(weight, 32),
    "w8a8": lambda weight: int8_channels(weight, "w8a8"),
    "fp8": fp8_channels,
}
_COLD_BYTES = 400 << 20
Call = Callable[[], object]


def cases() -> Iterator[Case]:
    for out_features, in_features in SHAPES:
        for name in FORMATS:
            for rows in ROWS:
                yield _case(name, out_features, in_features, rows)


def _case(name: str, out_features: int, in_features: int, rows: int) -> Case:
    """One call multiplies with as many weights as do not fit the cache; bytes and operations are those of all."""
    probe = FORMATS[name](torch.ones(128, 128, dtype=torch.bfloat16))
    weight_bytes = _bytes(probe) * out_features * in_features / 128**2
    copies = max(1, round(_COLD_BYTES / weight_bytes))
    moved = copies * (weight_bytes + 2 * rows * (in_features + out_features))

    def make() -> tuple[Call, dict[str, Call]]:
        matrix = torch.randn(out_features, in_features, dtype=torch.bfloat16, device="cuda") * in_features**-0.5
        weights = [FORMATS[name](matrix) for _ in range(copies)]
        x = torch.randn(rows, in_features, dtype=torch.bfloat16, device="cuda")
        peers: dict[str, Call] = {}
        if name == "plain":
            matrices = [weight.data for weight in weights]
        else:  # what the same layer takes unquantized; as many as do not fit the cache
            matrices = [matrix.clone() for _ in range(max(1, _COLD_BYTES // matrix.nbytes))]
        # one call of ours is `copies` products
        each = [matrices[i % len(matrices)] for i in range(copies)]
        peers["torch" if name == "plain" else "torch bf16"] = lambda: [F.linear(x, matrix) for matrix in each]
        return lambda: [linear(x, weight) for weight in weights], peers

    shape = f"{name} M={rows} N={out_features} K={in_features} x{copies}"
    return Case("linear", shape, moved, 2.0 * copies * rows * out_features * in_features, make, name == "fp8")


def _bytes(weight: DeviceWeight) -> int:
    """Of data and of what belongs to groups; a scale a row is nothing beside them."""
    parts = [weight.data] + ([weight.scales, weight.zeros] if weight.group else [])
    return sum(part.numel() * part.element_size() for part in parts if part is not None)
