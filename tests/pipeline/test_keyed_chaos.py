"""Clients that drop and resume at random, of gateways that die at random: every one has the whole text, once."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest

from shared.store.redis_store import connect_redis
from tests.pipeline.gateway_support import MODEL, default_output
from tests.pipeline.keyed_support import Gateway, World, keyed_world
from tests.servers import RedisServer

BODY: dict[str, Any] = {"model": MODEL, "prompt": "hi", "temperature": 0, "stream": True}
TEXT = default_output("hi")
GATEWAYS, CLIENTS, KEYS = 3, 6, 2
SILENCE_S = 1.0
"""A gateway that died says nothing; here its connections stay, as its process does."""
LIMIT_S = 60.0


class Client:
    """Reads one keyed stream, in as many pieces as chance has it."""

    def __init__(self, world: World, rng: random.Random, key: str) -> None:
        self.world = world
        self.rng = rng
        self.key = key
        self.last = ""
        self.text = ""
        self.finishes: list[str] = []
        self.done = False
        self.log: list[str] = []

    async def read(self) -> None:
        while not self.done:
            living = [gateway for gateway in self.world.gateways if not gateway.killed]
            try:
                await self._read_some(self.rng.choice(living), self.rng.randint(1, 12))
            except httpx.HTTPError as exc:
                self.log.append(type(exc).__name__)
                await asyncio.sleep(0.05)

    async def _read_some(self, gateway: Gateway, count: int) -> None:
        headers = {"authorization": "Bearer key-a", "idempotency-key": self.key}
        if self.last:
            headers["last-event-id"] = self.last
        request = gateway.client.stream("POST", "/v1/completions", json=BODY, headers=headers, timeout=SILENCE_S)
        async with request as response:
            self.log.append(f"{gateway.id} {response.status_code} {self.last}")
            if response.status_code != 200:
                assert response.status_code == 503, await response.aread()
                await asyncio.sleep(0.1)
                return
            name = ""
            async for line in response.aiter_lines():
                name = line.removeprefix("id: ") if line.startswith("id: ") else name
                if line.startswith("data: ") and (not self._take(name, line.removeprefix("data: ")) or self.done):
                    return
                count -= line.startswith("data: ")
                if not count:
                    return

    def _take(self, name: str, data: str) -> bool:
        """Take an event; False at an error, behind which the stream is asked for again."""
        if data == "[DONE]":
            self.done = True
            return True
        event = json.loads(data)
        if "error" in event:
            self.log.append(event["error"]["code"])
            return False
        self.last = name
        for choice in event["choices"]:
            self.text += choice["text"]
            self.finishes += [choice["finish_reason"]] if choice["finish_reason"] else []
        return True


async def mixture(server: RedisServer, seed: int) -> None:
    rng = random.Random(seed)
    async with (
        connect_redis(server.url) as redis,
        keyed_world(redis, GATEWAYS, step_s=0.03, tokens_per_frame=rng.randint(1, 5)) as world,
    ):
        clients = [Client(world, rng, f"k{number % KEYS}") for number in range(CLIENTS)]
        reading = [asyncio.create_task(client.read()) for client in clients]
        for gateway in rng.sample(world.gateways, rng.randint(0, GATEWAYS - 1)):
            await asyncio.sleep(rng.uniform(0.1, 1.0))
            await gateway.kill()
        await asyncio.wait_for(asyncio.gather(*reading), LIMIT_S)
        for client in clients:
            assert client.text == TEXT, (seed, client.log)
            assert client.finishes == ["stop"], (seed, client.log)
        # whoever settled, only the highest epoch of a request counts in the ledger
        assert len({settle.attempt.request_id for settle in world.backend.settles}) <= KEYS


@pytest.mark.parametrize("seed", [20])
async def test_drops_and_deaths_lose_and_repeat_nothing(redis_server: RedisServer, seed: int) -> None:
    await mixture(redis_server, seed)


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_many_drops_and_deaths(redis_server: RedisServer) -> None:
    for seed in range(40):
        await mixture(redis_server, seed)
