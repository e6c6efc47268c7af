"""Freed memory is given back after what was large, once for all that came together."""

from __future__ import annotations

import asyncio

import pytest

from shared.lifecycle import memory
from shared.lifecycle.memory import LARGE_BYTES, GiveBack


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that memory was given back."""
    times: list[int] = []
    monkeypatch.setattr(memory, "give_back", lambda: times.append(1))
    monkeypatch.setattr(memory, "PAUSE_S", 0.01)
    return times


async def done(given: list[int], count: int) -> None:
    async with asyncio.timeout(30):
        while len(given) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_what_is_small_is_not_worth_it(given: list[int]) -> None:
    back = GiveBack()
    back.after(LARGE_BYTES - 1)
    await asyncio.sleep(0.05)
    assert given == []


async def test_several_large_ones_are_one_piece_of_work_and_later_ones_another(given: list[int]) -> None:
    back = GiveBack()
    for _ in range(5):
        back.after(LARGE_BYTES)
    await done(given, 1)
    await asyncio.sleep(0.05)
    assert given == [1]
    back.after(LARGE_BYTES)
    await done(given, 2)


def test_an_event_loop_that_ended_before_does_not_keep_the_next_from_it(given: list[int]) -> None:
    back = GiveBack()

    async def first() -> None:
        back.after(LARGE_BYTES)

    async def second() -> None:
        back.after(LARGE_BYTES)
        await done(given, 1)

    asyncio.run(first())
    asyncio.run(second())


def test_any_system_bears_it() -> None:
    memory.keep_little()
    memory.give_back()
