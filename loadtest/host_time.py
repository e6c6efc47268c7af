"""`./baton bench host`: processor time a token costs outside of the native kernels, process by process.

A closed loop of streamed completions over HTTP against a stack of its own. Counted is what every process of the stack
used between the loop's begin and its end, what it uses when idle included, less what worker processes spent within
native kernels.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from loadtest.closed_loop import LoopResult, even_jobs
from loadtest.http_loop import run_http
from loadtest.machine import IDLE_CORES, ForeignLoad, processor_s_each, this_machine
from loadtest.own_stack import OwnStack, own_stack
from shared.contracts.errors import BatonError, Unavailable
from shared.telemetry import metric_names as names

WIDTHS = (1, 8, 32)
PROMPT, OUTPUT = 32, 128
WARM_TOKENS = 8
VOCAB = 4096
"""Ids below this are in every model's vocabulary that this is run with."""
WORKERS = ("decode", "prefill")
FAMILIES = {names.KERNEL_CPU.name, names.KERNEL_CPU.exposed}


@dataclass(frozen=True, slots=True)
class Look:
    """Processor seconds so far, by process name."""

    used_s: Mapping[str, float]
    kernel_s: Mapping[str, float]  # within native kernels
    pids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Sample:
    """One loop."""

    width: int
    tokens: int
    seconds: float
    foreign_cores: float
    itl_s: tuple[float, ...]  # gaps between pieces of text
    host_s: Mapping[str, float]  # by process
    kernel_s: float


def host_s(before: Look, after: Look) -> dict[str, float]:
    """Processor seconds outside of native kernels between two looks, by process. Pure.

    Raises:
        Unavailable: a process ended or began meanwhile, so that its account is lost.
    """
    if before.pids != after.pids:
        raise Unavailable("processes of the stack changed while it was measured")
    used = {name: after.used_s[name] - before.used_s[name] for name in before.used_s}
    for name, seconds in after.kernel_s.items():
        used[name] -= seconds - before.kernel_s.get(name, 0.0)
    return used


