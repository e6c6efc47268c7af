"""`python -m tests.nats.queue_child NATS_URL PASSWORD_FILE REDIS_URL PREFIX TENANTS_FILE`: the queue's door with a
stand-in for the executor behind it, as a process to be killed.

Every line is answered with its own prompt in capitals; a prompt of `slow` takes a while.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from services.batch.intake import Intake, announce
from services.batch.records import ItemResult, Put
from services.batch.store import BatchStore
from shared.bus import nats_consumer
from shared.bus.bus import Delivery
from shared.bus.nats_connection import connect_bus
from shared.bus.streams import stream_name
from shared.contracts import subjects
from shared.contracts.batch_messages import BatchItem
from shared.contracts.ids import TenantId
from shared.ingress.prompt_codec import PromptCodec
from shared.ingress.served_models import ServedModel, ServedModels
from shared.store.redis_store import connect_redis
from shared.store.sealed import Sealer
from tests.tiny_tokenizer import tiny_tokenizer

CONTEXT = 64
nats_consumer.ACK_WAIT_S = 2.0


async def main(nats_url: str, password: str, redis_url: str, prefix: str, tenants: str) -> None:
    models = ServedModels([ServedModel("tiny", "default", CONTEXT, PromptCodec(tiny_tokenizer(), CONTEXT))])
    async with (
        connect_bus(nats_url, "batch", password=password) as bus,
        connect_redis(redis_url) as redis,
    ):
        store = BatchStore(redis, Sealer(bytes(range(32))), prefix)

        async def run(delivery: Delivery) -> None:
            item: BatchItem = delivery.message
            claim = await store.items.claim(item.tenant, item.batch_id, item.number)
            if claim.body is None:
                return
            prompt = json.loads(claim.body.body)["prompt"]
            await asyncio.sleep(0.02 if prompt == "slow" else 0)
            result = ItemResult(item.custom_id, 200, "req-x", json.dumps({"text": prompt.upper()}).encode())
            put, _ = await store.items.put_result(item.tenant, item.batch_id, item.number, result, epoch=claim.epoch)
            if put is Put.STORED:
                await announce(bus, item.tenant, item.number, result)

        await bus.consume(stream_name("batch.item"), subjects.ANY_BATCH_ITEM, BatchItem, run, durable="batch")

        async def any_number(tenant: TenantId, model: str) -> int:
            return 0

        async with Intake(bus, store, models, any_number, Path(tenants), max_lines=1000):
            print("ready", flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    url, secret, *rest = sys.argv[1:]
    asyncio.run(main(url, Path(secret).read_text(), *rest))
