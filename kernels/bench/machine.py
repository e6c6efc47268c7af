"""What a time was measured on: two times are compared only where all of it is the same."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton

from kernels.chip import capability


def machine() -> dict[str, str]:
    """The card at hand, its chip, and what compiles and launches for it; words, as fields of a line of a journal."""
    major, minor = capability(torch.device("cuda", torch.cuda.current_device()))
    return {
        "card": torch.cuda.get_device_name(),
        "chip": f"sm_{major}{minor}",
        "torch": str(torch.__version__),
        "triton": triton.__version__,
    }


def told(of: Mapping[str, str]) -> str:
    """In a line for people."""
    return f"{of['card']}, {of['chip']}, torch {of['torch']}, triton {of['triton']}"
