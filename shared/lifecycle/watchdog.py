"""Whether this process still moves: its event loop turns, and what it drives makes progress.

While it does, the time of its ready file is set anew, once a second or oftener, for whoever supervises it. Once it does
not, its stacks are written to its log and it is ended, so that whoever supervises it starts it again. A process that
does not run at all (SIGSTOP) cannot do that: its supervisor sees by the file.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

LOOK_S, LOOKS = 1.0, 4
"""Looks are so far apart, and there are at least so many before a process counts as hanging."""

Check = Callable[[], str]
"""Why something stands still, in words; empty while it moves."""


class Watchdog:
    """Watches the process from `start` to `stop`. Used on the event loop.

    Args:
        ready: the file that tells it is ready, if there is one.
        hang_s: how long it may stand still before it is ended, seconds; 0: for ever.
        is_ours: False once another process has reported ready in that file.
    """

    def __init__(self, ready: Path | None, hang_s: float, is_ours: Callable[[], bool]) -> None:
        self._ready = ready
        self._hang_s = hang_s
        self._look_s = min(LOOK_S, hang_s / LOOKS) if hang_s else LOOK_S
        self._is_ours = is_ours
        self._checks: list[Check] = []
        self._turning: asyncio.Task[None] | None = None

    def watch(self, check: Check) -> None:
        """Ask `check` too. What it tells is known already, or it would have to be waited for."""
        self._checks.append(check)

    def fault(self) -> str:
        """What stands still, in words; empty when the process moves."""
        return "; ".join(filter(None, (check() for check in self._checks)))

    def start(self) -> None:
        """The process is ready: from now on it must move. Once."""
        if self._turning is None:
            self._look()
            self._turning = asyncio.get_running_loop().create_task(self._turn())

    def stop(self) -> None:
        """The process ends by itself; that has a limit of its own."""
        if self._turning is not None:
            self._turning.cancel()
        if self._hang_s:
            faulthandler.cancel_dump_traceback_later()

    async def _turn(self) -> None:
        while True:
            await asyncio.sleep(self._look_s)
            self._look()

    def _look(self) -> None:
        if self.fault():
            return
        if self._hang_s:
            # a thread of C's own, which needs neither the loop nor the interpreter's lock
            faulthandler.dump_traceback_later(self._hang_s, exit=True)
        if self._ready is not None and self._is_ours():
            with suppress(OSError):
                os.utime(self._ready)
