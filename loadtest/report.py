"""Figures of a load: percentiles of what clients saw, as a table and as JSON. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.client import Outcome

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Round:
    """One run of a load. `queue_s`: by request number, from the traces; missing where a trace did not come."""

    name: str
    number: int
    outcomes: tuple[Outcome, ...]
    seconds: float
    queue_s: dict[int, float]
    foreign_cores: float
    start_s: float = 0.0  # how long the stack took to be ready


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Nearest rank: the least value that at least `percent` of all do not exceed; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """All rounds of one configuration together. Times in seconds; a failed request only counts as an error."""
    every = [outcome for one in rounds for outcome in one.outcomes]
    good = [outcome for outcome in every if not outcome.error]
    seconds = sum(one.seconds for one in rounds)
    queue = [delay for one in rounds for delay in one.queue_s.values()]
    return {
        "rounds": len(rounds),
        "requests": len(every),
        "errors": len(every) - len(good),
        "ttft_s": _spread(o.first_s for o in good if o.first_s is not None),
        "itl_s": _spread(gap for o in good for gap in o.gaps_s),
        "total_s": _spread(o.total_s for o in good),
        "queue_s": _spread(queue),
        "queue_seen": len(queue),
        "tokens_per_s": sum(o.tokens for o in good) / seconds,
        "requests_per_s": len(good) / seconds,
        "tokens": sum(o.tokens for o in good),
        "seconds": seconds,
        "foreign_cores": max(one.foreign_cores for one in rounds),
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    """One line a configuration, times in milliseconds as p50/p95/p99."""
    head = ("", "TTFT ms", "ITL ms", "total ms", "queue ms", "tokens/s", "requests/s", "errors", "others' cores")
    lines: list[tuple[str, ...]] = [head]
    for name, f in rows.items():
        times = (_ms(f[key]) for key in ("ttft_s", "itl_s", "total_s", "queue_s"))
        rates = (f"{f['tokens_per_s']:.1f}", f"{f['requests_per_s']:.2f}", str(f["errors"]))
        lines.append((name, *times, *rates, f"{f['foreign_cores']:.2f}"))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join((line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))))
        for line in lines
    )


def text_of(report: dict[str, Any]) -> str:
    """A whole report for people."""
    machine, load, rows = report["machine"], report["load"], report["figures"]
    rounds = next(iter(rows.values()))["rounds"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    lengths = "; ".join(f"{part} {_lengths(load[part])}" for part in ("prompt", "output"))
    arrivals = f"{load['requests']} requests a round, Poisson arrivals at {load['rate']:g} a second"
    hardware = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB; {machine['system']}"
    lines = [
        f"baton bench {report['bench']}, seed {report['seed']}: {arrivals}; {rounds} round(s) of each, in turn",
        f"tokens, from lognormals: {lengths}",
        f"{hardware}, Python {machine['python']}, {versions}; {machine['date']}",
        "",
        table(rows),
        "",
        "Times are p50/p95/p99, as the client saw them, streamed; ITL is the time between two pieces of text. Queue:",
        "in the scheduler, and in the worker until the first step, from the traces.",
    ]
    if len(report["rounds"]) > 1:
        same, served = report["same_texts"]
        lines.append(f"{same} of {served} requests got the same text every time.")
    for name, row in rows.items():
        if row["queue_seen"] < row["requests"] - row["errors"]:
            lines.append(f"{name}: {row['requests'] - row['errors'] - row['queue_seen']} traces did not come in time.")
        if row["errors"]:
            first = next(o["error"] for r in report["rounds"] if r["name"] == name for o in r["outcomes"] if o["error"])
            lines.append(f"{name}: {row['errors']} of {row['requests']} requests failed; the first: {first}")
    if not report["idle"]:
        during = max(row["foreign_cores"] for row in rows.values())
        lines.append(
            f"NOT AN IDLE MACHINE: other processes used {report['foreign_cores_before']:.2f} cores before and up to "
            f"{during:.2f} during a round. Not for comparison with other runs."
        )
    return "\n".join(lines)


def same_texts(rounds: Iterable[Round]) -> tuple[int, int]:
    """(requests whose text was the same in every round that served them, requests served in all)."""
    seen: dict[int, set[str]] = {}
    for one in rounds:
        for outcome in one.outcomes:
            if not outcome.error:
                seen.setdefault(outcome.number, set()).add(outcome.text_digest)
    return sum(len(texts) == 1 for texts in seen.values()), len(seen)


def _spread(values: Iterable[float]) -> dict[str, float | None]:
    found = list(values)
    return {f"p{percent}": percentile(found, percent) for percent in PERCENTILES}


def _ms(spread: dict[str, float | None]) -> str:
    return "/".join("-" if value is None else f"{value * 1000:.0f}" for value in spread.values())


def _lengths(drawn: dict[str, Any]) -> str:
    return f"median {drawn['median']:g}, sigma {drawn['sigma']:g}, at most {drawn['most']}"
