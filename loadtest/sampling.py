"""`python -m loadtest.sampling`: processor time to draw a token from a row of logits, by the C kernels and by numpy.

Rows are normally distributed logits, whose spread is about that of a small model's. Both draw from the same rows in
turn, on one thread; they must draw the same tokens, or nothing is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from kernels.native.compiler import NativeUnavailable
from kernels.native.library import Team, open_library
from kernels.native.sampling import NativeSampler
from kernels.sampling import ReferenceSampler, RowSampling, Sampler
from loadtest.machine import this_machine
from shared.model.fetch import cache_dir

VOCABULARIES = (49_152, 151_936)
SPREAD = 4.0
ROWS = 16


@dataclass(frozen=True, slots=True)
class Cell:
    """A way to sample."""

    name: str
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def rows(self, count: int) -> list[RowSampling]:
        return [RowSampling(self.temperature, self.top_k, self.top_p, 1, i, self.min_p) for i in range(count)]


CELLS = (
    Cell("greedy", temperature=0.0),
    Cell("temperature 1"),
    Cell("temperature 0.7", temperature=0.7),
    Cell("top-k 50", top_k=50),
    Cell("top-k 50, top-p 0.9", top_k=50, top_p=0.9),
    Cell("top-p 0.9", top_p=0.9),
    Cell("top-p 0.99", top_p=0.99),
    Cell("min-p 0.05", min_p=0.05),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """Processor seconds a row."""

    cell: str
    vocab: int
    native_s: float
    numpy_s: float


def measure(cell: Cell, logits: Tensor, samplers: Sequence[Sampler], rounds: int) -> list[float]:
    """Per sampler the median processor seconds of this thread for a row.

    Raises:
        ValueError: they draw different tokens.
    """
    rows = cell.rows(len(logits))
    drawn = [sampler.sample(logits, rows) for sampler in samplers]
    if any(tokens != drawn[0] for tokens in drawn):
        raise ValueError(f"{cell.name}: the samplers draw different tokens")
    taken: list[list[float]] = [[] for _ in samplers]
    for _ in range(rounds):
        for sampler, seconds in zip(samplers, taken, strict=True):
            before = time.thread_time()
            sampler.sample(logits, rows)
            seconds.append((time.thread_time() - before) / len(rows))
    return [median(seconds) for seconds in taken]


def text_of(body: dict[str, Any]) -> str:
    machine = body["machine"]
    lines = [
        f"{machine['cpu']}, {machine['date']}, level {body['level']}: microseconds of processor time a row",
        "",
        f"{'tokens':>8}  {'cell':22} {'native':>8} {'numpy':>8} {'ratio':>7}",
    ]
    for figure in body["figures"]:
        native, numpy = figure["native_s"] * 1e6, figure["numpy_s"] * 1e6
        lines.append(f"{figure['vocab']:8}  {figure['cell']:22} {native:8.1f} {numpy:8.1f} {numpy / native:6.1f}x")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.sampling", description=__doc__)
    parser.add_argument("--rounds", type=int, default=25, metavar="N", help="samples of each (default 25)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="raw results")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    try:
        library = open_library(cache_dir(os.environ) / "kernels")
    except NativeUnavailable as exc:
        print(exc, file=sys.stderr)
        return 1
    samplers = (NativeSampler(Team(library, 1)), ReferenceSampler())
    figures = []
    for vocab in VOCABULARIES:
        logits = torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(0)) * SPREAD
        for cell in CELLS:
            figures.append(Figure(cell.name, vocab, *measure(cell, logits, samplers, options.rounds)))
    body = {"machine": this_machine().body(), "level": library.level, "figures": [asdict(one) for one in figures]}
    print(text_of(body))
    if options.json:
        options.json.write_text(json.dumps(body, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
