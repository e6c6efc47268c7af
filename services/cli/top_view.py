"""The frame `./baton top` draws: readiness, scheduler, workers, ingresses, the newest requests. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.cli.waterfall import cut, list_table
from shared.telemetry.trace_buffer import TraceSummary
from shared.telemetry.units import seconds

GAUGE = 12
_NAME = 21
_ROOMY = 96
"""Columns from which on the gauges fit."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the gateway said at `taken_s` (unix seconds): the body of `/baton/cluster`, and requests, newest first."""

    taken_s: float
    cluster: Mapping[str, Any]
    requests: Sequence[TraceSummary]


def frame(url: str, shown: Snapshot | None, fault: str, size: tuple[int, int], now: float) -> list[str]:
    """Lines for a terminal of `size` (columns, rows); as many requests as fit below the cluster.

    Args:
        shown: the newest snapshot there is; None before the first.
        fault: why there is none newer; empty when all is well.
        now: unix seconds.
    """
    width, height = size
    clock = time.strftime("%H:%M:%S", time.localtime(now))
    lines = [f"baton top  {url}  {clock}"]
    if fault:
        lines.append(f"! {fault}")
    if shown is not None:
        if fault:
            lines.append(f"! below: what was said {now - shown.taken_s:.0f} s ago")
        lines += cluster_lines(shown.cluster, width)
        room = height - len(lines) - 2
        if room > 0:
            lines += ["", *list_table(shown.requests[:room], now, width).splitlines()]
    return [cut(line, width) for line in lines[:height]]


def cluster_lines(cluster: Mapping[str, Any], width: int = _ROOMY) -> list[str]:
    """The cluster as lines, which may be longer than `width`; the gauges are left out where they do not fit."""
    gauges = width >= _ROOMY
    failing = [name for name, fine in cluster["checks"].items() if not fine]
    ready = f"NOT READY: {', '.join(failing)}" if failing else "ready"
    own = cluster["gateway"]
    lines = [f"{ready}   {own['id']} holds {own['requests']} requests{'  draining' if own['draining'] else ''}"]
    lines += [_scheduler(cluster["scheduler"]), *_tenants(cluster["scheduler"]), ""]
    blocks = f"{'KV BLOCKS IN USE':<25}" if gauges else f"{'KV IN USE':<11}"
    lines += [_heads("WORKER", f"ROLE     RUNNING WAITING  TOKENS  {blocks} HEARD")]
    lines += [_worker(worker, gauges) for worker in cluster["workers"]] or ["no worker was heard"]
    others = [one for one in cluster["ingresses"] if one["id"] != own["id"]]
    if others:
        holds = 60 if gauges else 46
        lines += ["", _heads("INGRESS", f"{'HOLDS':<{holds}} HEARD")]
        lines += [f"{cut(one['id'], _NAME - 1):<{_NAME}}{one['requests']:<{holds}}{_ago(one):>6}" for one in others]
    return lines


def gauge(used: int, total: int, width: int = GAUGE) -> str:
    """How full something is, as a bar; some use is at least one mark, and only all of it fills the bar."""
    if total <= 0:
        return "·" * width
    marks = min(width, used * width // total)
    if used > 0:
        marks = max(1, marks)
    return "█" * marks + "·" * (width - marks)


def _heads(first: str, rest: str) -> str:
    return f"{first:<{_NAME}}{rest}"


def _scheduler(scheduler: Mapping[str, Any] | None) -> str:
    if scheduler is None:
        return "scheduler  not heard; new requests wait"
    classes = ", ".join(f"{klass} {count}" for klass, count in _sorted(scheduler["queued_by_class"].items()))
    queued = f"{scheduler['queued']} queued{f' ({classes})' if classes else ''}"
    running, term = scheduler["running"], scheduler["term"]
    return f"scheduler  {queued}  {running} running  term {term}  {scheduler['id']}  heard {_ago(scheduler)} ago"


def _tenants(scheduler: Mapping[str, Any] | None) -> list[str]:
    """Who waits, on a line; none while nobody does."""
    waiting = scheduler["tenants"] if scheduler is not None else ()
    parts = (f"{t['tenant']} {t['waiting']} {t['class']} (weight {t['weight']:g})" for t in waiting)
    return [f"waiting    {'  '.join(parts)}"] if waiting else []


def _worker(worker: Mapping[str, Any], gauges: bool) -> str:
    total = sum(worker["total_blocks"])
    used = total - sum(worker["free_blocks"])
    slots = f"{worker['running']}/{worker['max_sequences']}" if worker["max_sequences"] else str(worker["running"])
    notes = "".join(f"  {note}" for note in ("fake", "draining", "stalled") if worker.get(note))
    notes += f"  {'+'.join(classes)}" if (classes := worker.get("classes")) else ""
    blocks = f"{gauge(used, total)} {used}/{total}".ljust(25) if gauges else f"{used}/{total}".ljust(11)
    return (
        f"{cut(worker['id'], _NAME - 1):<{_NAME}}{worker['role']:<8}{slots:>8}{worker['waiting']:>8}"
        f"{worker['queue_tokens']:>8}  {blocks}{_ago(worker):>6}{notes}"
    )


def _ago(heard: Mapping[str, Any]) -> str:
    return seconds(heard["age_s"])


def _sorted(items: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    return sorted(items, key=lambda item: (-item[1], item[0]))
