"""Stopping: signals become an event, and a stop that hangs ends anyway."""

from __future__ import annotations

import asyncio
import logging
import signal

log = logging.getLogger("baton.lifecycle")

STOP_LIMIT_S = 30
"""Seconds a process may take to stop after the first signal before the kernel ends it."""


def stop_on_signals(limit_s: int = STOP_LIMIT_S) -> asyncio.Event:
    """An event that SIGTERM and SIGINT set. A second signal, or `limit_s` seconds, ends the process at once.

    Must be called on the main thread, inside the running loop.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        log.info("%s: stopping", number.name)
        stop.set()
        for again in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(again)
            signal.signal(again, signal.SIG_DFL)
        # The default action of SIGALRM ends the process even when the loop or another thread hangs.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(limit_s)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop
