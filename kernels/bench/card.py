"""`python -m kernels.bench card`: the best use of a GPU that is lent for minutes.

Tests first, then what the goals are about, launch shapes, whole models, peers and the rest. Each step writes what it
measures as it goes into FOLDER, so that nothing is lost when the card is taken away; called again with the same folder,
it goes on where it stopped. On another card, or with another torch or Triton, it begins anew and mixes nothing.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from kernels.bench.journal import Journal, unwritable
from kernels.bench.loan import Step, run_steps, statuses
from kernels.bench.machine import machine, told

ROOT = Path(__file__).parents[2]
_GRACE_S = 10.0
_TESTS = ("-m", "pytest", "-q", "--maxfail", "5", "-p", "no:cacheprovider", "-m", "gpu")
GOALS = (
    "*S=131072 q=1*",
    "B=32 S=4096 q=1 bfloat16*",
    "B=256 S=1024 q=1*",
    "B=1 S=4096 q=4096*",
    "*q=1 int8*",
    "*e4m3*",
)


def steps(folder: Path) -> list[Step]:
    """By their worth. Rows of the bench go to rows.jsonl, of models to models.jsonl, tried shapes to tried.jsonl."""
    python, rows = sys.executable, str(folder / "rows.jsonl")
    bench = (python, "-m", "kernels.bench")
    only = tuple(word for pattern in GOALS for word in ("--only", pattern))
    models = (python, "-m", "loadtest.device_model", "--rows", str(folder / "models.jsonl"))
    return [
        Step("tests of attention", (python, *_TESTS, "tests/unit/test_triton_attention.py"), 240),
        Step("attention at the goals' shapes", (*bench, "attention", *only, "--rows", rows), 150),
        Step("launch shapes of attention", (*bench, "tune", "--folder", str(folder)), 240),
        Step("whole models", models, 240, 60),
        Step("a worker and hand-off", (python, *_TESTS, "tests/gpu"), 120, 60),
        Step("attention", (*bench, "attention", "--rows", rows), 150),
        Step("peer of whole models", (*models, "--peer"), 240, 60),
        Step("everything else", (*bench, "--rows", rows), 300),
        Step("other tests", (python, *_TESTS, "tests"), 600, 60),
    ]


def launch(step: Step, limit_s: float, folder: Path) -> int | None:
    """Run a step, its output behind that of earlier runs. None: it was stopped at its limit, with all it started."""
    with (folder / f"{step.name.replace(' ', '-')}.txt").open("ab") as out:
        process = subprocess.Popen(step.command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the whole process group, which may outlive its first process."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(_GRACE_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def table(folder: Path, here: Mapping[str, str]) -> str:
    """What is known so far of this card, as text: steps, then rows."""
    journal = Journal(folder / "card.jsonl", here)
    lines = [told(here), "", *(f"{name:34} {status}" for name, status in statuses(journal).items())]
    for file in ("rows.jsonl", "models.jsonl"):
        lines += ["", *(entry["line"] for entry in Journal(folder / file, here).read() if "line" in entry)]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench card", description=__doc__)
    parser.add_argument("--minutes", type=float, default=25.0, help="that the card is lent for (default 25)")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="made where there is none")
    options = parser.parse_args(argv)
    if not options.minutes > 0:
        parser.error(f"--minutes is {options.minutes:g}, expected above 0")
    if not torch.cuda.is_available():
        print("no GPU here: nothing to measure", file=sys.stderr)
        return 1
    folder = options.out.resolve()
    if why := unwritable(folder / "card.jsonl", folder / "card.txt"):
        print(why, file=sys.stderr)
        return 1
    return measure(folder, options.minutes * 60, machine())


def measure(folder: Path, seconds: float, here: Mapping[str, str]) -> int:
    """Run the steps for some seconds; 0 when all are done.

    Args:
        here: what they run on, see `machine`.
    """

    def launched(step: Step, limit_s: float) -> int | None:
        print(f"{step.name}, at most {limit_s:.0f} s", flush=True)
        ended = launch(step, limit_s, folder)
        (folder / "card.txt").write_text(table(folder, here))
        return ended

    journal = Journal(folder / "card.jsonl", here)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        run_steps(steps(folder), journal, time.monotonic() + seconds - _GRACE_S, time.monotonic, launched)
    finally:
        (folder / "card.txt").write_text(table(folder, here))
        print(table(folder, here), end="")
    known = statuses(journal)
    return 0 if all(known.get(step.name) == "done" for step in steps(folder)) else 1
