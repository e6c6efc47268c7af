"""Streamed answers as benchmarks read them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from loadtest.http_stream import post
from shared.contracts.errors import Unavailable

CHUNKED = (
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    "8\r\ndata: \xc3\xa9\r\n3\r\n\r\n\n\r\nd\r\ndata: [DONE]\n\r\n0\r\n\r\n"
).encode("latin-1")
LINES = ["data: é", "", "data: [DONE]"]


def heard(pieces: Sequence[bytes], *, stays_open: bool = False, fault: Exception | None = None) -> list[str]:
    """The lines of an answer that comes in these pieces. The request is looked at too."""
    lines: list[str] = []

    def hear(line: str) -> None:
        lines.append(line)
        if fault:
            raise fault

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/x HTTP/1.1\r\nHost: 127.0.0.1:"), head
        assert b"\r\nX-Key: k\r\n" in head
        assert await reader.readexactly(4) == b"body"
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if stays_open:
            await reader.read()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            await post(f"http://127.0.0.1:{port}/v1/x", {"X-Key": "k"}, b"body", hear, 30.0)

    asyncio.run(run())
    return lines


def test_an_answer_may_be_cut_anywhere() -> None:
    """And is at its end where it says so, whether the connection stays or not."""
    assert heard([CHUNKED], stays_open=True) == LINES
    assert heard([CHUNKED[i : i + 1] for i in range(len(CHUNKED))], stays_open=True) == LINES
    assert heard([b"HTTP/1.0 200 OK\r\n\r\n", b"data: a\n", b"\ndata: b\n"]) == ["data: a", "", "data: b"]


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([], "the connection was closed"),
        ([b"HTTP/1.1 50"], "the connection was closed"),
        ([b"SSH-2.0-x\r\n"], "Error"),
        ([b"HTTP/1.1 503 No\r\nContent-Length: 7\r\n\r\n", b"not", b" now"], "HTTP 503: not now"),
    ],
    ids=["nothing", "half a head", "no HTTP", "refused"],
)
def test_what_is_no_answer_is_told(pieces: list[bytes], words: str) -> None:
    with pytest.raises(Unavailable, match=words):
        heard(pieces)


def test_a_fault_of_the_listener_ends_the_request() -> None:
    with pytest.raises(ValueError, match="bad event"):
        heard([CHUNKED], stays_open=True, fault=ValueError("bad event"))
