"""A client that sends bytes as they are, and reads answers by the book."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import pairwise
from urllib.parse import urlsplit

import h11

from tests.pipeline.fuzz_cases import Case

PATIENCE_S = 60.0


@dataclass(frozen=True)
class Answer:
    """What came back. Status 0: nothing, as the connection ended.

    `whole`: it came to its end; `kept`: the connection can be used again.
    """

    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool
    kept: bool

    @property
    def kind(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0]


class RawClient:
    """One connection at a time; a new one where the old one ended. `used`: the last answer came on a used one."""

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        self._host, self._port = where.hostname, where.port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.used = False

    async def send(self, case: Case) -> Answer:
        """Send it, and read its answer. Raises TimeoutError, h11.RemoteProtocolError for what is no HTTP."""
        self.used = self._streams is not None
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        sending = asyncio.create_task(_write(writer, case))
        try:
            async with asyncio.timeout(PATIENCE_S):
                answer = await _read(reader)
                if answer.kept and not case.short:
                    await sending
                else:
                    await self._ended(reader)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            if not sending.cancelled() and isinstance(sending.exception(), OSError):
                self.close()
        return answer

    async def _ended(self, reader: asyncio.StreamReader) -> None:
        """What says that it ends the connection does."""
        try:
            rest = await reader.read()
        except ConnectionError:
            rest = b""
        assert not rest, f"behind the last answer of a connection came {rest[:200]!r}"
        self.close()

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None


async def _write(writer: asyncio.StreamWriter, case: Case) -> None:
    raw = case.raw[: -case.short] if case.short else case.raw
    edges = [0, *(cut for cut in case.cuts if cut < len(raw)), len(raw)]
    for begin, end in pairwise(edges):
        writer.write(raw[begin:end])
        await writer.drain()
        await asyncio.sleep(0)
    if case.short:
        writer.write_eof()


async def _read(reader: asyncio.StreamReader) -> Answer:
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="POST", target="/", headers=[("host", "x")]))
    connection.send(h11.EndOfMessage())
    head: h11.Response | None = None
    body = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            try:
                data = await reader.read(65536)
            except ConnectionError:
                data = b""
            if not data and head is None and not connection.trailing_data[0]:
                return Answer(0, {}, b"", whole=False, kept=False)
            connection.receive_data(data)
        elif isinstance(event, h11.Response):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            assert head is not None
            headers = {name.decode(): value.decode("latin-1") for name, value in head.headers}
            kept = connection.their_state is h11.DONE
            return Answer(head.status_code, headers, bytes(body), whole=True, kept=kept)
