"""Messages handled with slots: in hand for as long as that takes, and another's when the process is gone."""

from __future__ import annotations

import asyncio

import pytest

from shared.bus import nats_consumer
from shared.bus.bus import Delivery
from shared.bus.nats_connection import connect_bus
from shared.contracts.message import Message
from tests.servers import NatsServer

ACK_WAIT_S = 1.5


class Note(Message, frozen=True, kw_only=True):
    text: str = ""


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_consumer, "SLOT_ACK_WAIT_S", ACK_WAIT_S)


async def test_a_message_stays_in_hand_while_it_waits_and_while_it_is_handled(nats_server: NatsServer) -> None:
    seen: list[str] = []
    done = asyncio.Event()

    async def slow(delivery: Delivery) -> None:
        seen.append(delivery.message.text)
        await asyncio.sleep(2 * ACK_WAIT_S)
        if len(seen) == 2:
            done.set()

    async with connect_bus(nats_server.url, "one") as one, connect_bus(nats_server.url, "two") as two:
        await one.consume("in-hand", "in-hand", Note, slow, durable="batch", slots=asyncio.Semaphore(1))
        for text in "ab":
            await one.publish_durable("in-hand", Note(text=text), message_id=text)
        await asyncio.sleep(0.3)  # one is handled, and the other waits for its slot
        await two.consume("in-hand", "in-hand", Note, slow, durable="batch", slots=asyncio.Semaphore(4))
        await asyncio.wait_for(done.wait(), 20)
        assert seen == ["a", "b"]


async def test_what_a_dead_process_had_in_hand_comes_to_another(nats_server: NatsServer) -> None:
    seen: list[str] = []

    async def hanging(delivery: Delivery) -> None:
        seen.append("first")
        await asyncio.sleep(0.5)

    async def take(delivery: Delivery) -> None:
        seen.append("second")

    async with connect_bus(nats_server.url, "one") as one, connect_bus(nats_server.url, "two") as two:
        await one.consume("lost", "lost", Note, hanging, durable="batch", slots=asyncio.Semaphore(1))
        await one.publish_durable("lost", Note(text="a"), message_id="a")
        while not seen:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await one._client.close()  # as the end of the process would: no goodbye
        await two.consume("lost", "lost", Note, take, durable="batch", slots=asyncio.Semaphore(1))
        async with asyncio.timeout(20):
            while len(seen) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert seen == ["first", "second"]
