"""What `./baton bench peers` measures: cells, who runs in each, and in which order. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from loadtest.closed_loop import Job, even_jobs, make_jobs
from loadtest.peer_weights import MODELS, RANDOM

QUANTS = ("bf16", "int8", "int4")
REQUESTS = {1: 2, 8: 12, 32: 32}
"""Requests at once → requests in all, of a closed loop."""
BATCH_WIDTHS, BATCH_PROMPT, BATCH_OUTPUT = (1, 8), 128, 48
BATON, VLLM, LLAMA, TRANSFORMERS = "baton", "vllm", "llama.cpp", "transformers"
VLLM_BF16 = "vllm-bf16"
"""vLLM in bfloat16 beside integers, in the same rounds: what a format gains over the peer's plain one."""
PEERS = (VLLM, VLLM_BF16, LLAMA, TRANSFORMERS)
RUNS: dict[tuple[str, str], tuple[str, ...]] = {
    ("bf16", "engine"): (BATON, VLLM),
    ("bf16", "batch"): (BATON, VLLM, LLAMA, TRANSFORMERS),
    ("bf16", "http"): (BATON, VLLM, LLAMA),
    ("int8", "engine"): (BATON, VLLM, VLLM_BF16),
    ("int8", "batch"): (BATON, VLLM, LLAMA),
    ("int8", "http"): (BATON, LLAMA),
    ("int4", "batch"): (BATON, LLAMA),
    ("int4", "http"): (BATON, LLAMA),
}
"""Who has it: llama.cpp's engine has no closed loop but its server's; the prompts of vLLM and Baton in int4 would not
be computed alike. Of the default model, llama.cpp and Baton read the same Q4_1 file; nobody else has it in 8 bits."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One thing that all contestants do.

    Attributes:
        way: "engine": a closed loop in the engine's process; "batch": a static batch there; "http": a closed loop
            through a server.
        width: requests at once.
    """

    model: str
    quant: str
    way: str
    width: int

    @property
    def name(self) -> str:
        """As `--cells` patterns match it, `model/quant/way/c8`."""
        return f"{self.model}/{self.quant}/{self.way}/{'B' if self.way == 'batch' else 'c'}{self.width}"

    def contestants(self) -> tuple[str, ...]:
        """Who runs it."""
        return tuple(name for name in RUNS[self.quant, self.way] if name != VLLM_BF16 or self.width > 1)

    def jobs(self, vocab_size: int, seed: int, number: int, requests: int = 0) -> list[Job]:
        """The same for all contestants of a round, and of one size in all rounds; no two rounds share a prompt."""
        salt = f"{self.name} {number}"
        if self.way == "batch":
            return even_jobs(self.width, BATCH_PROMPT, BATCH_OUTPUT, vocab_size, f"{seed} {salt}")
        return make_jobs(requests or REQUESTS.get(self.width, 2 * self.width), vocab_size, seed, salt)


def all_cells() -> list[Cell]:
    """The whole table, cells of the same weights together."""
    return [
        Cell(model, quant, way, width)
        for model in MODELS
        for quant in QUANTS
        for way in ("engine", "batch", "http")
        for width in (BATCH_WIDTHS if way == "batch" else REQUESTS)
        if (quant, way) in RUNS and (model == RANDOM or quant != "int8")
    ]


def chosen(patterns: Sequence[str]) -> list[Cell]:
    """Cells whose names match a pattern. Raises ValueError for a pattern that matches none."""
    cells = all_cells()
    for pattern in patterns:
        if not any(fnmatchcase(cell.name, pattern) for cell in cells):
            raise ValueError(f"--cells {pattern}: no such cell; {cells[0].name} is one, and '*/int8/*' a pattern")
    return [cell for cell in cells if not patterns or any(fnmatchcase(cell.name, one) for one in patterns)]


def groups(cells: Iterable[Cell]) -> dict[tuple[str, str], list[Cell]]:
    """Cells of the same weights: (model, quant) → cells. A group's contestants are loaded together."""
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.model, cell.quant), []).append(cell)
    return found
