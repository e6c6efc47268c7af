"""Tasks that run until their owner stops."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from shared.contracts.errors import BatonError

END_S = 0.5
"""A task that went on after a cancel is cancelled again after so long."""


async def every(
    period_s: float | Callable[[], float], work: Callable[[], Awaitable[None]], log: logging.Logger
) -> None:
    """Do `work`, then pause, for ever: a turn that failed is logged, and the next one tries again."""
    while True:
        try:
            await work()
        except BatonError as exc:
            log.warning("%s", exc.message)
        except Exception:
            log.exception("periodic work failed")
        await asyncio.sleep(period_s() if callable(period_s) else period_s)


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until they have ended, as often as that takes.

    Once is not enough: before Python 3.12 `asyncio.wait_for` swallows a cancellation that meets the answer it waits
    for, and the clients of NATS and Redis are built on it.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=END_S)