def figures(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """A row a width: milliseconds a token, of its least disturbed sample. Pure."""
    rows = []
    for width in sorted({one.width for one in samples}):
        some = [one for one in samples if one.width == width]
        best = min(some, key=lambda one: one.foreign_cores)
        each = {name: seconds * 1e3 / best.tokens for name, seconds in best.host_s.items()}
        gaps = sorted(best.itl_s)
        rows.append(
            {
                "width": width,
                "idle": best.foreign_cores <= IDLE_CORES,
                "ms_a_token": sum(each.values()),
                "by_process": each,
                "kernel_ms_a_token": best.kernel_s * 1e3 / best.tokens,
                "tokens_s": best.tokens / best.seconds,
                "itl_p50_ms": _at(gaps, 0.50) * 1e3,
                "itl_p95_ms": _at(gaps, 0.95) * 1e3,
            }
        )
    return rows


def text_of(report: Mapping[str, Any]) -> str:
    """The table. Pure."""
    rows, machine = report["figures"], report["machine"]
    lines = [
        f"{report['model']}; {machine['cpu']}, {machine['date']}",
        "processor time a token outside of native kernels, ms",
        f"{'':22}" + "".join(f"{'c' + str(row['width']):>10}" for row in rows),
    ]
    for name in sorted(rows[0]["by_process"]):
        lines.append(f"{name:22}" + "".join(f"{row['by_process'].get(name, 0.0):10.3f}" for row in rows))
    for label, key in (("all", "ms_a_token"), ("native kernels", "kernel_ms_a_token"), ("tokens a second", "tokens_s")):
        lines.append(f"{label:22}" + "".join(f"{row[key]:10.3f}" for row in rows))
    if not all(row["idle"] for row in rows):
        lines.append(f"Others used more than {IDLE_CORES:g} cores: these figures are no measure of this machine.")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit code."""
    options = _parser().parse_args(argv)
    try:
        report = run(options)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (BatonError, ValueError) as exc:
        print(f"baton bench: {exc.message if isinstance(exc, BatonError) else exc}", file=sys.stderr)
        return 1
    print(text_of(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return 0


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every width in turn, round after round.

    Raises:
        Unavailable: the stack did not start, failed, or lost a process.
        ValueError: a `--set` without a value.
    """
    settings = stack_settings(options.set)
    samples: list[Sample] = []
    with own_stack(settings) as stack:
        model = stack.models()[0]
        _loop(stack, model, max(options.widths), WARM_TOKENS, "warm")
        for number in range(options.rounds):
            for width in options.widths:
                _say(f"round {number + 1} of {options.rounds}: {width} at once")
                samples.append(measure(stack, model, width, options.output, f"{number} {width}"))
    return {
        "bench": "host",
        "model": model,
        "settings": {name: str(value) for name, value in settings.items()},
        "machine": this_machine().body(),
        "figures": figures(samples),
        "samples": [asdict(one) for one in samples],
    }


def stack_settings(more: Sequence[str]) -> dict[str, object]:
    """One worker that does all. Raises ValueError for a `--set` without a value."""
    settings: dict[str, object] = {"model.dtype": "bfloat16", "workers.prefill": 0, "workers.decode": 1}
    for pair in more:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--set {pair}: expected SECTION.FIELD=VALUE")
        settings[name.strip()] = value
    return settings


def measure(stack: OwnStack, model: str, width: int, output: int, salt: str) -> Sample:
    """One loop of `width` requests at once."""
    urls = stack.metrics_urls()
    before, load = look(stack.pid, urls), ForeignLoad(stack.pid)
    result = _loop(stack, model, width, output, salt)
    foreign, after = load.cores(), look(stack.pid, urls)
    kernel_s = sum(after.kernel_s.values()) - sum(before.kernel_s.values())
    return Sample(
        width, result.output_tokens, result.seconds, foreign, tuple(result.gaps_s), host_s(before, after), kernel_s
    )


def look(supervisor: int, urls: Mapping[str, str]) -> Look:
    """What a stack's processes have used so far; those of one name are added up.

    Raises:
        Unavailable: a worker does not tell its kernels' share.
    """
    used_s, kernel_s = dict[str, float](), dict[str, float]()
    for name, url in urls.items():
        role = name.partition("-")[0]
        if role in WORKERS:
            kernel_s[role] = kernel_s.get(role, 0.0) + _kernel_s(name, url)
    each = processor_s_each(supervisor)
    for pid, seconds in each.items():
        name = process_name(Path(f"/proc/{pid}/cmdline").read_bytes())
        used_s[name] = used_s.get(name, 0.0) + seconds
    return Look(used_s, kernel_s, frozenset(each))


def process_name(command: bytes) -> str:
    """A service's name, or that of the program, from a command line as /proc has it. Pure."""
    parts = command.decode(errors="replace").split("\0")
    if "-m" in parts[:-1]:
        return parts[parts.index("-m") + 1].removeprefix("services.")
    # a process that names itself writes all in the first
    return Path(parts[0].partition(" ")[0]).name


def _kernel_s(name: str, url: str) -> float:
    try:
        text = httpx.get(url, timeout=10).raise_for_status().text
    except httpx.HTTPError as exc:
        raise Unavailable(f"{name} does not tell its metrics: {exc!r}") from exc
    for family in text_string_to_metric_families(text):
        if family.name in FAMILIES:
            return float(sum(one.value for one in family.samples))
    raise Unavailable(f"{name} does not tell {names.KERNEL_CPU.exposed}")


def _loop(stack: OwnStack, model: str, width: int, output: int, salt: str) -> LoopResult:
    jobs = even_jobs(width, PROMPT, output, VOCAB, salt)
    return run_http(stack.url, jobs, width, model, {}, stack.api_key, whole=False)


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _say(text: str) -> None:
    print(f"baton bench: {text}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton bench host", description="Measure processor time a token outside of the native kernels."
    )
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS), metavar="N", help="requests at once")
    parser.add_argument("--output", type=int, default=OUTPUT, metavar="N", help=f"tokens a request (default {OUTPUT})")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of every width (default 3)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="any other setting")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    return parser
