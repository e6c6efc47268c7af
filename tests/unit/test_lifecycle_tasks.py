"""Tasks end when their owner says so, and periodic work survives its failures."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from shared.contracts.errors import Unavailable
from shared.lifecycle import tasks
from shared.lifecycle.tasks import end_tasks, every


async def test_a_task_that_swallows_a_cancellation_is_ended_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "END_S", 0.05)
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if swallowed == 2:
                    raise
                swallowed += 1

    loops = [asyncio.create_task(stubborn()), asyncio.create_task(asyncio.sleep(60))]
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await end_tasks(loops)
    assert swallowed == 2
    assert all(loop.cancelled() for loop in loops)


async def test_a_task_that_cleans_up_is_waited_for() -> None:
    cleaned = False

    async def tidy() -> None:
        nonlocal cleaned
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            cleaned = True

    task = asyncio.create_task(tidy())
    await asyncio.sleep(0)
    await end_tasks([task])
    assert cleaned


async def test_there_may_be_nothing_to_end() -> None:
    await end_tasks([])


async def test_periodic_work_goes_on_after_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    turns: list[float] = []

    async def work() -> None:
        turns.append(time.monotonic())
        if len(turns) == 1:
            raise Unavailable("redis: gone")
        if len(turns) == 2:
            raise ZeroDivisionError

    with caplog.at_level(logging.WARNING):
        loop = asyncio.create_task(every(0.01, work, logging.getLogger("baton.test")))
        async with asyncio.timeout(5):
            while len(turns) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await end_tasks([loop])
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    assert "redis: gone" in caplog.text
