"""What the NATS server sends, read where it arrives: no stream, no task that is woken for each piece.

Messages of subscriptions that take them at once, and answers, are cut out and handed over in the socket's own callback.
Everything else (pings, errors, JetStream's) goes through nats-py's parser, one command at a time and in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

CRLF = b"\r\n"
MAX_LINE_BYTES = 64 * 1024
"""A control line is shorter, also the one in which a server tells of its cluster."""

Take = Callable[[int, bytes, bytes, bytes, bytes], bool]
"""Of a message: subscription id, subject, reply subject ('' when none), headers ('' when none), payload."""


class Malformed(Exception):
    """This is no line of the protocol."""


class Inner(Protocol):
    """The protocol that asyncio's streams put on the socket: it keeps the writer's flow control."""

    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...


class DirectReader(asyncio.Protocol):
    """In the place of a stream's protocol on the socket of one connection.

    Args:
        inner: what was there before; it goes on to hear of the writing side and of the end.
        take: hands a message over; False: it is none to be handed over here.
    """

    def __init__(self, inner: Inner, take: Take) -> None:
        self._inner = inner
        self._take = take
        self._buffer = bytearray()
        self._command = b""  # what is nats-py's; nothing behind it is looked at until it is done with
        self._given = False
        self._fault: Exception | None = None
        self._ended = False
        self._news = asyncio.Event()

    async def command(self) -> bytes:
        """The next command that is not handed over here; asked for when the one before is done with.

        Raises EOFError, OSError, Malformed: nothing more comes.
        """
        if self._given:
            self._command, self._given = b"", False
            self._cut()
        while not self._command:
            if self._fault is not None:
                raise self._fault
            self._news.clear()
            await self._news.wait()
        self._given = True
        return self._command

    def ended(self, exc: Exception | None) -> None:
        """The connection has ended, of itself or by `exc`; what came before it is still told."""
        self._fail(exc if isinstance(exc, OSError) else EOFError("the server closed the connection"))

    def stop(self) -> None:
        """Hand nothing over any more."""
        self._ended = True
        self._buffer.clear()

    # ------------------------------------------------------------------------------------------ asyncio's protocol

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        self._buffer += data
        if not self._command:
            self._cut()

    def eof_received(self) -> bool:
        return False  # the transport closes, which tells the rest

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended(exc)
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    # ------------------------------------------------------------------------------------------ inside

    def _fail(self, fault: Exception) -> None:
        if self._fault is None:
            self._fault = fault
        self._news.set()

    def _cut(self) -> None:
        """Hand over what is whole, up to the first command that is not for here."""
        buffer, start = self._buffer, 0
        try:
            while not self._command and (end := buffer.find(CRLF, start)) >= 0:
                whole = self._one(start, end)
                if whole <= start:
                    break
                start = whole
            else:
                if not self._command and len(buffer) - start > MAX_LINE_BYTES:
                    raise Malformed("a control line is too long")
        except Malformed as fault:
            self._fail(fault)
            self.stop()
            return
        if start:
            del buffer[:start]

    def _one(self, start: int, end: int) -> int:
        """The command whose line is here: where the next one begins; `start` while its payload is not whole."""
        words = bytes(self._buffer[start:end]).split(b" ")  # a subject may hold other blanks
        if (kind := words[0]) not in (b"MSG", b"HMSG"):
            self._hand_on(start, end + 2)
            return end + 2
        sizes = 1 if kind == b"MSG" else 2
        extra = len(words) - 3 - sizes  # 1 with a reply subject
        try:
            number, total = int(words[2]), int(words[-1])
            split = int(words[-2]) if sizes == 2 else 0
        except (ValueError, IndexError) as exc:
            raise Malformed("a message's line does not parse") from exc
        if extra not in (0, 1) or not 0 <= split <= total:
            raise Malformed("a message's line does not parse")
        body = end + 2
        whole = body + total + 2
        if len(self._buffer) < whole:
            return start
        middle = body + split
        headers, payload = bytes(self._buffer[body:middle]), bytes(self._buffer[middle : whole - 2])
        if not self._take(number, words[1], words[3] if extra else b"", headers, payload):
            self._hand_on(start, whole)
        return whole

    def _hand_on(self, start: int, end: int) -> None:
        self._command = bytes(self._buffer[start:end])
        self._news.set()
