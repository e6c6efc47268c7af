"""Starts children, restarts those that die, stops all of them in order. Knows nothing about what they are."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from services.cli.child import Child, ChildFailed, ChildSpec
from services.cli.heartbeats import LOOK_S, Heartbeats

FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 15.0
_MOST_DOUBLINGS = 16
STABLE_S = 60.0
"""A child that lived this long starts its next failures from zero."""
MAX_FAILURES = 6
"""Starts in a row that failed before the child was ready, after which the stack is given up."""


def restart_pause_s(failures: int) -> float:
    """Seconds to wait before the restart after `failures` failures in a row: doubling, bounded. Pure."""
    return min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(max(0, failures - 1), _MOST_DOUBLINGS))


class Supervisor:
    """The children of one stack.

    Args:
        report: called with one line whenever a child dies, comes back, or has to be killed.
        hang_s: a child that stands still for so long is killed, seconds; 0: none is.
    """

    def __init__(self, report: Callable[[str], None], hang_s: float = 0.0) -> None:
        self._report = report
        self._hang_s = hang_s
        self._children: dict[str, Child] = {}
        self._passing: set[Child] = set()  # successors not ready yet, predecessors not ended yet
        self._pausing: set[str] = set()  # whoever replaces one of these sees to it that there is one

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

    async def replace(self, name: str) -> float:
        """Start a second child of `name`, and stop the first once that is ready. Returns the seconds it took.

        Raises ChildFailed when the second does not become ready: then the first goes on.
        """
        started = time.monotonic()
        new = Child(self._children[name].spec)
        self._passing.add(new)
        self._pausing.add(name)
        try:
            await new.wait_ready()
        except ChildFailed:
            await new.stop()
            raise
        finally:
            if not new.ready:
                new.signal(signal.SIGKILL)
            self._passing.discard(new)
            self._pausing.discard(name)
        old = self._children[name]
        self._children[name] = new
        old.unguarded.set()
        self._passing.add(old)
        await self._stop_one(old)
        self._passing.discard(old)
        return time.monotonic() - started

    async def bounce(self, name: str) -> float:
        """Stop a child and start it again, for those of which there can be only one. Returns the seconds it took."""
        started = time.monotonic()
        old = self._children[name]
        self._pausing.add(name)
        try:
            await self._stop_one(old)
            new = self._children[name] = Child(old.spec)
        finally:
            self._pausing.discard(name)
        await new.wait_ready()
        return time.monotonic() - started

    async def watch(self) -> None:
        """Restart children that die, until cancelled. Raises ChildFailed when one keeps failing."""
        guards = [asyncio.create_task(self._guard(name)) for name in self._children]
        if self._hang_s:
            guards.append(asyncio.create_task(self._kill_those_that_hang()))
        try:
            done, _ = await asyncio.wait(guards, return_when=asyncio.FIRST_EXCEPTION)
            for guard in done:
                guard.result()
        finally:
            for guard in guards:
                guard.cancel()
            await asyncio.gather(*guards, return_exceptions=True)

    async def stop(self, order: Sequence[Sequence[str]]) -> None:
        """Stop group after group; children in no group come last. Nothing is running afterwards.

        A restart in progress must have been cancelled before; whom it was stopping goes on stopping with its group.
        """
        named = {name for group in order for name in group}
        rest = [name for name in self._children if name not in named]
        for group in (*order, rest):
            leaving = [child for child in (*self._children.values(), *self._passing) if child.spec.name in group]
            await asyncio.gather(*(self._stop_one(child) for child in leaving))
        self._children.clear()
        self._passing.clear()

    def kill(self) -> None:
        """End everything at once, without any order."""
        for child in (*self._children.values(), *self._passing):
            child.signal(signal.SIGKILL)

    async def _stop_one(self, child: Child) -> None:
        if not await child.stop():
            self._report(f"{child.spec.name} did not stop within {child.spec.stop_timeout_s:g} s and was killed")

    async def _guard(self, name: str) -> None:
        failures = unready = 0
        last: Child | None = None
        while True:
            child = self._children[name]
            await child.unguarded.wait()
            await self._unpaused(name)
            if self._children[name] is not child:
                failures = unready = 0
                continue
            failures = 1 if child.lifetime_s > STABLE_S else failures + 1
            failure = child.failure()
            unready = unready + 1 if child is last or not child.ready else 0
            last = child
            if unready >= MAX_FAILURES:
                raise ChildFailed(name, f"{failure.reason}, {unready} times in a row", failure.tail)
            pause = restart_pause_s(failures)
            self._report(f"{name} {failure.reason}; starting it again in {pause:g} s (log: {child.spec.log})")
            await asyncio.sleep(pause)
            await self._unpaused(name)
            if self._children[name] is child and await self._started_again(child):
                self._report(f"{name} is back")

    async def _kill_those_that_hang(self) -> None:
        heartbeats = Heartbeats(self._hang_s)
        while True:
            running = {child.pid: child for child in self._children.values() if child.ready}
            marks = {pid: mark for pid, child in running.items() if (mark := child.spec.mark(pid)) is not None}
            for pid in heartbeats.still(marks, time.monotonic()):
                if running[pid].process.returncode is None:
                    self._report(f"{running[pid].spec.name} has stood still for {self._hang_s:g} s and is killed")
                    running[pid].signal(signal.SIGKILL)
            await asyncio.sleep(LOOK_S)

    async def _started_again(self, child: Child) -> bool:
        with suppress(ChildFailed):
            again = self._children[child.spec.name] = Child(child.spec)
            try:
                await again.wait_ready()
                return True
            except ChildFailed:
                await again.stop()
        return False

    async def _unpaused(self, name: str) -> None:
        """Returns when nobody is stopping this one on purpose, or starting its successor."""
        while name in self._pausing:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
