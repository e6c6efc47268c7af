"""Linear over a weight packed once into oneDNN's blocked layout, through the operators torch's own compiler uses.

`F.linear` packs the weight anew in every call; for a few rows that costs as much as the product itself.
"""

from __future__ import annotations

from functools import cache
from typing import cast

import torch
from torch import Tensor

_PACK_ROWS = 16
_MAX_SUM = 384
_DTYPES = (torch.float32, torch.bfloat16)


def supports(dtype: torch.dtype) -> bool:
    return dtype in _DTYPES


@cache
def is_available() -> bool:
    """True if this torch build has the packed operators and they run here in every supported dtype."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        for dtype in _DTYPES:
            x = torch.ones(8, 64, dtype=dtype)
            y = OneDnnWeight(torch.ones(32, 64, dtype=dtype)).apply(x)
            if not bool((y == 64).all()):
                return False
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return True


class OneDnnWeight:
    """A packed weight. The plain matrix is not kept.

    In float32 the product is cut along in_features into pieces summed in order: one long running sum loses bits that
    plain torch, which sums in pieces too, keeps.
    """

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        pieces = -(-self.in_features // _MAX_SUM) if weight.dtype == torch.float32 else 1
        width = -(-self.in_features // pieces)
        self._spans = [slice(i, i + width) for i in range(0, self.in_features, width)]
        with torch.inference_mode(False):
            self._packed = [_pack(weight.detach()[:, span]) for span in self._spans]
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    def apply(self, x: Tensor) -> Tensor:
        if len(self._packed) == 1:
            return cast(Tensor, self._linear(x, self._packed[0], None, "none", [], ""))
        pieces = [
            self._linear(x[:, span], packed, None, "none", [], "")
            for span, packed in zip(self._spans, self._packed, strict=True)
        ]
        y = cast(Tensor, pieces[0])
        for piece in pieces[1:]:
            y.add_(piece)
        return y


def _pack(weight: Tensor) -> Tensor:
    return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS))
