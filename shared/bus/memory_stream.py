"""Streams and durable consumers of the bus inside one process: what JetStream is to the real one."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from opentelemetry import context as otel_context

from shared.bus import envelope
from shared.bus.bus import DurableHandler, Redeliver
from shared.bus.subscriptions import BusStats, take_slot
from shared.contracts.errors import ProtocolError

log = logging.getLogger("baton.bus")

MAX_REDELIVERY_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Parcel:
    """A message on its way."""

    subject: str
    payload: bytes
    headers: envelope.Headers | None
    reply: asyncio.Future[Parcel] | None = None


@dataclass(slots=True)
class Stream:
    """Messages of one stream in order, ids seen; per durable consumer the place of its next message, and how many it is
    done with."""

    subject: str
    parcels: list[Parcel] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    places: dict[str, int] = field(default_factory=dict)
    again: dict[str, deque[int]] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    grown: asyncio.Event = field(default_factory=asyncio.Event)


def matches(pattern: str, subject: str) -> bool:
    """NATS subject matching: `*` stands for one token, `>` for one or more at the end."""
    wanted, given = pattern.split("."), subject.split(".")
    for index, token in enumerate(wanted):
        if token == ">":
            return len(given) > index
        if index >= len(given) or token not in ("*", given[index]):
            return False
    return len(wanted) == len(given)


class DurableReplica:
    """One replica of a durable consumer; replicas share the place in the stream."""

    def __init__(
        self,
        stats: BusStats,
        stream: Stream,
        subject: str,
        durable: str,
        message_type: Any,
        handler: DurableHandler,
        slots: asyncio.Semaphore | None,
    ) -> None:
        self._stats = stats
        self._stream = stream
        self._subject = subject
        self._durable = durable
        self._message_type = message_type
        self._handler = handler
        self._slots = slots
        self._failures = 0
        self._running: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._loop = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Messages in hand are finished first; an unfinished one is kept for the next replica."""
        self._stopping.set()
        self._stream.grown.set()
        await self._loop
        if self._running:
            await asyncio.wait(self._running)

    async def _run(self) -> None:
        while not self._stopping.is_set():
            index = self._next()
            if index is None:
                self._stream.grown.clear()
                await self._stream.grown.wait()
            elif self._slots is not None:
                await self._begin(index, self._slots)
            else:
                self._close(index, await self._handled(index))

    async def _begin(self, index: int, slots: asyncio.Semaphore) -> None:
        """Handle a message in a task of its own, once there is a slot."""
        if not matches(self._subject, self._stream.parcels[index].subject):
            self._stream.done[self._durable] += 1
            return
        if not await take_slot(slots, self._stopping):
            self._stream.again[self._durable].appendleft(index)
            return

        async def handled() -> None:
            try:
                pause = await self._handled(index)
            finally:
                slots.release()
            self._close(index, pause)

        task = asyncio.create_task(handled())
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _close(self, index: int, pause: float | None) -> None:
        """Done with it, or it comes again after a pause, in which those behind it have their turn."""
        if pause is None:
            self._stream.done[self._durable] += 1
        else:
            asyncio.get_running_loop().call_later(pause, self._put_back, index)

    def _put_back(self, index: int) -> None:
        self._stream.again[self._durable].append(index)
        self._stream.grown.set()

    def _next(self) -> int | None:
        again = self._stream.again[self._durable]
        if again:
            return again.popleft()
        places = self._stream.places
        index = places[self._durable]
        if index == len(self._stream.parcels):
            return None
        places[self._durable] = index + 1
        return index

    async def _handled(self, index: int) -> float | None:
        """None when the message is done with, undecodable and foreign ones included; else seconds until it comes
        again."""
        parcel = self._stream.parcels[index]
        if not matches(self._subject, parcel.subject):
            return None
        try:
            delivery = envelope.incoming(
                parcel.subject, parcel.payload, parcel.headers, self._message_type, stored_id=f"{index + 1}-0"
            )
        except ProtocolError as exc:
            self._stats.undecodable += 1
            log.warning("dropped a message on %s: %s", parcel.subject, exc)
            return None
        token = otel_context.attach(delivery.context)
        try:
            await self._handler(delivery)
        except Redeliver as again:
            return again.pause_s
        except Exception:
            self._stats.handler_failures += 1
            log.exception("handler of %s failed", parcel.subject)
            self._failures += 1
            return float(min(MAX_REDELIVERY_PAUSE_S, 0.01 * 2 ** min(self._failures, 10)))
        finally:
            otel_context.detach(token)
        self._failures = 0
        return None
