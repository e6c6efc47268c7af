"""`python -m kernels.native.trial LIBRARY`: what a library must do before it is kept. Standard library only: fast."""

from __future__ import annotations

import ctypes
import math
import sys
from pathlib import Path
from typing import Any

from kernels.native.abi import FORMAT_INT4, FORMAT_INT8, TO_FLOATS, LinearStruct, RowStruct, SamplingStruct, declare

IN, OUT, ROWS = 70, 40, 3
GROUP, GROUPS = 64, 2
DRAWS = ((0.0, 0, 1.0, 0), (1.0, 0, 1.0, 64), (1.0, 40, 0.5, 8))
"""Temperature, top-k, top-p, and the token that seed 5 draws of 70 equal ones at position 9."""


def main(library: Path) -> int:
    """1 x 1 products in both dtypes and of integers, and draws, on two threads: exit code 1 if one is wrong."""
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
    drawn = _draws(functions, team)
    functions.baton_close(team)
    return 0 if drawn else 1


def _draws(functions: Any, team: Any) -> bool:
    """Whether tokens are the ones that their seed draws."""
    rows, tokens = (RowStruct * len(DRAWS))(), (ctypes.c_int64 * len(DRAWS))()
    for row, (temperature, top_k, top_p, _) in zip(rows, DRAWS, strict=True):
        row.seed, row.position, row.log_min_p = 5, 9, -math.inf
        row.temperature, row.top_k, row.top_p = temperature, top_k, top_p
    logits = (ctypes.c_float * (len(DRAWS) * IN))()
    places = ctypes.addressof(logits), ctypes.addressof(rows), ctypes.addressof(tokens)
    code = functions.baton_sample(team, ctypes.byref(SamplingStruct(*places, len(DRAWS), IN)))
    if not code and list(tokens) == [draw[-1] for draw in DRAWS]:
        return True
    print(f"draws: code {code}, tokens {list(tokens)}", file=sys.stderr)
    return False


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
