"""Messages that are written at once, to a server that takes them, takes a part of them, or is another one by now."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import nats.errors
import pytest
import uvloop

from shared.bus.nats_client import DirectClient
from shared.bus.nats_connection import connect_bus
from shared.contracts.message import Message
from tests.nats.test_reconnect import until
from tests.servers import NatsServer


class Page(Message, frozen=True, kw_only=True):
    number: int = 0
    text: str = ""


Loop = Callable[[], asyncio.AbstractEventLoop]
LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
"""Services run on the second."""


@LOOPS
def test_what_a_full_connection_takes_in_parts_arrives_whole_and_in_order(
    own_nats_server: NatsServer, loop: Loop
) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(_fill_a_connection(own_nats_server))


async def _fill_a_connection(own_nats_server: NatsServer) -> None:
    assert own_nats_server.process is not None
    async with connect_bus(own_nats_server.url, "a") as one, connect_bus(own_nats_server.url, "b") as two:
        heard: list[tuple[int, int]] = []
        await one.subscribe("page", Page, lambda d: heard.append((d.message.number, len(d.message.text))))
        own_nats_server.process.send_signal(signal.SIGSTOP)
        number = 0
        try:
            while two.publish_now("page", Page(number=number, text="x" * 50_000)):
                number += 1
                if number % 10 == 0:  # by the other way too
                    await two.publish("page", Page(number=number, text="y" * 50_000))
                    number += 1
                assert number < 10_000
        finally:
            own_nats_server.process.send_signal(signal.SIGCONT)
        assert number > 5, "the connection's own room, and 256 KiB behind it"
        await until(lambda: len(heard) == number)
        assert heard == [(n, 50_000) for n in range(number)]


@LOOPS
def test_the_next_connection_is_written_to_after_the_first_is_gone(own_nats_server: NatsServer, loop: Loop) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(_lose_a_connection(own_nats_server))


async def _lose_a_connection(own_nats_server: NatsServer) -> None:
    async with connect_bus(own_nats_server.url, "a") as one, connect_bus(own_nats_server.url, "b") as two:
        heard: list[int] = []
        await one.subscribe("page", Page, lambda delivery: heard.append(delivery.message.number))
        assert two.publish_now("page", Page(number=1))
        await until(lambda: heard == [1])
        own_nats_server.kill()
        await until(lambda: not one.connected and not two.connected)
        assert not two.publish_now("page", Page(number=2))
        own_nats_server.start()
        await until(lambda: one.connected and two.connected)
        await until(lambda: two.publish_now("page", Page(number=3)) and 3 in heard)
        assert 2 not in heard


async def test_a_subject_that_is_none_is_left_to_the_library(own_nats_server: NatsServer) -> None:
    async with connect_bus(own_nats_server.url, "a") as bus:
        assert not bus.publish_now("two words", Page())
        assert bus.connected


async def test_headers_that_make_a_message_too_large_end_no_connection(own_nats_server: NatsServer) -> None:
    client = DirectClient()
    await client.connect(own_nats_server.url)
    try:
        most = client.max_payload
        for size in (most, most - 20):
            with pytest.raises(nats.errors.MaxPayloadError):
                await client.publish("a", b"x" * size, headers={"name": "value"})
        await client.publish("a", b"x" * (most - len(b"NATS/1.0\r\nname: value\r\n\r\n")), headers={"name": "value"})
        await client.flush(30)
        assert client.is_connected
    finally:
        await client.close()
