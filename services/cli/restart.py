"""`./baton restart SERVICE …`: new processes take over from old ones, one after the other, and streams go on."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from services.cli import control
from services.cli.state import StateFolder, state_path
from services.cli.supervisor import Supervisor
from services.cli.words import NO_STACK, processes
from shared.contracts.errors import BatonError, InvalidInput, Unavailable

ORDER = ("policy", "prefix-cache-index", "scheduler", "batch", "prefill", "decode", "gateway")
"""In which order `all` goes: workers follow who places on them, and the door comes last."""
SERVERS = ("nats", "redis")
"""Only one at a time can own what these keep, so they stop before they start."""


def main(argv: Sequence[str]) -> int:
    """Run the command; 1 when the new process did not come up, in which case the old one goes on."""
    parser = argparse.ArgumentParser(
        prog="baton restart",
        description="Restart services of the running stack one process after the other. The new process is ready "
        "before the old one stops; running streams end there or move. nats and redis stop first: services wait for "
        "them.",
    )
    parser.add_argument(
        "service",
        nargs="+",
        metavar="SERVICE",
        help=f"{', '.join((*ORDER, *SERVERS))}; those of one pool (decode-large); one process (decode-1); or all",
    )
    options = parser.parse_args(argv)
    path = state_path(os.environ)
    try:
        if not path.is_dir() or StateFolder(path).holder() is None:
            raise Unavailable(NO_STACK)
        control.order(path / "run", {"restart": options.service}, lambda line: print(f"  {line}", flush=True))
    except BatonError as exc:
        print(f"baton restart: {exc.message}", file=sys.stderr)
        return 1
    return 0


def chosen(asked: Sequence[str], instances: Mapping[str, str], own_servers: Collection[str]) -> list[str]:
    """Names of the processes to restart, in order. Pure.

    Args:
        asked: services, those of one pool (`decode-large`), processes, or `all`.
        instances: process name to service.
        own_servers: those of SERVERS that this stack started.

    Raises InvalidInput naming what is not known.
    """
    by_service = {name: sorted(p for p, service in instances.items() if service == name) for name in ORDER}
    wanted: list[str] = []
    for name in asked:
        if name == "all":
            wanted += [process for service in ORDER for process in by_service[service]]
        elif found := by_service.get(name):
            wanted += found
        elif named := processes(name, (*instances, *own_servers)):
            wanted += named
        else:
            known = sorted({*instances, *instances.values(), *own_servers, "all"})
            raise InvalidInput(f"there is no {name!r} here; known are {', '.join(known)}", param=name)
    return list(dict.fromkeys(wanted))


def handler(supervisor: Supervisor, instances: Mapping[str, str], own_servers: Collection[str]) -> control.Handler:
    """What the supervisor does with orders."""

    async def on_order(order: Mapping[str, Any], say: Callable[[str], None]) -> None:
        asked = order.get("restart")
        if set(order) != {"restart"} or not isinstance(asked, list) or not all(isinstance(n, str) for n in asked):
            raise InvalidInput('the orders are {"restart": [names]}')
        for name in chosen(asked, instances, own_servers):
            say(f"{name}: starting its successor" if name not in SERVERS else f"{name}: stopping")
            seconds = await (supervisor.bounce(name) if name in SERVERS else supervisor.replace(name))
            say(f"{name}: restarted in {seconds:.1f} s")

    return on_order
