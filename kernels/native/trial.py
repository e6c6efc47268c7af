"""`python -m kernels.native.trial LIBRARY`: what a library must do before it is kept. Standard library only: fast."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

from kernels.native.abi import LinearStruct, declare

IN, OUT, ROWS, TO_FLOATS = 70, 40, 3, 3


def main(library: Path) -> int:
    """1 x 1 products in both dtypes, on two threads: exit code 1 if a sum is wrong."""
    functions = declare(ctypes.CDLL(str(library)))
    team = functions.baton_open(2)
    if not team:
        return 1
    kinds: tuple[tuple[str, Any, Any, int], ...] = (
        ("bfloat16", 0x3F80, ctypes.c_uint16, 2),
        ("float32", 1.0, ctypes.c_float, 1),
    )
    for name, one, kind, pack in kinds:
        plain = (kind * (OUT * IN))(*[one] * (OUT * IN))
        packed = (kind * (64 * (IN + IN % pack)))()
        code = getattr(functions, f"baton_pack_{name}")(team, plain, packed, OUT, IN, 0, OUT, OUT)
        linear = LinearStruct(ctypes.addressof(packed), None, IN, OUT)
        x, y = (kind * (ROWS * IN))(*[one] * (ROWS * IN)), (ctypes.c_float * (ROWS * OUT))()
        multiply = getattr(functions, f"baton_linear_{name}")
        code = code or multiply(team, ctypes.byref(linear), x, y, ROWS, IN, OUT, TO_FLOATS)
        if code or any(value != IN for value in y):
            print(f"{name}: code {code}, sums {y[0]} to {max(y)} instead of {IN}", file=sys.stderr)
            return 1
    functions.baton_close(team)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
