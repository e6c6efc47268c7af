"""One supervised child process: started with its log and its death signal, watched without polling."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POLL_S = 0.02
TAIL_LINES = 20
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)

ReadyProbe = Callable[[int], Mapping[str, Any] | None]
"""Given the child's process id: what it reports, or None while it is not ready. Must not block."""
Mark = Callable[[int], float | None]
"""Given the child's process id: what changes while it moves; None when nothing is known of it. Must not block."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run. `env` is the child's whole environment; times are seconds."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    folder: Path
    log: Path
    ready: ReadyProbe
    mark: Mark = lambda pid: None
    start_timeout_s: float = 120.0
    stop_timeout_s: float = 15.0


class ChildFailed(Exception):
    """A child ended, or was not ready in time. `tail` holds the last lines of its log."""

    def __init__(self, name: str, reason: str, tail: str) -> None:
        super().__init__(f"{name} {reason}")
        self.name = name
        self.reason = reason
        self.tail = tail


class Child:
    """A running child. It gets SIGTERM when its parent dies, even by SIGKILL.

    Raises ChildFailed when the system cannot start it.
    """

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.started = time.monotonic()
        self.ready = False
        """It reported ready once."""
        parent = os.getpid()

        def in_child() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)

        try:
            with open(spec.log, "ab", opener=_private) as log:
                # A session of its own: Ctrl-C reaches the supervisor alone, which stops the children in order.
                self.process = subprocess.Popen(
                    spec.command,
                    env=dict(spec.env),
                    cwd=spec.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    umask=0o077,
                    preexec_fn=in_child,
                )
        except OSError as exc:
            raise ChildFailed(spec.name, f"cannot be started: {exc}", "") from exc
        self.ended = asyncio.Event()
        self.unguarded = asyncio.Event()
        """It ended, or another has its place: nobody need watch it any more."""
        self.lifetime_s = 0.0
        """How long it lived, once it has ended."""
        self._told = False
        self._descriptor = os.pidfd_open(self.process.pid)
        asyncio.get_running_loop().add_reader(self._descriptor, self._on_end)

    @property
    def pid(self) -> int:
        return self.process.pid

    async def wait_ready(self) -> Mapping[str, Any]:
        """What the child reports. Raises ChildFailed when it says why it can't start, ends first or takes too long."""
        deadline = self.started + self.spec.start_timeout_s
        while time.monotonic() < deadline:
            ended, facts = self.ended.is_set(), self.spec.ready(self.pid)
            if facts is not None and "error" in facts:
                raise ChildFailed(self.spec.name, f"cannot start: {facts['error']}", "")
            if ended:
                raise self.failure()
            if facts is not None:
                self.ready = True
                return facts
            with suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), POLL_S)
        raise ChildFailed(self.spec.name, f"was not ready within {self.spec.start_timeout_s:g} s", tail(self.spec.log))

    def failure(self) -> ChildFailed:
        """How an ended child ended."""
        return ChildFailed(self.spec.name, describe_exit(self.process.returncode), tail(self.spec.log))

    async def stop(self) -> bool:
        """SIGTERM, wait, then SIGKILL. True when it ended by itself.

        A stop that was given up and begins anew does not tell it twice: a second signal means to end at once.
        """
        if not self._told:
            self._told = True
            self.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.ended.wait(), self.spec.stop_timeout_s)
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self.ended.wait()
            return False
        return True

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child and to what it may have started; nothing when it has ended."""
        if self.process.returncode is None:  # else its number may be another's
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        # Whatever the child itself had started shares its session: nothing may stay. Before the wait, for until then
        # the number of the group cannot be taken by another process.
        self.signal(signal.SIGKILL)
        self.process.wait()
        self.lifetime_s = time.monotonic() - self.started
        self.ended.set()
        self.unguarded.set()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def describe_exit(code: int) -> str:
    """`ended with exit code 2` or `was killed by SIGKILL`. Pure."""
    if code < 0:
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"
    return f"ended with exit code {code}"


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16_384))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
