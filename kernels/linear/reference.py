"""Linear in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class PlainWeight:
    """A weight as torch keeps it."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.contiguous()  # [out_features, in_features]
        self.out_features, self.in_features = weight.shape

    def apply(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)
