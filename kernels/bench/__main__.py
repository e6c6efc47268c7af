"""`python -m kernels.bench`: every operation at real sizes, as a share of what this card does in the same run."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from kernels.bench.journal import Journal, unwritable
from kernels.bench.limits import Limits, measure
from kernels.bench.machine import machine, told
from kernels.bench.row import Case, Measured
from kernels.bench.timing import seconds
from kernels.chip import FP8_CAPABILITY, capability

SUITES = ("attention", "blocks", "linear", "steps")
COMMANDS = ("card", "tune")


def run(case: Case, limits: Limits) -> Measured:
    """Time a case and its peers. A peer that does not run is noted, not an error."""
    call, others = case.make()
    took = seconds(call)
    peers, failed = {}, {}
    for name, peer in others.items():
        try:
            peers[name] = seconds(peer)
        except Exception as exc:  # whatever a peer throws, its row says so
            failed[name] = f"{type(exc).__name__}: {str(exc)[:200]}"
            torch.cuda.synchronize()
    times = {"copy": case.bytes / limits.bytes_per_s, "matmul": case.flops / limits.flops}
    bound = max(times, key=lambda name: times[name])
    return Measured(case.operation, case.shape, took, case.bytes, case.flops, times[bound] / took, bound, peers, failed)


def cases(suites: list[str]) -> Iterator[Case]:
    for name in suites:
        yield from importlib.import_module(f"kernels.bench.{name}").cases()


def missing(case: Case) -> str:
    """What this card has not that a case needs; "" = nothing."""
    return "float8" if case.float8 and capability(torch.device("cuda")) < FP8_CAPABILITY else ""


def wanted(case: Case, only: list[str] | None) -> bool:
    """Whether a case's shape matches one of the patterns; all do where there is none."""
    return not only or any(fnmatchcase(case.shape, pattern) for pattern in only)


def line(row: Measured) -> str:
    peers = " ".join(f"{name} {other / row.seconds:.2f}x" for name, other in row.peers.items())
    return (
        f"{row.operation:20} {row.shape:38} {row.seconds * 1e6:9.1f} us {row.share:6.1%} of {row.bound:6} {peers} "
        f"{' '.join(f'({name}: {why[:60]})' for name, why in row.failed.items())}"
    ).rstrip()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.bench", description=f"{__doc__} Or: {' | '.join(COMMANDS)}."
    )
    parser.add_argument("suites", nargs="*", metavar="OPERATION", help=f"of {', '.join(SUITES)}; default: all")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="cases whose shape matches a shell pattern")
    parser.add_argument("--json", type=Path, metavar="FILE", help="raw results")
    parser.add_argument(
        "--rows", type=Path, metavar="FILE", help="each as a line as it comes; what it holds of this card is left out"
    )
    if argv and argv[0] in COMMANDS:
        return int(importlib.import_module(f"kernels.bench.{argv[0]}").main(argv[1:]))
    options = parser.parse_args(argv)
    unknown = set(options.suites) - set(SUITES)
    if unknown:
        parser.error(f"no operation named {', '.join(sorted(unknown))}; there are {', '.join(SUITES)}")
    if not torch.cuda.is_available():
        print("no GPU here: nothing to measure", file=sys.stderr)
        return 1
    if why := unwritable(options.rows, options.json):
        print(why, file=sys.stderr)
        return 1
    torch.manual_seed(0)
    limits = measure()
    here = machine()
    print(f"{told(here)}: copy {limits.bytes_per_s / 1e12:.2f} TB/s, matmul {limits.flops / 1e12:.0f} TFLOP/s")
    rows = []
    journal = Journal(options.rows, here) if options.rows else None
    known = {(entry.get("operation"), entry.get("shape")) for entry in (journal.read() if journal else [])}
    for case in cases(options.suites or list(SUITES)):
        if (case.operation, case.shape) in known or not wanted(case, options.only):
            continue
        if lacks := missing(case):
            print(f"{case.operation:20} {case.shape:38} skipped: this card has no {lacks}", flush=True)
            continue
        rows.append(run(case, limits))
        torch.cuda.empty_cache()
        print(line(rows[-1]), flush=True)
        if journal:
            journal.append(**asdict(rows[-1]), line=line(rows[-1]), limits=asdict(limits))
    if options.json:
        found = {**here, "limits": asdict(limits), "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
