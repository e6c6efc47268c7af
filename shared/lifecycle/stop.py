"""Stopping: signals become an event, and a stop that hangs ends anyway."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable

log = logging.getLogger("baton.lifecycle")

STOP_LIMIT_S = 30
"""Seconds a process may take to stop after the first signal before the kernel ends it."""
SAME_SIGNAL_S = 1.0
"""Signals closer together than this are one: `timeout` and some terminals send Ctrl-C to a process and to its group."""


def stop_on_signals(limit_s: int = STOP_LIMIT_S, hurry: Callable[[], None] | None = None) -> asyncio.Event:
    """An event that SIGTERM and SIGINT set; `limit_s` seconds later the process is ended.

    A second signal calls `hurry`, or, without one, ends the process at once.

    Must be called on the main thread, inside the running loop.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    stopped_at = 0.0

    def on_signal(number: signal.Signals) -> None:
        nonlocal stopped_at
        if stop.is_set():
            if hurry is not None and time.monotonic() - stopped_at > SAME_SIGNAL_S:
                log.info("%s again: hurrying", number.name)
                hurry()
            return
        log.info("%s: stopping", number.name)
        stopped_at = time.monotonic()
        stop.set()
        if hurry is None:
            for again in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(again)
                signal.signal(again, signal.SIG_DFL)
        # The default action of SIGALRM ends the process even when the loop or another thread hangs.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(limit_s)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop
