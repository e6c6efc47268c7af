"""What the bus does while NATS is away, and that everything goes on when it is back."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable

import msgspec
import pytest

from shared.bus.bus import Delivery
from shared.bus.nats_bus import NatsBus
from shared.bus.nats_connection import connect_bus
from shared.contracts.errors import Unavailable
from shared.contracts.message import Message
from tests.servers import NatsServer


class Note(Message, frozen=True, kw_only=True):
    text: str = ""


async def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("store", ["kept", "lost"])
async def test_everything_goes_on_after_a_restart_of_nats(own_nats_server: NatsServer, store: str) -> None:
    async with connect_bus(own_nats_server.url, "a") as one, connect_bus(own_nats_server.url, "b") as two:
        heard: list[str] = []
        stored: list[str] = []

        async def echo(delivery: Delivery) -> msgspec.Struct:
            return Note(text=delivery.message.text)

        async def keep(delivery: Delivery) -> None:
            stored.append(delivery.message.text)

        await one.serve("ask", Note, echo)
        await one.subscribe("tell", Note, lambda delivery: heard.append(delivery.message.text))
        await one.consume("kept", "kept", Note, keep, durable="one")
        await two.publish_durable("kept", Note(text="before"), message_id="1")
        await until(lambda: stored == ["before"])
        term = await two.acquire_lease("x", "me", 1)
        assert term

        own_nats_server.kill()
        await until(lambda: not two.connected and not one.connected)
        assert not two.publish_now("tell", Note(text="lost"))
        with pytest.raises(Unavailable, match="tell"):
            await two.publish("tell", Note())
        with pytest.raises(Unavailable, match="ask"):
            await two.request("ask", Note(), Note, timeout_s=1)
        with pytest.raises(Unavailable, match="lease"):
            await two.acquire_lease("x", "me", 1)

        if store == "lost":
            shutil.rmtree(own_nats_server.folder / "store")
        await asyncio.to_thread(own_nats_server.start)
        await until(lambda: two.connected and one.connected)
        assert await _asked(two, Note(text="again")) == Note(text="again")
        await two.publish("tell", Note(text="hello"))
        await until(lambda: heard == ["hello"])
        async with asyncio.timeout(15):
            while "after" not in stored:
                try:
                    await two.publish_durable("kept", Note(text="after"), message_id="2")
                except Unavailable:
                    assert store == "lost"  # until the consumer has made the stream anew
                await asyncio.sleep(0.1)
        assert stored.count("before") == 1
        # a lease can be had again, and in no lower term: a lower one would be refused everywhere
        async with asyncio.timeout(15):
            while (later := await _leased(two)) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        assert later >= term


async def test_a_fault_while_reading_is_taken_for_a_lost_connection(
    own_nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect_bus(own_nats_server.url, "a") as bus:
        heard: list[str] = []
        await bus.subscribe("tell", Note, lambda delivery: heard.append(delivery.message.text))
        parse, faults = bus._client._ps.parse, [ValueError("boom")]

        async def faulty(data: bytes = b"") -> None:
            if faults:
                raise faults.pop()
            await parse(data)

        monkeypatch.setattr(bus._client._ps, "parse", faulty)
        await bus._client._send_ping()
        await until(lambda: bus._client.stats["reconnects"] == 1 and bus.connected)
        await bus.publish("tell", Note(text="hello"))
        await until(lambda: heard == ["hello"])


async def _asked(bus: NatsBus, note: Note) -> Note:
    """The answer; the server may hear of who answers a moment behind who asks."""
    async with asyncio.timeout(30):
        while True:
            try:
                found: Note = await bus.request("ask", note, Note, timeout_s=2)
                return found
            except Unavailable:
                await asyncio.sleep(0.05)


async def _leased(bus: NatsBus) -> int | None:
    try:
        return await bus.acquire_lease("x", "another", 1)
    except Unavailable:
        return None


async def test_no_server_is_told_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.bus.nats_connection.CONNECT_TIMEOUT_S", 0.3)
    with pytest.raises(Unavailable, match=r"no connection to NATS at nats://127\.0\.0\.1:1"):
        async with connect_bus("nats://user:secret@127.0.0.1:1", "a"):
            pass


async def test_leaving_while_nats_is_away_ends(own_nats_server: NatsServer) -> None:
    async def never(delivery: Delivery) -> None:
        raise AssertionError

    async with asyncio.timeout(20):
        async with connect_bus(own_nats_server.url, "a") as bus:
            await bus.subscribe("x", Note, lambda delivery: None)
            await bus.consume("kept", "kept", Note, never, durable="one")
            own_nats_server.kill()
            await until(lambda: not bus.connected)
