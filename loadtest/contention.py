"""`python -m loadtest.contention`: what workers reach side by side, and beside a foreign busy process.

    one worker       decode and prefill steps by turns in one process, on all cores
    two workers      a process for each; they share the cores as workers of a stack do (`shared/engine/core_share.py`)
    unshared         the same, but each with a thread a core all the time
    spinner          one of them alone, while a process spins on one core

Throughput is told in parts of what each kind of step reaches alone on all cores, so that both kinds can be added up:
one worker by turns reaches about 1 in all. Samples are taken in turn; those with foreign load are dropped and counted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from loadtest.contention_worker import KINDS, Step
from loadtest.machine import IDLE_CORES, ForeignLoad, this_machine
from shared.contracts.errors import BatonError, Unavailable
from shared.model.fetch import cache_dir, fetch_default_model
from shared.model.gguf_folder import model_folder
from shared.settings.load import ROOT

GOAL_TWO, GOAL_SPINNER = 0.9, 0.55
ENOUGH = 5
BOTH = "both"
SPINNER = "import os; os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})\nwhile True: pass"


@dataclass(frozen=True, slots=True)
class Scenario:
    """What runs at the same time."""

    name: str
    works: tuple[str, ...]  # of the workers: decode, prefill, both
    shared: bool = True
    spinner: bool = False


SCENARIOS = (
    Scenario("decode alone", ("decode",)),
    Scenario("prefill alone", ("prefill",)),
    Scenario("one worker", (BOTH,)),
    Scenario("two workers", KINDS),
    Scenario("unshared", KINDS, shared=False),
    Scenario("decode, spinner", ("decode",), spinner=True),
    Scenario("prefill, spinner", ("prefill",), spinner=True),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """Steps a second of each kind, and the cores that others used meanwhile."""

    rates: dict[str, float]
    foreign_cores: float

    @property
    def clean(self) -> bool:
        return self.foreign_cores <= IDLE_CORES


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit code."""
    options = _parser().parse_args(argv)
    try:
        report = run(options)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BatonError as exc:
        print(f"contention: {exc.message}", file=sys.stderr)
        return 1
    print(text_of(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return 0


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Start the workers and sample every scenario in turn. Raises Unavailable when a worker fails."""
    cache = cache_dir(os.environ)
    folder = model_folder(options.model, cache, _say) if options.model else fetch_default_model(cache, _say)
    with ExitStack() as stack:
        where = stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-contention-", dir=_memory_folder()))
        _say(f"loading {folder.name} three times")
        workers = {
            work: stack.enter_context(_Worker.started(work, folder, options.dtype, options.quant, Path(where)))
            for work in (*KINDS, BOTH)
        }
        _say(f"{options.rounds} rounds of {len(SCENARIOS)} scenarios of {options.seconds:g} s")
        samples: dict[str, list[Sample]] = {scenario.name: [] for scenario in SCENARIOS}
        for _ in range(options.rounds):
            for scenario in SCENARIOS:
                samples[scenario.name].append(_sample(scenario, workers, options.seconds))
    return {
        "bench": "contention",
        "model": folder.name,
        "dtype": options.dtype,
        "quant": options.quant,
        "machine": this_machine().body(),
        "figures": figures(samples),
        "samples": {name: [asdict(sample) for sample in found] for name, found in samples.items()},
    }


def rates(steps: Sequence[Sequence[Step]]) -> dict[str, float]:
    """Steps a second of each kind while all workers were at work; a step at the edge counts by its part. Pure.

    Args:
        steps: of each worker, in order.
    """
    first = max(own[0].begin for own in steps)
    last = min(own[-1].end for own in steps)
    found: dict[str, float] = {}
    for step in (step for own in steps for step in own):
        inside = min(step.end, last) - max(step.begin, first)
        if inside > 0:
            found[step.kind] = found.get(step.kind, 0.0) + inside / (step.end - step.begin)
    return {kind: count / (last - first) for kind, count in found.items()}


def figures(samples: Mapping[str, Sequence[Sample]]) -> dict[str, Any]:
    """Medians a scenario, in parts of what each kind reaches alone, and the two that have goals. Pure."""
    chosen = {name: [s for s in found if s.clean] or list(found) for name, found in samples.items()}
    medians = {
        name: {kind: median(s.rates.get(kind, 0.0) for s in found) for kind in KINDS} for name, found in chosen.items()
    }
    alone = {kind: medians[f"{kind} alone"][kind] for kind in KINDS}
    parts = {name: {kind: rate / alone[kind] for kind, rate in rates.items()} for name, rates in medians.items()}
    total = {name: sum(found.values()) for name, found in parts.items()}
    return {
        "steps_s": medians,
        "parts": parts,
        "two_of_one": total["two workers"] / total["one worker"],
        "unshared_of_one": total["unshared"] / total["one worker"],
        "spinner_costs": {kind: 1 - parts[f"{kind}, spinner"][kind] for kind in KINDS},
        "clean": {name: sum(s.clean for s in found) for name, found in samples.items()},
    }


def text_of(report: Mapping[str, Any]) -> str:
    """The table. Pure."""
    machine, found, samples = report["machine"], report["figures"], report["samples"]
    lines = [
        f"{report['model']}, {report['dtype']}, quant {report['quant']}; {machine['cpu']}, {machine['date']}",
        f"{'':20}{'decode':>16}{'prefill':>16}{'in all':>8}",
    ]
    for name, parts in found["parts"].items():
        cells = [f"{found['steps_s'][name][kind]:8.2f}/s {parts[kind]:5.2f}" for kind in KINDS]
        lines.append(f"{name:20}{cells[0]:>16}{cells[1]:>16}{sum(parts.values()):8.2f}")
        raw = "; ".join(" ".join(f"{sample['rates'].get(kind, 0.0):.2f}" for sample in samples[name]) for kind in KINDS)
        busy = "" if found["clean"][name] else ": BUSY MACHINE"
        lines.append(f"  {found['clean'][name]} of {len(samples[name])} samples clean{busy}; raw {raw}")
    lines.append(
        f"two workers reach {found['two_of_one']:.2f} of one (goal {GOAL_TWO}); unshared {found['unshared_of_one']:.2f}"
    )
    costs = ", ".join(f"{kind} {cost:.0%}" for kind, cost in found["spinner_costs"].items())
    lines.append(f"a spinner on one core costs {costs} (goal at most {GOAL_SPINNER:.0%})")
    return "\n".join(lines)


class _Worker:
    """A child of `loadtest.contention_worker`."""

    def __init__(self, child: subprocess.Popen[str], log: Any) -> None:
        self._child, self._log = child, log

    @classmethod
    @contextmanager
    def started(cls, work: str, model: Path, dtype: str, quant: str, folder: Path) -> Iterator[_Worker]:
        command = [sys.executable, "-m", "loadtest.contention_worker", work, str(model), dtype, quant, str(folder)]
        with tempfile.TemporaryFile("w+") as log:
            child = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
            try:
                worker = cls(child, log)
                worker.answer()
                yield worker
            finally:
                child.kill()
                child.wait()

    def order(self, seconds: float, shared: bool) -> None:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps([seconds, shared]) + "\n")
            self._child.stdin.flush()
        except OSError:
            self.answer()

    def answer(self) -> list[Step]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            self._log.seek(0)
            raise Unavailable(f"a worker ended: {self._log.read().strip()[-1500:]}")
        return [Step(*step) for step in json.loads(line)]


def _sample(scenario: Scenario, workers: Mapping[str, _Worker], seconds: float) -> Sample:
    chosen = [workers[work] for work in scenario.works]
    with _spinner() if scenario.spinner else ExitStack():
        others = ForeignLoad()
        for worker in chosen:
            worker.order(seconds, scenario.shared)
        found = [worker.answer() for worker in chosen]
        return Sample(rates(found), others.cores())


@contextmanager
def _spinner() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", SPINNER]) as child:
        try:
            yield
        finally:
            child.kill()


def _memory_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _say(text: str) -> None:
    print(f"contention: {text}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.contention", description="Workers beside one another.")
    parser.add_argument(
        "--model", type=Path, metavar="PATH", help="a model folder or .gguf file (default: the default model)"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default bfloat16")
    parser.add_argument("--quant", default="none", help="default none")
    parser.add_argument("--seconds", type=float, default=4.0, metavar="S", help="of a sample (default 4)")
    parser.add_argument(
        "--rounds", type=int, default=ENOUGH, metavar="N", help=f"samples a scenario (default {ENOUGH})"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
