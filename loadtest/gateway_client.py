"""A client that costs little: raw HTTP/1.1 over asyncio, which counts tokens and notes when they came.

It does not parse events, so that what is measured is the server: a token is a `data:` line with text.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import cast

TEXT = b'"finish_reason":null'
"""In every chunk with text, and in no other of a completion."""
LAST_CHUNK = b"\r\n0\r\n\r\n"
LIMIT_S = 60.0


@dataclass(slots=True)
class Heard:
    """One streamed answer. Times are monotonic seconds."""

    sent: float = 0.0
    at: list[float] = field(default_factory=list)  # of each token
    request_id: str = ""
    status: int = 0
    whole: bool = False  # it ended with [DONE]


def post(body: object, key: str) -> bytes:
    """A request for a completion."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {key}\r\n"
    return head.encode() + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data) + data


class Client(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self._heard = Heard()
        self._done: asyncio.Future[None] | None = None
        self._tail = b""
        self._left = -1  # of a body whose length is known; negative: it is chunked
        self._transport: asyncio.WriteTransport | None = None

    async def ask(self, request: bytes) -> Heard:
        """Send a request and read its answer to the end. Raises ConnectionError, TimeoutError."""
        assert self._transport is not None
        self._heard, self._tail = Heard(sent=time.monotonic()), b""
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        async with asyncio.timeout(LIMIT_S):
            await self._done
        return self._heard

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        heard = self._heard
        if not heard.status:
            data = self._read_head(data)
        # a chunk may be cut anywhere: what could be the begin of a mark is looked at again
        looked = self._tail + data
        if count := looked.count(TEXT):
            heard.at.extend([time.monotonic()] * count)
        self._tail = looked[-(len(TEXT) - 1) :]
        self._left -= len(data)
        if self._left == 0 or (self._left < 0 and looked.endswith(LAST_CHUNK)):
            heard.whole = b"[DONE]" in looked
            if self._done is not None and not self._done.done():
                self._done.set_result(None)

    def _read_head(self, data: bytes) -> bytes:
        """Take the head, which comes in one piece; what stands behind it."""
        head, _, rest = data.partition(b"\r\n\r\n")
        head = head.lower() + b"\r\n"
        self._heard.status = int(data[9:12])
        self._heard.request_id = head.partition(b"\r\nx-request-id: ")[2].partition(b"\r\n")[0].decode()
        self._left = int(head.partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0] or -1)
        return rest


async def connect(port: int) -> Client:
    """A connection to the gateway at `port` on loopback. Raises OSError."""
    _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port)
    return client
