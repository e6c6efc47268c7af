"""What the machine code of a compiled kernel says of its loop with matrix products: one turn of it, by kind.

Knows the disassembler's text; knows no kernel. Counts are of instructions a warp issues, not of their time.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
_PRODUCT = re.compile(r"(H|I|Q|D)?G?MMA\b")
KINDS = {
    "product": r"[HIQD]G?MMA",
    "convert": r"F2F|I2F|F2I|F2FP|I2FP|PRMT|HADD2",
    "shared": r"LDS|STS|LDSM|STSM",
    "global": r"LDG|STG|LDGSTS",
    "wait": r"BAR|DEPBAR|WARPGROUP|MEMBAR|FENCE|WARPSYNC|SYNCS",
    "special": r"MUFU",
    "float": r"F(MUL|FMA|ADD|MNMX|SETP|SEL)|HFMA2|HMUL2",
    "shuffle": r"SHFL",
}
"""Instructions by the first part of their name; the rest is integers, addresses, predicates and branches."""


@dataclass(frozen=True, slots=True)
class Loop:
    """One turn of the shortest loop with matrix products; no instructions: there is none."""

    instructions: int = 0
    in_turn: int = 0  # asynchronous products that are waited for one by one, so that they never overlap
    kinds: tuple[tuple[str, int], ...] = ()


def tool(name: str) -> Path:
    """One of the programs that Triton brings along. Triton itself is not imported."""
    found = importlib.util.find_spec("triton")
    assert found is not None, "kernels were compiled without Triton"
    return Path(str(found.origin)).parent / "backends/nvidia/bin" / name


def product_loop(cubin: bytes) -> Loop:
    """The shortest loop with matrix products. Raises CalledProcessError: this is no compiled kernel."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        told = subprocess.run([tool("nvdisasm"), "-c", file], capture_output=True, text=True, check=True).stdout
    return loop_of(told.splitlines())


def loop_of(lines: Sequence[str]) -> Loop:
    """The same of the disassembler's lines."""
    labels: dict[str, int] = {}
    code: list[tuple[str, str]] = []
    for line in lines:
        if found := _LABEL.match(line):
            labels[found[1]] = len(code)
        elif found := _INSTRUCTION.match(line):
            code.append((found[1], found[2]))
    for first, last in sorted(_loops(code, labels), key=lambda ends: (ends[1] - ends[0], ends[0])):
        names = [name.split(".")[0] for name, _ in code[first : last + 1]]
        if any(map(_PRODUCT.fullmatch, names)):
            return Loop(len(names), _in_turn([name for name, _ in code[first : last + 1]]), _kinds(names))
    return Loop()


def _loops(code: Sequence[tuple[str, str]], labels: dict[str, int]) -> list[tuple[int, int]]:
    """First and last instruction of what a branch back to its beginning ends."""
    found = []
    for i, (name, operands) in enumerate(code):
        target = re.search(r"\.L_x_\d+", operands) if name.startswith(("BRA", "UBRA")) else None
        if target and labels.get(target[0], i + 1) <= i:
            found.append((labels[target[0]], i))
    return found


def _in_turn(names: Sequence[str]) -> int:
    products = sum(bool(re.match(r"[HIQ]GMMA", name)) for name in names)
    waits = sum(name.startswith("WARPGROUP.DEPBAR") for name in names)
    return products if products > 1 and waits >= products else 0


def _kinds(names: Sequence[str]) -> tuple[tuple[str, int], ...]:
    counts = Counter(_kind(name) for name in names)
    return tuple(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _kind(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.fullmatch(pattern, name)), "other")
