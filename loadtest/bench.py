"""`./baton bench smoke | batching`: one seeded load against stacks of its own, and what clients saw of it.
`./baton bench engine` is `loadtest/engine.py`, `./baton bench peers` is `loadtest/peers.py`, `./baton bench quality` is
`loadtest/quality.py`, `./baton bench host` is `loadtest/host_time.py`, `./baton bench speculation` is
`loadtest/speculation.py`.

Configurations run in turn, round after round, never beside each other: what drifts in the machine then drifts alike for
all of them. Every round starts a fresh stack, so that none finds another's cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from loadtest.client import run_load
from loadtest.machine import IDLE_CORES, ForeignLoad, foreign_cores, this_machine
from loadtest.own_stack import own_stack
from loadtest.report import Round, figures, same_texts, text_of
from loadtest.workload import Job, LoadShape, make_jobs
from shared.contracts.errors import BatonError

SMOKE = LoadShape(requests=16, rate=1.5)
BATCHING = LoadShape(requests=32, rate=1.5)
POLICIES = ("continuous", "static", "dynamic")
MIN_ROUNDS = 2
GATE_S = 1.0
BASE: dict[str, object] = {"workers.prefill": 0, "workers.decode": 1}
"""One worker that does all: the policies differ in nothing else."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured."""

    kind: str
    configurations: dict[str, dict[str, object]]  # name → settings
    shape: LoadShape
    seed: int
    rounds: int


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit code: 1 when a request failed."""
    if list(argv[:1]) == ["engine"]:
        from loadtest import engine  # torch: only where it is asked for

        return engine.main(argv[1:])
    if list(argv[:1]) == ["peers"]:
        from loadtest import peers

        return peers.main(argv[1:])
    if list(argv[:1]) == ["host"]:
        from loadtest import host_time

        return host_time.main(argv[1:])
    if list(argv[:1]) == ["quality"]:
        from loadtest import quality

        return quality.main(argv[1:])
    if list(argv[:1]) == ["speculation"]:
        from loadtest import speculation

        return speculation.main(argv[1:])
    options = _parser().parse_args(argv)
    try:
        plan = make_plan(options)
        jobs = make_jobs(plan.shape, plan.seed)
        report = run(plan, jobs)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (BatonError, ValueError) as exc:
        print(f"baton bench: {exc.message if isinstance(exc, BatonError) else exc}", file=sys.stderr)
        return 1
    print(text_of(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return 1 if any(row["errors"] for row in report["figures"].values()) else 0


def make_plan(options: argparse.Namespace) -> Plan:
    """The plan the options ask for. Raises ValueError for a `--set` without a value."""
    more: dict[str, object] = {}
    for pair in options.set:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--set {pair}: expected SECTION.FIELD=VALUE")
        more[name.strip()] = value
    batching = options.kind == "batching"
    shape = BATCHING if batching else SMOKE
    shape = replace(shape, requests=options.requests or shape.requests, rate=options.rate or shape.rate)
    own = {"engine.batch_size": options.batch_size, "engine.batch_window_s": options.batch_window}
    if batching:
        configurations = {name: BASE | own | {"engine.batching": name} | more for name in POLICIES}
        rounds = max(MIN_ROUNDS, options.rounds)
    else:
        configurations, rounds = {"as set": more}, 1
    return Plan(options.kind, configurations, shape, options.seed, rounds)


def run(plan: Plan, jobs: Sequence[Job]) -> dict[str, Any]:
    """Measure, round after round, and put the figures together."""
    before = foreign_cores(GATE_S)
    if before > IDLE_CORES:
        _say(f"others use {before:.2f} cores: the figures will not be those of an idle machine")
    rounds: list[Round] = []
    for number in range(1, plan.rounds + 1):
        for name in turns(list(plan.configurations), number):
            _say(f"round {number} of {plan.rounds}: {name}")
            rounds.append(_round(name, number, plan.configurations[name], jobs))
    same, served = same_texts(rounds)
    by_name = {name: [one for one in rounds if one.name == name] for name in plan.configurations}
    return {
        "bench": plan.kind,
        "seed": plan.seed,
        "load": asdict(plan.shape),
        "configurations": plan.configurations,
        "machine": this_machine().body(),
        "foreign_cores_before": before,
        "idle": max(before, *(one.foreign_cores for one in rounds)) <= IDLE_CORES,
        "figures": {name: figures(some) for name, some in by_name.items()},
        "same_texts": [same, served],
        "rounds": [_raw(one) for one in rounds],
    }


def turns(names: Sequence[str], number: int) -> list[str]:
    """The order of a round, from 1: each round begins with another, so that none always runs first."""
    first = (number - 1) % len(names)
    return [*names[first:], *names[:first]]


def _round(name: str, number: int, settings: dict[str, object], jobs: Sequence[Job]) -> Round:
    with own_stack(settings) as stack:
        model = stack.models()[0]
        load = ForeignLoad(stack.pid)
        outcomes, seconds = asyncio.run(run_load(stack.url, stack.api_key, model, jobs))
        cores = load.cores()
        delays = stack.queue_delays({o.number: o.id for o in outcomes if o.id and not o.error})
        return Round(name, number, tuple(outcomes), seconds, delays, cores, stack.start_s)


def _raw(one: Round) -> dict[str, Any]:
    """A round without what its requests said: an outcome's digest tells enough."""
    return {
        "name": one.name,
        "number": one.number,
        "seconds": one.seconds,
        "foreign_cores": one.foreign_cores,
        "start_s": one.start_s,
        "outcomes": [
            asdict(o) | {"gaps_s": [round(gap, 4) for gap in o.gaps_s], "queue_s": one.queue_s.get(o.number)}
            for o in one.outcomes
        ],
    }


def _say(text: str) -> None:
    print(f"baton bench: {text}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="baton bench", description="Measure this machine with a seeded load.")
    parser.add_argument(
        "kind",
        choices=("smoke", "batching", "engine", "peers", "quality", "host", "speculation"),
        help="one configuration, the three batching policies; the others have options of their own (--help)",
    )
    parser.add_argument("--seed", type=int, default=1, help="of arrivals and lengths (default 1)")
    parser.add_argument("--requests", type=int, default=0, metavar="N", help="requests a round")
    parser.add_argument("--rate", type=float, default=0.0, metavar="R", help="arrivals a second")
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help="rounds of each policy, at least 2 (default 2)")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="of static and dynamic batches")
    parser.add_argument("--batch-window", type=float, default=0.5, metavar="S", help="of dynamic batches, seconds")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="any other setting")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    return parser
