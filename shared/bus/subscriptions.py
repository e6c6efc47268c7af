"""Pieces both buses share: the set of request tasks behind one subscription, and counters of what was dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

MAX_REQUESTS_IN_FLIGHT = 1024
"""Requests one subscription answers at the same time; the next one is refused as Overloaded."""


@dataclass(slots=True)
class BusStats:
    """Counters since the bus was opened."""

    undecodable: int = 0  # dropped: not a message of the subscription's type
    expired: int = 0  # dropped: budget spent on arrival
    refused: int = 0  # answered Overloaded: too many requests in flight
    handler_failures: int = 0  # handlers of published messages that raised
    slow_consumer: int = 0  # told by the client: messages lost before our handler saw them


async def take_slot(slots: asyncio.Semaphore, ended: asyncio.Event) -> bool:
    """Wait for a slot; False, and none is taken, once `ended` is set."""
    taking, ending = asyncio.ensure_future(slots.acquire()), asyncio.ensure_future(ended.wait())
    both: set[asyncio.Future[Any]] = {taking, ending}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ending.cancel()
        taking.cancel()
    await asyncio.wait({taking})
    taken = not taking.cancelled()
    if taken and ended.is_set():
        slots.release()
        taken = False
    return taken


class RequestTasks:
    """Requests in progress of one subscription."""

    def __init__(self, limit: int = MAX_REQUESTS_IN_FLIGHT) -> None:
        self._limit = limit
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def full(self) -> bool:
        return len(self._tasks) >= self._limit

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in a task of its own, kept alive until it ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self, timeout_s: float) -> None:
        """Wait until all have ended; those still running after `timeout_s` are cancelled."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(set(self._tasks), timeout=timeout_s)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
