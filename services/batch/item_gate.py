"""Many items at once, or one alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class RunGate:
    """Whoever wants to be alone waits until those inside have left; meanwhile nobody else comes in."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._inside = 0
        self._alone_wanted = 0
        self._alone = False

    @asynccontextmanager
    async def entered(self, *, alone: bool) -> AsyncIterator[None]:
        """Inside, with others or alone."""
        await (self._enter_alone() if alone else self._enter())
        try:
            yield
        finally:
            async with self._changed:
                self._inside -= 1
                self._alone = False
                self._changed.notify_all()

    async def _enter(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._alone and not self._alone_wanted)
            self._inside += 1

    async def _enter_alone(self) -> None:
        async with self._changed:
            self._alone_wanted += 1
            try:
                await self._changed.wait_for(lambda: self._inside == 0)
                self._inside, self._alone = 1, True
            finally:
                self._alone_wanted -= 1
                self._changed.notify_all()
