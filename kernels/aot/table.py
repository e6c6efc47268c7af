"""The committed table: per row and chip the content's id, what the compiled kernels take and what they do in turn."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from kernels.chip import SHARED_BYTES

FILE = Path(__file__).with_name("table.json")


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel of one variant for one chip."""

    variant: str
    kernel: str
    chip: str  # "sm_90"
    id: str
    registers: int
    spilled: int  # bytes per thread
    shared: int  # bytes per block
    loop: int = 0  # instructions of one turn of the loop with matrix products; 0: none is known
    in_turn: int = 0  # products of it that are waited for one by one

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.variant, self.kernel, self.chip, self.id


def load(file: Path = FILE) -> list[Row]:
    """The rows of a table; none where there is no file."""
    return [Row(**row) for row in json.loads(file.read_text())] if file.exists() else []


def save(rows: Iterable[Row], file: Path = FILE) -> None:
    """One row a line, sorted."""
    lines = [json.dumps(asdict(row)) for row in sorted(rows, key=lambda row: row.key)]
    file.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def faults(row: Row, may_spill: bool) -> Iterator[str]:
    """What is wrong with a compiled kernel."""
    name = f"{row.variant}: {row.kernel} for {row.chip}"
    if row.spilled and not may_spill:
        yield f"{name} spills {row.spilled} bytes a thread"
    limit = SHARED_BYTES[(int(row.chip[3:-1]), int(row.chip[-1]))]
    if row.shared > limit:
        yield f"{name} wants {row.shared} bytes of shared memory, the chip has {limit}"
    if row.in_turn:
        yield f"{name} waits for {row.in_turn} products one by one: something touches their sums while they run"
