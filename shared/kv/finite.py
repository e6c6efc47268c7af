"""Whether what a span holds are numbers. KV that is not finite spreads to whatever attends to it."""

from __future__ import annotations

import numpy as np

from shared.kv.layout import FP8, INT8, SCALED, LayerGroup

_EXPONENTS = {
    "float64": (np.uint64, 0x7FF0_0000_0000_0000),
    "float32": (np.uint32, 0x7F80_0000),
    "bfloat16": (np.uint16, 0x7F80),
    "float16": (np.uint16, 0x7C00),
    FP8: (np.uint8, 0x7F),  # it has no infinity, and one NaN of either sign
}
"""Per dtype its bits as an integer, and those that are all set in what is no number."""


def span_is_finite(span: memoryview, group: LayerGroup) -> bool:
    """False if an element, or a scale, of one block's bytes is a NaN or an infinity. One pass over its bits."""
    tiles, scales = span[: group.tiles_bytes], span[group.tiles_bytes :]
    if group.dtype in SCALED and not _are_finite(scales, "float32"):
        return False
    return group.dtype == INT8 or _are_finite(tiles, group.dtype)


def _are_finite(data: memoryview, dtype: str) -> bool:
    kind, mask = _EXPONENTS[dtype]
    bits = np.frombuffer(data, dtype=kind)
    return not bool(((bits & kind(mask)) == kind(mask)).any())
