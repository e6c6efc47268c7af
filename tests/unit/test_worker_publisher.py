"""What a worker publishes: at once where the bus takes it, in order where it does not, and never an exception."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from shared.contracts.errors import ProtocolError, Unavailable
from shared.contracts.message import Message
from shared.engine.worker_publisher import Publisher


class Note(Message, frozen=True, kw_only=True):
    number: int = 0


class Wire:
    """A bus that takes messages at once while `open`, and else when it is let go on."""

    def __init__(self) -> None:
        self.open = True
        self.sent: list[int] = []
        self.error: Exception | None = None
        self.goes_on = asyncio.Event()

    def publish_now(self, subject: str, message: msgspec.Struct) -> bool:
        if self.error is not None:
            raise self.error
        if self.open:
            self.sent.append(message.number)  # type: ignore[attr-defined]
        return self.open

    async def publish(self, subject: str, message: msgspec.Struct, *, budget_s: float | None = None) -> None:
        await self.goes_on.wait()
        if self.error is not None:
            raise self.error
        self.sent.append(message.number)  # type: ignore[attr-defined]


def publisher(wire: Any) -> Publisher:
    return Publisher(wire)


async def test_a_message_leaves_before_send_returns() -> None:
    wire = Wire()
    sender = publisher(wire)
    sender.send("s", Note(number=1))
    assert wire.sent == [1]
    await sender.close()


async def test_nothing_overtakes_what_waits() -> None:
    wire = Wire()
    sender = publisher(wire)
    wire.open = False
    sender.send("s", Note(number=1))
    await asyncio.sleep(0)  # the first is with the bus, and none is queued
    wire.open = True
    sender.send("s", Note(number=2))
    assert wire.sent == []
    wire.goes_on.set()
    await sender.flush(30.0)
    sender.send("s", Note(number=3))
    assert wire.sent == [1, 2, 3]
    await sender.close()


async def test_what_cannot_be_sent_is_counted_and_goes_no_further() -> None:
    wire = Wire()
    sender = publisher(wire)
    wire.goes_on.set()
    for wire.error in (ProtocolError("too large"), RuntimeError("a fault")):
        sender.send("s", Note(number=1))
        wire.open = not wire.open
    assert sender.lost == 2
    wire.error, wire.open = None, False
    sender.send("s", Note(number=2))
    wire.error = Unavailable("gone")
    await sender.flush(30.0)
    assert (sender.lost, wire.sent) == (3, [])
    await sender.close()
