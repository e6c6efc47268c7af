"""An answer's head and what follows it at once, in one call of the system.

The server writes a head when it is told of it. Most heads are followed by a body in the same turn of the event loop,
and two small writes cost this process, and the client's, nearly twice what one does.
"""

from __future__ import annotations

import asyncio
from typing import Protocol


class Begun(Protocol):
    """Knows whether an answer has begun: from then on its head, then its body is written."""

    response_started: bool


class JoinedHead:
    """What an answer is written to, in the place of its connection's transport.

    The first write once the answer has begun is its head; it waits for the next one, but not past this turn of the
    event loop.
    """

    def __init__(self, transport: asyncio.Transport, cycle: Begun) -> None:
        self._transport = transport
        self._cycle: Begun | None = cycle  # until its head is written: it holds this, and would be garbage with it
        self._head = b""

    def write(self, data: bytes) -> None:
        """Send `data` behind everything before it."""
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head + data)  # some Pythons' `writelines` never pauses the protocol
        elif self._cycle is not None and self._cycle.response_started:
            self._cycle, self._head = None, data
            asyncio.get_running_loop().call_soon(self._flush)
        else:
            self._transport.write(data)

    def close(self) -> None:
        """Close the connection once everything is sent."""
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        """True once the connection closes, or is gone."""
        return self._transport.is_closing()

    def _flush(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            if not self._transport.is_closing():
                self._transport.write(head)
