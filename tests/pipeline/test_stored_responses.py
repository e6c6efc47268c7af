"""Stored responses by the official client, unchanged, against gateways over policy's own desk and a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from shared.store.redis_store import RedisStore, connect_redis
from tests.pipeline.gateway_support import MODEL, default_output
from tests.pipeline.keyed_support import World, keyed_world, until
from tests.pipeline.test_gateway_openai import client
from tests.servers import RedisServer

TEXT = default_output("")


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[RedisStore]:
    async with connect_redis(redis_server.url) as redis:
        yield redis


def ai_of(world: World, number: int = 0, key: str = "key-a") -> openai.AsyncOpenAI:
    return client(world.gateways[number].url, key, strict=False)


async def test_a_stored_response_is_asked_for_and_deleted(redis: RedisStore) -> None:
    async with keyed_world(redis) as world, ai_of(world) as ai, ai_of(world, 1) as other:
        made = await ai.responses.create(model=MODEL, input="hi", store=True, metadata={"a": "b"})
        assert made.output_text == TEXT
        assert (await other.responses.retrieve(made.id)).to_dict() == made.to_dict()
        items = await other.responses.input_items.list(made.id)
        (item,) = items.data
        assert (item.type, item.role, item.content[0].text) == ("message", "user", "hi")  # type: ignore[union-attr]
        await other.responses.delete(made.id)
        for ask in (ai.responses.retrieve, ai.responses.delete, ai.responses.cancel, ai.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                await ask(made.id)
        await world.settled(1)


async def test_in_the_background(redis: RedisStore) -> None:
    hold = asyncio.Event()
    async with keyed_world(redis, hold=hold) as world, ai_of(world) as ai, ai_of(world, 1) as other:
        made = await ai.responses.create(model=MODEL, input="hi", background=True)
        assert (made.status, made.background) == ("queued", True)

        async def status(which: str) -> bool:
            return (await other.responses.retrieve(made.id)).status == which

        await until(lambda: status("in_progress"))
        hold.set()
        await until(lambda: status("completed"))
        assert (await ai.responses.retrieve(made.id)).output_text == TEXT
        await world.settled(1)
