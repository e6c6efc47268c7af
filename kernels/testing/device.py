"""Where the tests of Triton kernels run: on a GPU where there is one, in Triton's interpreter on the CPU otherwise.

Triton reads the choice when a kernel is decorated, its own library's kernels included, so it is made here, before
`triton` is first imported, and holds for the whole process.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

INTERPRETED = not torch.cuda.is_available()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def _interpret() -> None:
    """Switch this process, and not its children, to the interpreter.

    Raises:
        RuntimeError: Triton was imported before, for a GPU that is not there.
    """
    before = os.environ.get("TRITON_INTERPRET")
    if "triton" in sys.modules and not sys.modules["triton"].knobs.runtime.interpret:
        raise RuntimeError("triton was imported before kernels.testing could choose its interpreter")
    os.environ["TRITON_INTERPRET"] = "1"
    import triton
    from triton.runtime.interpreter import GridExecutor

    triton.knobs.runtime.interpret = True
    if before is None:
        del os.environ["TRITON_INTERPRET"]
    restore = GridExecutor._restore_args_dev

    def restore_copies(self: Any, args_dev: Any, args_hst: Any, kwargs: Any, kwargs_hst: Any) -> None:
        # It would copy every storage onto itself, and so touch each page of a lazily mapped pool.
        if any(isinstance(arg, torch.Tensor) and arg.is_cuda for arg in (*args_dev, *kwargs.values())):
            restore(self, args_dev, args_hst, kwargs, kwargs_hst)

    GridExecutor._restore_args_dev = restore_copies


if INTERPRETED:
    _interpret()
