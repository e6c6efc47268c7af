"""Starts children, restarts those that die, stops all of them in order. Knows nothing about what they are."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from services.cli.child import Child, ChildFailed, ChildSpec

FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 15.0
STABLE_S = 60.0
"""A child that lived this long starts its next failures from zero."""
MAX_FAILURES = 6
"""Failures in a row after which the stack is given up."""


def restart_pause_s(failures: int) -> float:
    """Seconds to wait before the restart after `failures` failures in a row: doubling, bounded. Pure."""
    return min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** max(0, failures - 1))


class Supervisor:
    """The children of one stack.

    Args:
        report: called with one line whenever a child dies, comes back, or has to be killed.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._children: dict[str, Child] = {}

    @property
    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self._children.items()}

    async def start(self, specs: Iterable[ChildSpec]) -> dict[str, Mapping[str, Any]]:
        """Start children side by side; what each reported when ready. Raises ChildFailed for the first that fails."""
        waits: dict[str, asyncio.Task[Mapping[str, Any]]] = {}
        try:
            for spec in specs:
                child = self._children[spec.name] = Child(spec)
                waits[spec.name] = asyncio.create_task(child.wait_ready())
            await asyncio.wait(waits.values(), return_when=asyncio.FIRST_EXCEPTION)
            return {name: wait.result() for name, wait in waits.items() if wait.done()}
        finally:
            for wait in waits.values():
                wait.cancel()
            await asyncio.gather(*waits.values(), return_exceptions=True)

    def respecify(self, spec: ChildSpec) -> None:
        """Use `spec` when the child of its name is started again: with the port it got the first time."""
        self._children[spec.name].spec = spec

    async def watch(self) -> None:
        """Restart children that die, until cancelled. Raises ChildFailed when one keeps failing."""
        guards = [asyncio.create_task(self._guard(name)) for name in self._children]
        try:
            done, _ = await asyncio.wait(guards, return_when=asyncio.FIRST_EXCEPTION)
            for guard in done:
                guard.result()
        finally:
            for guard in guards:
                guard.cancel()
            await asyncio.gather(*guards, return_exceptions=True)

    async def stop(self, order: Sequence[Sequence[str]]) -> None:
        """Stop group after group; children in no group come last. Nothing is running afterwards."""
        named = {name for group in order for name in group}
        rest = [name for name in self._children if name not in named]
        for group in (*order, rest):
            await asyncio.gather(*(self._stop(name) for name in group if name in self._children))
        self._children.clear()

    def kill(self) -> None:
        """End everything at once, without any order."""
        for child in self._children.values():
            child.signal(signal.SIGKILL)

    async def _stop(self, name: str) -> None:
        child = self._children[name]
        if not await child.stop():
            self._report(f"{name} did not stop within {child.spec.stop_timeout_s:g} s and was killed")

    async def _guard(self, name: str) -> None:
        failures = 0
        while True:
            child = self._children[name]
            await child.ended.wait()
            failures = 1 if child.lifetime_s > STABLE_S else failures + 1
            failure = child.failure()
            if failures >= MAX_FAILURES:
                raise ChildFailed(name, f"{failure.reason}, {failures} times in a row", failure.tail)
            pause = restart_pause_s(failures)
            self._report(f"{name} {failure.reason}; starting it again in {pause:g} s (log: {child.spec.log})")
            await asyncio.sleep(pause)
            again = self._children[name] = Child(child.spec)
            try:
                await again.wait_ready()
            except ChildFailed:
                await again.stop()
                continue
            self._report(f"{name} is back")
