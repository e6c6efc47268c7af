"""`./baton status`: the running stack, its requests, queue and workers, as its gateway hears of them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from services.cli.state import StackRecord, StateFolder, running_stack, state_path
from services.cli.words import NO_STACK
from shared.lifecycle.ready import read_ready

TIMEOUT_S = 5.0


def main(argv: Sequence[str]) -> int:
    """Run the command; 1 when no stack is ready or its gateway does not answer."""
    parser = argparse.ArgumentParser(prog="baton status", description="Show the running stack and its workers.")
    parser.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    options = parser.parse_args(argv)
    stack = running_stack(os.environ)
    if stack is None:
        print(f"baton status: {NO_STACK}", file=sys.stderr)
        return 1
    cluster = _cluster(stack)
    shown = {name: value for name, value in asdict(stack).items() if not name.endswith("_key")} | (cluster or {})
    run = StateFolder(state_path(os.environ)).run
    shown |= {"metrics": told(run, "metrics_url"), "computes": told(run, "computes")}
    print(json.dumps(shown) if options.json else "\n".join(lines(shown)))
    if cluster is None:
        print(f"baton status: the gateway at {stack.url} does not answer", file=sys.stderr)
        return 1
    return 0


def told(run: Path, fact: str) -> dict[str, str]:
    """Process name to one fact of its ready file, of those that told it."""
    found = {path.stem: read_ready(path) or {} for path in sorted(run.glob("*.ready"))}
    return {name: facts[fact] for name, facts in found.items() if facts.get(fact)}


def _cluster(stack: StackRecord) -> dict[str, Any] | None:
    headers = {"Authorization": f"Bearer {stack.admin_key}"}
    try:
        response = httpx.get(f"{stack.url}/baton/cluster", headers=headers, timeout=TIMEOUT_S)
    except httpx.HTTPError:
        return None
    found: dict[str, Any] | None = response.json() if response.status_code == 200 else None
    return found


def lines(shown: Mapping[str, Any]) -> list[str]:
    """The table: a line for the stack, one for each pool's scheduler, one a worker. Pure."""
    found = [f"{shown['url']}  process {shown['pid']}"]
    if "gateway" not in shown:
        return found
    found[0] += f"  {shown['gateway']['requests']} requests"
    pools = shown["pools"]
    several = len(pools) > 1
    if several:
        found += [f"pool {p['pool']} ({', '.join(p.get('models', ()))})  {_scheduler(p['scheduler'])}" for p in pools]
    else:
        found.append(_scheduler(shown["scheduler"]))
    for tenant in shown["scheduler"]["tenants"] if shown["scheduler"] else ():
        found.append(
            f"waiting    {tenant['tenant']:<20} {tenant['waiting']} {tenant['class']}  weight {tenant['weight']:g}"
            f"  {tenant['running']} running"
        )
    if shown["workers"]:
        found.append(
            f"{'WORKER':<22}{'RUNNING':>8}{'WAITING':>8}{'PROMPT TOKENS':>14}{'FREE BLOCKS':>14}{'HEARD':>8}"
            + ("  POOL" if several else "")
        )
    for worker in shown["workers"]:
        free, total = sum(worker["free_blocks"]), sum(worker["total_blocks"])
        notes = (f"  {worker['pool']}" if several else "") + "".join(
            f"  {note}" for note in ("fake", "draining", "stalled") if worker.get(note)
        )
        found.append(
            f"{worker['id']:<22}{worker['running']:>8}{worker['waiting']:>8}{worker['queue_tokens']:>14}"
            f"{f'{free}/{total}':>14}{worker['age_s']:>7.1f}s{notes}"
        )
    found += [f"computes   {name:<20} {what}" for name, what in shown.get("computes", {}).items()]
    found += [f"metrics    {name:<20} {url}" for name, url in shown.get("metrics", {}).items()]
    return found


def _scheduler(scheduler: Mapping[str, Any] | None) -> str:
    if scheduler is None:
        return "scheduler  not heard"
    return f"scheduler  {scheduler['queued']} queued  {scheduler['running']} running  term {scheduler['term']}"
