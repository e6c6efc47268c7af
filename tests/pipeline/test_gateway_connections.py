"""Clients that misbehave on the connection: they are cut, and leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import weakref
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from services.gateway import app, connection, server
from services.gateway.server import bind
from shared.bus.memory_bus import MemoryBroker
from shared.contracts.errors import BatonError
from shared.ingress.session import Session
from tests.pipeline.gateway_support import MODEL, Backend, Stack, chat, completion, http_stack

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.3)
    monkeypatch.setattr(connection, "UNREAD_S", 0.6)
    monkeypatch.setattr(connection, "CLOSE_S", 0.1)
    monkeypatch.setattr(connection, "LINGER_S", 0.2)


@pytest.fixture
async def served() -> AsyncIterator[tuple[Stack, str]]:
    async with http_stack() as made:
        yield made


@pytest.fixture
def url(served: tuple[Stack, str]) -> str:
    return served[1]


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    where = urlsplit(url)
    return await asyncio.open_connection(where.hostname, where.port)


def request(body: object, path: str = "/v1/chat/completions", key: str = "key-a") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def gone(reader: asyncio.StreamReader, within_s: float = 10.0) -> bytes:
    """What came until the connection ended. Raises TimeoutError when it does not end."""
    found = b""
    async with asyncio.timeout(within_s):
        try:
            while part := await reader.read(65536):
                found += part
        except ConnectionError:
            pass
    return found


async def test_a_connection_without_a_request_is_cut(url: str) -> None:
    reader, writer = await connect(url)
    assert await gone(reader) == b""
    writer.close()


@pytest.mark.parametrize("before", [b"", HEALTH])
async def test_a_head_that_comes_byte_by_byte_is_cut(url: str, before: bytes) -> None:
    reader, writer = await connect(url)
    writer.write(before)
    await asyncio.sleep(0.1)

    async def trickle() -> None:
        for byte in b"GET /health HTTP/1.1\r\nA: " + b"a" * 1000:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)

    trickling = asyncio.create_task(trickle())
    assert (b"200 OK" in await gone(reader)) == bool(before)
    trickling.cancel()
    writer.close()


async def test_a_body_after_its_refusal_does_not_hold_the_connection(url: str) -> None:
    reader, writer = await connect(url)
    writer.write(request("x" * 1000, key="wrong")[:-1000])

    async def trickle() -> None:
        for _ in range(500):
            writer.write(b"x")
            await asyncio.sleep(0.02)

    trickling = asyncio.create_task(trickle())
    assert b" 401 " in await gone(reader)
    trickling.cancel()
    writer.close()


async def test_a_kept_connection_may_be_idle_and_used_again(url: str) -> None:
    reader, writer = await connect(url)
    for _ in range(2):
        writer.write(HEALTH)
        assert b"200 OK" in await reader.readuntil(b"}")
        await asyncio.sleep(0.5)
    writer.close()


async def test_an_answer_may_take_longer_than_a_head() -> None:
    backend = Backend(MemoryBroker(), hold=asyncio.Event())
    async with http_stack(backend) as (_, url):
        reader, writer = await connect(url)
        writer.write(request(chat(stream=True)))
        await asyncio.sleep(0.6)
        assert backend.hold is not None
        backend.hold.set()
        assert b"data: [DONE]" in await reader.readuntil(b"[DONE]")
        writer.close()


async def test_who_never_reads_pipelined_answers_is_cut(url: str) -> None:
    where = urlsplit(url)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, (where.hostname, where.port))

        async def ask_on() -> None:
            while True:
                await loop.sock_sendall(client, HEALTH * 100)

        with pytest.raises(ConnectionError):
            await asyncio.wait_for(ask_on(), 20)


@pytest.mark.parametrize("head", [b"\x16\x03\x01\r\n\r\n", b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n"])
async def test_what_is_no_http_gets_an_error_of_the_usual_shape(url: str, head: bytes) -> None:
    reader, writer = await connect(url)
    writer.write(head)
    status, _, rest = (await gone(reader)).partition(b"\r\n")
    assert status.startswith(b"HTTP/1.1 400")
    assert json.loads(rest.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    writer.close()


async def test_a_client_that_leaves_at_any_point_leaves_no_session(served: tuple[Stack, str]) -> None:
    stack, url = served
    whole = request(completion(stream=True, max_tokens=50), "/v1/completions")
    for cut in (1, 30, len(whole) - 20, len(whole) - 1, len(whole)):
        for pause in (0.0, 0.01, 0.05):
            _, writer = await connect(url)
            writer.write(whole[:cut])
            await asyncio.sleep(pause)
            writer.transport.abort()
    async with asyncio.timeout(5):
        while stack.service.ingress.sessions:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert (await stack.client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 400_000,
        b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: " + b"a" * 400_000,
        b"GET / HTTP/1.1\r\nA: " + b"a" * 40_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"h%d: x\r\n" % number for number in range(200)),
    ],
    ids=("path without end", "long path", "header without end", "long header", "many headers"),
)
async def test_a_head_over_its_bounds_is_431(url: str, head: bytes) -> None:
    reader, writer = await connect(url)
    for first in range(0, len(head), 10_000):
        writer.write(head[first : first + 10_000])
        await asyncio.sleep(0.001)
    assert (await gone(reader)).startswith(b"HTTP/1.1 431 ")
    writer.close()


async def test_a_head_without_end_beside_an_answer_is_bounded() -> None:
    backend = Backend(MemoryBroker(), hold=asyncio.Event())
    async with http_stack(backend) as (_, url):
        reader, writer = await connect(url)
        writer.write(request(chat(stream=True)) + b"GET / HTTP/1.1\r\nA: ")
        await backend.sent()
        for _ in range(10):
            writer.write(b"a" * 10_000)
            await asyncio.sleep(0.01)
        assert backend.hold is not None
        backend.hold.set()
        # the answer is whole, and then the connection ends
        assert b"data: [DONE]" in await gone(reader)
        writer.close()


@pytest.mark.parametrize("cut", [None, 30, 150])
async def test_an_offer_of_http2_changes_nothing(url: str, cut: int | None) -> None:
    whole = request(completion(max_tokens=3), "/v1/completions")
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\nHost: x\r\n"
    whole = whole.replace(b"Host: x\r\n", offer)
    reader, writer = await connect(url)
    for _ in range(2):
        writer.write(whole[:cut])
        await asyncio.sleep(0.02)
        writer.write(b"" if cut is None else whole[cut:])
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        assert head.startswith(b"HTTP/1.1 200 ")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        assert json.loads(await reader.readexactly(length))["usage"]["completion_tokens"] == 3
    writer.close()


async def test_trailers_are_no_headers(url: str) -> None:
    reader, writer = await connect(url)
    body = json.dumps(completion(max_tokens=1)).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
    writer.write(b"%x\r\n%b\r\n0\r\nAuthorization: Bearer key-a\r\n\r\n" % (len(body), body))
    assert (await gone(reader)).startswith(b"HTTP/1.1 401 ")
    writer.close()


async def test_a_body_that_is_broken_on_its_way_is_400_and_leaves_nothing(served: tuple[Stack, str]) -> None:
    stack, url = served
    reader, writer = await connect(url)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key-a\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    writer.write(head + b"2\r\n{}\r\n")
    await asyncio.sleep(0.05)
    writer.write(b"no number\r\n")
    answer = await gone(reader)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"x-request-id") == 1
    assert not stack.service.ingress.sessions
    assert not stack.backend.admits
    writer.close()


async def test_more_requests_than_a_pipeline_may_hold_end_the_connection(url: str) -> None:
    reader, writer = await connect(url)
    writer.write(HEALTH * (2 * connection.MAX_PIPELINED))
    assert (await gone(reader)).count(b"200 OK") < 2 * connection.MAX_PIPELINED
    writer.close()
    # what a client may send ahead is answered, in order
    reader, writer = await connect(url)
    writer.write(HEALTH * 100 + HEALTH.replace(b"Host", b"Connection: close\r\nHost"))
    assert (await gone(reader)).count(b"200 OK") == 101
    writer.close()


async def test_a_kept_connection_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.2)
    async with http_stack() as (_, url):
        reader, writer = await connect(url)
        writer.write(HEALTH)
        answer = await gone(reader)
        assert answer.count(b"200 OK") == 1
        writer.close()


@pytest.mark.parametrize("form", [b"Content-Length: 1000", b"Transfer-Encoding: chunked"])
async def test_a_body_that_does_not_come_is_refused_in_time(form: bytes) -> None:
    async with http_stack(body_timeout_s=0.3) as (stack, url):
        reader, writer = await connect(url)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key-a\r\n%b\r\n\r\n" % form)
        writer.write(b"1\r\n{\r\n" if b"chunked" in form else b"{")
        answer = await gone(reader)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"request_timeout" in answer
        assert not stack.service.ingress.sessions
        writer.close()


async def test_a_client_that_asks_before_it_sends_its_body_sends_none_with_a_wrong_key(url: str) -> None:
    whole = request(completion(max_tokens=3), "/v1/completions")
    expecting = whole.replace(b"Host: x\r\n", b"Host: x\r\nExpect: 100-continue\r\nConnection: close\r\n")
    head, _, body = expecting.partition(b"\r\n\r\n")
    reader, writer = await connect(url)
    writer.write(head.replace(b"key-a", b"wrong") + b"\r\n\r\n")
    assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 401 ")
    writer.close()
    reader, writer = await connect(url)
    writer.write(head + b"\r\n\r\n")
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert (await gone(reader)).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_http_1_0_is_answered_and_closed(url: str) -> None:
    reader, writer = await connect(url)
    whole = request(completion(max_tokens=3, stream=True), "/v1/completions").replace(b"HTTP/1.1", b"HTTP/1.0")
    writer.write(whole)
    answer = await gone(reader)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b" 200 " in head.partition(b"\r\n")[0]
    assert b"transfer-encoding" not in head.lower()
    events = body.split(b"\n\n")
    assert all(event.startswith(b"data: ") for event in events[:-1])
    assert events[-2:] == [b"data: [DONE]", b""]
    writer.close()
    reader, writer = await connect(url)
    writer.write(request(completion(max_tokens=3), "/v1/completions").replace(b"HTTP/1.1", b"HTTP/1.0"))
    head, _, body = (await gone(reader)).partition(b"\r\n\r\n")
    assert b"content-length: %d\r\n" % len(body) in head
    writer.close()


async def test_rubbish_behind_requests_sent_ahead_ends_the_connection() -> None:
    backend = Backend(MemoryBroker(), hold=asyncio.Event())
    async with http_stack(backend) as (stack, url):
        for _ in range(3):
            reader, writer = await connect(url)
            writer.write(request(chat(stream=True)) + HEALTH + b"\x00 rubbish\r\n\r\n")
            await gone(reader)
            writer.close()
        async with asyncio.timeout(30):
            while stack.service.ingress.sessions:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


def test_small_pieces_are_sent_at_once_on_any_event_loop() -> None:
    with bind("127.0.0.1", 0) as sock:
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_an_answered_request_is_gone_without_the_garbage_collector(
    served: tuple[Stack, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: weakref.WeakSet[Session | RequestResponseCycle] = weakref.WeakSet()
    start, answer = Session.start, connection.Connection._start_asgi_task

    def started(session: Session) -> None:
        alive.add(session)
        start(session)

    def answering(self: connection.Connection, cycle: RequestResponseCycle, app: Any) -> None:
        alive.add(cycle)
        answer(self, cycle, app)

    monkeypatch.setattr(Session, "start", started)
    monkeypatch.setattr(connection.Connection, "_start_asgi_task", answering)
    reader, writer = await connect(served[1])
    gc.disable()
    try:
        for stream in (True, False):
            writer.write(request(completion(stream=stream), "/v1/completions"))
            async with asyncio.timeout(30):
                await reader.readuntil(b"[DONE]" if stream else b'"usage"')
                assert alive
                while len(alive) > 1:  # noqa: ASYNC110  # a connection keeps its newest cycle
                    await asyncio.sleep(0.02)
        assert {type(found) for found in alive} <= {RequestResponseCycle}
    finally:
        gc.enable()
        writer.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_a_refused_prompt_is_gone_without_the_garbage_collector(
    served: tuple[Stack, str], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    alive: weakref.WeakSet[BatonError] = weakref.WeakSet()
    answer = app.error_response

    def answering(error: BatonError, *more: Any) -> Any:
        alive.add(error)
        return answer(error, *more)

    monkeypatch.setattr(app, "error_response", answering)
    long = "x" * 2000
    prompts = {"/v1/completions": completion(long), "/v1/responses": {"model": MODEL, "input": long}}
    reader, writer = await connect(served[1])
    gc.disable()
    try:
        writer.write(request(prompts.get(path, chat(long, max_tokens=1)), path))
        async with asyncio.timeout(30):
            assert b" 400 " in await reader.readuntil(b"\r\n")
            while alive:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    finally:
        gc.enable()
        writer.close()
