"""One streamed answer over HTTP/1.1, read at little cost: it is read on the cores of the server that is measured."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import httptools

from shared.contracts.errors import Unavailable

OnLine = Callable[[str], None]


async def post(url: str, headers: Mapping[str, str], body: bytes, on_line: OnLine, limit_s: float) -> None:
    """Send a request on a connection of its own, and read its answer to the end.

    Args:
        on_line: gets each line of the answer as it comes, without its end. What it raises ends the request.

    Raises:
        Unavailable: no connection, one that broke, a status other than 200, or no end within `limit_s`.
    """
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    host, port = parts.hostname or "", parts.port or (443 if secure else 80)
    try:
        async with asyncio.timeout(limit_s):
            transport, answer = await asyncio.get_running_loop().create_connection(
                lambda: _Answer(on_line), host, port, ssl=secure or None
            )
            try:
                transport.write(_head(parts.netloc, parts.path, {**headers, "Content-Length": str(len(body))}) + body)
                await answer.ended
            finally:
                transport.abort()
    except (OSError, httptools.HttpParserError) as exc:  # of which a time-out is one
        raise Unavailable(f"{url}: {exc!r}") from exc
    if answer.status != 200:
        raise Unavailable(f"{url}: HTTP {answer.status}: {bytes(answer.refusal).decode(errors='replace')[:300]}")


def _head(host: str, path: str, headers: Mapping[str, str]) -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


class _Answer(asyncio.Protocol):
    """A connection that reads one answer; `ended` is done when there is no more of it."""

    def __init__(self, on_line: OnLine) -> None:
        self._on_line = on_line
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self.status = 0
        self.refusal = bytearray()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._end(exc)

    def connection_lost(self, exc: Exception | None) -> None:
        # an answer without a length ends so
        self._end(exc or (None if self.status else ConnectionResetError("the connection was closed")))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, part: bytes) -> None:
        if self.status != 200:
            self.refusal += part
            return
        *lines, self._rest = (self._rest + part).split(b"\n")
        try:
            for line in lines:
                self._on_line(line.removesuffix(b"\r").decode())
        except Exception as exc:  # whoever waits gets it
            self._end(exc)

    def on_message_complete(self) -> None:
        self._end(None)

    def _end(self, fault: Exception | None) -> None:
        if self.ended.done():
            return
        if fault is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(fault)
