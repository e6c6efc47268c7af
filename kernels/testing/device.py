"""Where the tests of Triton kernels run: on a GPU where there is one, in Triton's interpreter on the CPU otherwise.

Triton reads the choice when a kernel is decorated, its own library's kernels included, so it is made here, before
`triton` is first imported, and holds for the whole process.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
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
    _mend(GridExecutor)


def _mend(executor: Any) -> None:
    """Three things the interpreter does in a way of its own, as a GPU does them."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    restore, cast, dot = executor._restore_args_dev, InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def restore_args(self: Any, args_dev: Any, args_hst: Any, kwargs: Any, kwargs_hst: Any) -> None:
        # It would copy every storage onto itself, and so touch each page of a lazily mapped pool.
        if any(isinstance(arg, torch.Tensor) and arg.is_cuda for arg in (*args_dev, *kwargs.values())):
            restore(self, args_dev, args_hst, kwargs, kwargs_hst)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        # It rounds to bfloat16 by truncation.
        source, wanted = src.dtype.scalar, dst_type.scalar
        if (source, wanted) == (tl.float32, tl.bfloat16):
            return TensorHandle(_to_bfloat16(src.data), wanted)
        if (source, wanted) == (tl.bfloat16, tl.float32):
            return TensorHandle(_from_bfloat16(src.data), wanted)
        return cast(self, src, dst_type)

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        # It multiplies bfloat16 by its bits, as integers.
        a, b = (
            TensorHandle(_from_bfloat16(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)
        )
        return dot(self, a, b, d, input_precision, max_num_imprecise_acc)

    executor._restore_args_dev = restore_args
    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_dot = create_dot


def _from_bfloat16(bits: Any) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16(values: Any) -> Any:
    """To nearest, ties to even; a NaN stays one."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (np.where(np.isnan(values), bits | 0x400000, rounded) >> 16).astype(np.uint16)


if INTERPRETED:
    _interpret()
