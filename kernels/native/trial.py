"""`python -m kernels.native.trial LIBRARY`: what a library must do before it is kept. Standard library only: fast."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

from kernels.native.abi import FORMAT_INT4, FORMAT_INT8, TO_FLOATS, LinearStruct, declare

IN, OUT, ROWS = 70, 40, 3
GROUP, GROUPS = 64, 2


def main(library: Path) -> int:
    """1 x 1 products in both dtypes and of integers, on two threads: exit code 1 if a sum is wrong."""
    functions = declare(ctypes.CDLL(str(library)))
    team = functions.baton_open(2)
    if not team:
        return 1
    kinds: tuple[tuple[str, Any, Any, int], ...] = (
        ("bfloat16", 0x3F80, ctypes.c_uint16, 2),
        ("float32", 1.0, ctypes.c_float, 1),
    )
    for name, one, kind, pack in kinds:
        x = (kind * (ROWS * IN))(*[one] * (ROWS * IN))
        plain = (kind * (OUT * IN))(*[one] * (OUT * IN))
        packed = (kind * (64 * (IN + IN % pack)))()
        code = getattr(functions, f"baton_pack_{name}")(team, plain, packed, OUT, IN, 0, OUT, OUT)
        weight = LinearStruct(ctypes.addressof(packed), None, IN, OUT)
        if code or not _multiplies(functions, team, name, weight, x):
            return 1
        for form, byte, scales in (
            (FORMAT_INT8, 129, (ctypes.c_float * 64)(*[1.0] * 64)),  # 129 is 1
            (FORMAT_INT4, 2, (ctypes.c_uint16 * (4 * 32 * GROUPS))(*([0x3800] * 32 + [0] * 32) * 2 * GROUPS)),  # halves
        ):
            integers = (ctypes.c_uint8 * (OUT * IN))(*[byte] * (OUT * IN))
            room = (ctypes.c_uint8 * (64 * GROUPS * GROUP))()
            places = OUT, IN, 0, OUT, OUT, form, GROUP
            code = getattr(functions, f"baton_pack_integers_{name}")(team, integers, room, *places)
            weight = LinearStruct(ctypes.addressof(room), None, IN, OUT, ctypes.addressof(scales), form, GROUP)
            if code or not _multiplies(functions, team, name, weight, x, lost=1e-3):
                return 1
    functions.baton_close(team)
    return 0


def _multiplies(functions: Any, team: Any, name: str, weight: LinearStruct, x: Any, lost: float = 0) -> bool:
    """Whether rows of ones by a weight of ones are as many as there are inputs."""
    y = (ctypes.c_float * (ROWS * OUT))()
    code = getattr(functions, f"baton_linear_{name}")(team, ctypes.byref(weight), x, y, ROWS, IN, OUT, TO_FLOATS)
    if not code and all(abs(value - IN) <= lost for value in y):
        return True
    what = f"{name}, format {weight.format}"
    print(f"{what}: code {code}, sums {y[0]} to {max(y)} instead of {IN}", file=sys.stderr)
    return False


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
