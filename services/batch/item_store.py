"""Items of batches in Redis: bodies, claims and results written once. Counts change with the results, in one script.

Numbers count a batch's lines from 1. Order for an executor: `claim`, run, `put_result` with the encoded settlement,
publish the settlement, `settled`, acknowledge. Whoever finds the item again after a crash claims it and is told where
the one before it stood.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from services.batch.job_store import MAX_DEAD_LETTERS
from services.batch.keys import Keys, lua
from services.batch.records import QUEUE_BATCH, Claim, ItemBody, ItemResult, Put
from services.batch.redis_types import number as to_int
from shared.contracts.batch_messages import BatchError
from shared.contracts.ids import BatchId, TenantId
from shared.store.redis_store import RedisStore
from shared.store.sealed import Sealer

READ_BYTES = 4 * 1024 * 1024
"""Bodies are read about so many bytes at a time."""
KEPT_S = 30 * 86400
"""Losses and settlements nobody came back for are kept so long."""

_PUT, _CLAIM, _RESULT, _END = lua("items_put"), lua("item_claim"), lua("item_result"), lua("items_end")


class ItemStore:
    """Items of all batches, the standing batch's included."""

    def __init__(self, redis: RedisStore, sealer: Sealer, keys: Keys) -> None:
        self._redis = redis
        self._sealer = sealer
        self._keys = keys

    # ------------------------------------------------------------------------------------------ for executors

    async def claim(self, tenant: TenantId, batch_id: BatchId, number: int) -> Claim:
        """Take an item from the queue. See Claim for what to do with it."""
        keys = [self._keys.job(tenant, batch_id)]
        keys += self._keys.job_parts(tenant, batch_id, "bodies", "results", "epochs", "lost", "settles")
        status, epoch, done, body, settle, lost = await self._redis.script(_CLAIM, keys, (str(number),))
        return Claim(
            status=status.decode(),
            epoch=int(epoch),
            done=bool(done),
            body=self.open_body(tenant, batch_id, number, body) if body else None,
            settle=self._sealer.unseal(tenant, f"settle:{batch_id}:{number}", settle) if settle else b"",
            lost=int(lost),
        )

    async def put_result(
        self, tenant: TenantId, batch_id: BatchId, number: int, result: ItemResult, *, epoch: int, settle: bytes = b""
    ) -> tuple[Put, int]:
        """Store an item's result, if it has none and no newer claim.

        Args:
            epoch: of the claim; 0 for a result that no run made, which no claim fences.
            settle: handed out by later claims until `settled`.

        Returns what became of it, and how many items of the batch have no result.
        """
        sealed = self._seal_result(tenant, batch_id, number, result)
        sealed_settle = self._sealer.seal(tenant, f"settle:{batch_id}:{number}", settle) if settle else b""
        keys = [self._keys.job(tenant, batch_id)]
        keys += self._keys.job_parts(tenant, batch_id, "bodies", "results", "epochs", "settles", "tokens")
        keys += [self._keys.of(tenant, "enqueued"), self._keys.job(tenant, batch_id, "finished")]
        keys += [self._keys.of(tenant, "stored"), self._keys.job(tenant, batch_id, "refs")]
        arguments = (str(number), epoch, sealed, sealed_settle, int(result.ok))
        tokens = (result.prompt_tokens, result.cached_tokens, result.completion_tokens)
        listed = int(batch_id == QUEUE_BATCH)
        code, left = await self._redis.script(_RESULT, keys, (*arguments, *tokens, listed, KEPT_S))
        return Put(code.decode()), int(left)

    async def settled(self, tenant: TenantId, batch_id: BatchId, number: int) -> None:
        """The settlement is published: claims need not hand it out any more."""
        await self._redis.execute("HDEL", self._keys.job(tenant, batch_id, "settles"), str(number))

    async def add_lost(self, tenant: TenantId, batch_id: BatchId, number: int, times: int = 1) -> int:
        """A worker was lost while it ran the item; how often that is by now."""
        key = self._keys.job(tenant, batch_id, "lost")
        # it may come after the batch's end, when nobody would delete it
        commands = [("HINCRBY", key, str(number), times), ("EXPIRE", key, KEPT_S)]
        return to_int((await self._redis.transaction(commands))[0])

    async def add_dead_letter(
        self, tenant: TenantId, batch_id: BatchId, number: int, custom_id: str, code: str, reason: str
    ) -> None:
        """Note that an item was given up, and why; shown with its batch."""
        letter = BatchError(code=code, message=reason, line=number, param=custom_id)
        sealed = self._sealer.seal(tenant, f"dead:{batch_id}", msgspec.msgpack.encode(letter))
        key = self._keys.job(tenant, batch_id, "dead")
        await self._redis.transaction([("LPUSH", key, sealed), ("LTRIM", key, 0, MAX_DEAD_LETTERS - 1)])

    async def results(self, tenant: TenantId, batch_id: BatchId, numbers: Sequence[int]) -> dict[int, ItemResult]:
        """Results of the items among `numbers` that have one."""
        found = await self._many(self._keys.job(tenant, batch_id, "results"), numbers)
        return {
            number: msgspec.msgpack.decode(
                self._sealer.unseal(tenant, f"result:{batch_id}:{number}", sealed), type=ItemResult
            )
            for number, sealed in found.items()
        }

    # ------------------------------------------------------------------------------------------ for runners

    async def put_bodies(
        self, tenant: TenantId, batch_id: BatchId, status: str, bodies: Sequence[tuple[int, ItemBody]]
    ) -> bool:
        """Store bodies by number, if the batch has this status. The same again changes nothing."""
        arguments: list[str | bytes | int] = [status]
        for number, body in bodies:
            arguments += [str(number), self.seal_body(tenant, batch_id, number, body), body.prompt_tokens]
        keys = [self._keys.job(tenant, batch_id), *self._keys.job_parts(tenant, batch_id, "bodies", "tokens")]
        return bool(await self._redis.script(_PUT, keys, arguments))

    async def unfinished(self, tenant: TenantId, batch_id: BatchId, numbers: Sequence[int]) -> dict[int, str]:
        """The custom_id of each item among `numbers` without a result. Bodies may be long: some are read at a time."""
        if not numbers:
            return {}
        key = self._keys.job(tenant, batch_id, "bodies")
        sizes = await self._redis.transaction([("HSTRLEN", key, str(number)) for number in numbers])
        names: dict[int, str] = {}
        for group in _groups(numbers, sizes):
            for number, sealed in (await self._many(key, group)).items():
                names[number] = self.open_body(tenant, batch_id, number, sealed).custom_id
        return names

    async def end(
        self, tenant: TenantId, batch_id: BatchId, status: str, results: Sequence[tuple[int, ItemResult]]
    ) -> bool:
        """Store results that no run made for those of these items without one, if the batch has this status."""
        arguments: list[str | bytes | int] = [status]
        for number, result in results:
            arguments += [str(number), self._seal_result(tenant, batch_id, number, result)]
        keys = [self._keys.job(tenant, batch_id)]
        keys += self._keys.job_parts(tenant, batch_id, "bodies", "results", "tokens")
        keys.append(self._keys.of(tenant, "enqueued"))
        return bool(await self._redis.script(_END, keys, arguments))

    # ------------------------------------------------------------------------------------------ parts

    async def _many(self, key: str, numbers: Sequence[int]) -> dict[int, bytes]:
        if not numbers:
            return {}
        found = await self._redis.execute("HMGET", key, *map(str, numbers))
        return {number: value for number, value in zip(numbers, found, strict=True) if value}

    def _seal_result(self, tenant: TenantId, batch_id: BatchId, number: int, result: ItemResult) -> bytes:
        return self._sealer.seal(tenant, f"result:{batch_id}:{number}", msgspec.msgpack.encode(result))

    def seal_body(self, tenant: TenantId, batch_id: BatchId, number: int, body: ItemBody) -> bytes:
        """A body as it is kept."""
        return self._sealer.seal(tenant, f"item:{batch_id}:{number}", msgspec.msgpack.encode(body))

    def open_body(self, tenant: TenantId, batch_id: BatchId, number: int, sealed: bytes) -> ItemBody:
        """The inverse of `seal_body`. Raises Internal when it was tampered with."""
        opened = self._sealer.unseal(tenant, f"item:{batch_id}:{number}", sealed)
        return msgspec.msgpack.decode(opened, type=ItemBody)


def _groups(numbers: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Numbers in groups of about READ_BYTES together, without those of size 0."""
    group: list[int] = []
    held = 0
    for number, size in zip(numbers, sizes, strict=True):
        if group and held + size > READ_BYTES:
            yield group
            group, held = [], 0
        if size:
            group.append(number)
            held += size
    if group:
        yield group
