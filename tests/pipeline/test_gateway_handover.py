"""A gateway's port in a rolling restart: who gets new connections, and what is still answered."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from fastapi import FastAPI, Response

from services.gateway import server
from services.gateway.server import Listener, bind, serve
from shared.bus.bus import Bus
from shared.bus.memory_bus import MemoryBroker
from shared.contracts.messages import Settle
from shared.ingress import ingress, session
from tests.pipeline.gateway_support import HEADERS, Backend, completion, gateway_stack


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KEPT_S", 0.5)


@asynccontextmanager
async def gateway(name: str, port: int, hold: asyncio.Event | None = None) -> AsyncIterator[Listener]:
    """One that says its name, and under `/slow` only when it may."""
    app = FastAPI()

    async def who() -> Response:
        return Response(name)

    async def slow() -> Response:
        assert hold is not None
        await hold.wait()
        return Response(name)

    app.add_api_route("/", who)
    app.add_api_route("/slow", slow)
    async with serve(app, bind("127.0.0.1", port)) as listener:
        yield listener


async def ask(port: int, path: str = "/") -> str:
    """The last word of the answer to a request on a connection of its own. Raises ConnectionError."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    try:
        return (await reader.read()).split()[-1].decode()
    finally:
        writer.close()


async def census(port: int, visitors: int = 60) -> Counter[str]:
    return Counter(await asyncio.gather(*(ask(port) for _ in range(visitors))))


async def test_connections_go_to_who_listens_and_in_a_hand_over_to_the_successor() -> None:
    async with AsyncExitStack() as stack:
        # Given a gateway, and a second one that has the port but does not answer yet
        old = await stack.enter_async_context(gateway("old", 0))
        waiting = bind("127.0.0.1", old.port)
        assert await census(old.port) == {"old": 60}
        waiting.close()
        # When the second one listens, both get some
        await stack.enter_async_context(gateway("new", old.port))
        assert (await census(old.port)).keys() == {"old", "new"}
        # And when the first hands over, nobody comes to it any more, though it listens still
        leaving = asyncio.create_task(old.hand_over())
        await asyncio.sleep(0)
        assert await census(old.port) == {"new": 60}
        await leaving
        assert await census(old.port) == {"new": 60}
        # And a third one gets its share like the second did
        await stack.enter_async_context(gateway("newest", old.port))
        assert (await census(old.port)).keys() == {"new", "newest"}


async def test_no_connection_is_reset_by_a_hand_over() -> None:
    refused: list[str] = []
    served = 0
    over = asyncio.Event()

    async def come(port: int) -> None:
        nonlocal served
        while not over.is_set():
            try:
                await ask(port)
                served += 1
            except (ConnectionError, IndexError) as exc:
                refused.append(repr(exc))

    async with AsyncExitStack() as stack:
        listener = await stack.enter_async_context(gateway("0", 0))
        visitors = [asyncio.create_task(come(listener.port)) for _ in range(8)]
        for number in range(1, 4):
            successor = await stack.enter_async_context(gateway(str(number), listener.port))
            await listener.hand_over()
            listener = successor
        over.set()
        await asyncio.gather(*visitors)
    assert served > 50
    assert refused == []


async def test_what_is_being_answered_is_waited_for_but_not_for_ever() -> None:
    hold = asyncio.Event()
    async with gateway("one", 0, hold) as listener:
        asking = asyncio.create_task(ask(listener.port, "/slow"))
        await asyncio.sleep(0.2)
        await listener.answered(0.2)
        assert not asking.done()
        waiting = asyncio.create_task(listener.answered(20.0))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        hold.set()
        await waiting
        assert await asking == "one"


async def test_a_settlement_nobody_takes_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a request whose settlement does not go through
    away = asyncio.Event()

    async def publish(bus: Bus, settle: Settle) -> None:
        await away.wait()

    monkeypatch.setattr(session, "publish_settlement", publish)
    monkeypatch.setattr(ingress, "SETTLING_S", 0.2)
    backend = Backend(MemoryBroker(), hold=asyncio.Event())
    async with gateway_stack(backend, drain_s=0.1) as stack:
        asking = asyncio.create_task(stack.client.post("/v1/completions", json=completion(), headers=HEADERS))
        await backend.sent()
        # When the gateway stops, which drains it once here and once more on leaving
        await stack.service.drain()
        assert (await asking).status_code == 503
        assert stack.service.ingress.sessions
        # Then the second time takes none
        second = asyncio.ensure_future(stack.service.drain())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert second.done()
        away.set()
