"""Publishing from callbacks that may not wait: in order, one at a time, losing what can't be sent.

Core NATS promises nothing, and every hop that uses this heals a loss by itself (numbers, resends, replays).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

import msgspec
from opentelemetry import context as otel_context
from opentelemetry.context import Context

from shared.bus.bus import Bus
from shared.contracts.errors import BatonError
from shared.lifecycle.tasks import end_tasks

log = logging.getLogger("baton.worker")

MAX_WAITING = 10_000
"""Messages kept while the connection is slow; beyond it the oldest are lost."""


class Publisher:
    """Sends at once what the bus takes at once; the rest queues up, in order, in front of `bus.publish`.

    All methods run on the event loop.
    """

    def __init__(self, bus: Bus) -> None:
        self.lost = 0
        self._bus = bus
        self._waiting: deque[tuple[str, msgspec.Struct, Context | None]] = deque(maxlen=MAX_WAITING)
        self._grown = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def send(self, subject: str, message: msgspec.Struct, context: Context | None = None) -> None:
        """Send or queue a message; `context` is the trace it belongs to."""
        if context is None and self._idle.is_set():
            try:
                if self._bus.publish_now(subject, message):
                    return
            except Exception as exc:
                self._lose(subject, exc)
                return
        self.lost += len(self._waiting) == MAX_WAITING
        self._waiting.append((subject, message, context))
        self._idle.clear()
        self._grown.set()

    async def flush(self, timeout_s: float) -> None:
        """Wait until everything queued was handed to the bus, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("%d messages were not sent in %.1f s", len(self._waiting), timeout_s)

    async def close(self) -> None:
        """Stop; what is still queued is lost."""
        await end_tasks([self._task])

    async def _run(self) -> None:
        while True:
            await self._grown.wait()
            while self._waiting:
                await self._send_one(*self._waiting.popleft())
            self._grown.clear()
            self._idle.set()

    async def _send_one(self, subject: str, message: msgspec.Struct, context: Context | None) -> None:
        token = otel_context.attach(context) if context is not None else None
        try:
            await self._bus.publish(subject, message)
        except Exception as exc:
            self._lose(subject, exc)
        finally:
            if token is not None:
                otel_context.detach(token)

    def _lose(self, subject: str, exc: Exception) -> None:
        self.lost += 1
        if isinstance(exc, BatonError):
            log.debug("lost a message on %s: %s", subject, exc)
        else:
            log.error("a message on %s could not be sent", subject, exc_info=exc)
