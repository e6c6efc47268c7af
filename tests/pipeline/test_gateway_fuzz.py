"""Requests broken at random: each is refused or answered, none is a fault of ours, and nothing stays behind."""

from __future__ import annotations

import asyncio
import logging
import random

import pytest

from services.gateway import connection
from tests.pipeline.gateway_support import HEADERS, chat, completion, http_stack
from tests.pipeline.test_gateway_connections import HEALTH, connect, request

COMPLETION = request(completion(max_tokens=2), "/v1/completions")
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key-a\r\nTransfer-Encoding: chunked\r\n\r\n"
)
WHOLE = (
    COMPLETION,
    request(chat(stream=True, max_tokens=2)),
    HEALTH * 3,
    COMPLETION.replace(b"Host: x\r\n", b"Host: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"),
    CHUNKED + b'5\r\n{"mod\r\n0\r\nT: x\r\n\r\n',
    b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://x/health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /%ff%00 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key-a\r\n\r\n",
)
PIECES = (
    b"\r\n",
    b"\r\n\r\n",
    b": ",
    b"Content-Length: 5\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Upgrade: h2c\r\nConnection: upgrade\r\n",
)


def broken(rng: random.Random) -> bytes:
    """A request or two, with up to five faults."""
    data = bytearray(rng.choice(WHOLE) + (rng.choice(WHOLE) if rng.random() < 0.3 else b""))
    for _ in range(rng.choice([0, 0, 1, 1, 2, 5])):
        at, kind = rng.randrange(len(data)), rng.randrange(4)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            del data[at : at + rng.randrange(1, 8)]
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.randrange(1, 6))
        else:
            data[at:at] = rng.choice(PIECES)
        data = data or bytearray(b"x")
    return bytes(data)


@pytest.mark.parametrize("seed", range(3))
async def test_no_bytes_bring_it_down(
    seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.3)
    monkeypatch.setattr(connection, "LINGER_S", 0.02)
    caplog.set_level(logging.ERROR)
    rng = random.Random(seed)
    async with http_stack() as (stack, url):

        async def one(data: bytes, cut: int, patience_s: float) -> bytes:
            reader, writer = await connect(url)
            writer.write(data[:cut])
            await asyncio.sleep(0.001)
            writer.write(data[cut:])
            try:
                return await asyncio.wait_for(reader.read(65536), patience_s)
            except (TimeoutError, ConnectionError):
                return b""
            finally:
                writer.transport.abort()

        for _ in range(10):
            some = [broken(rng) for _ in range(20)]
            asks = [one(data, rng.randrange(len(data) + 1), rng.choice([0.03, 0.5])) for data in some]
            for data, answer in zip(some, await asyncio.gather(*asks), strict=True):
                assert not answer.startswith(b"HTTP/1.1 5"), (data, answer[:200])
        async with asyncio.timeout(30):
            while stack.service.ingress.sessions:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        canary = await stack.client.post("/v1/completions", json=completion(max_tokens=4), headers=HEADERS)
        assert canary.status_code == 200
    assert not caplog.records
