"""Cases of reference reports on the queue: consumers of a real NATS server."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from shared.bus import nats_consumer
from shared.bus.bus import Delivery
from shared.bus.nats_connection import connect_bus
from shared.bus.streams import stream_name
from shared.contracts.message import Message
from tests.servers import NatsServer

ACK_WAIT_S = 3.0
"""The case says 5, and jobs of 20: four times as long."""
JOBS, SLOTS = 10, 3


class Job(Message, frozen=True, kw_only=True):
    name: str = ""


async def test_op59_work_longer_than_the_ack_deadline(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_consumer, "SLOT_ACK_WAIT_S", ACK_WAIT_S)
    starts: Counter[str] = Counter()
    done: list[str] = []

    async def work(delivery: Delivery) -> None:
        starts[delivery.message.name] += 1
        await asyncio.sleep(4 * ACK_WAIT_S)
        done.append(delivery.message.name)

    async with connect_bus(nats_server.url, "one") as one, connect_bus(nats_server.url, "two") as two:
        # Given ten jobs, and two workers that take more than they have slots for
        for bus in (one, two):
            await bus.consume("op59", "op59", Job, work, durable="op59", slots=asyncio.Semaphore(SLOTS))
        for number in range(JOBS):
            await one.publish_durable("op59", Job(name=str(number)), message_id=str(number))
        # When each takes four times as long as an acknowledgement may
        async with asyncio.timeout(120):
            while len(done) < JOBS:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        # Then each was begun once, and the server has delivered none again
        assert starts == Counter({str(number): 1 for number in range(JOBS)})
        found = await one._client.jetstream().consumer_info(stream_name("op59"), "op59")
        assert found.num_redelivered == 0
