"""Batches in Redis: records, state changes by compare-and-set, order, and the lease of the process that drives each."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from services.batch.file_store import STORAGE_LIMIT, no_such_file
from services.batch.keys import Keys, lua
from services.batch.records import Job, JobSpec
from services.batch.redis_types import number, page_of, pairs
from services.batch.store_limits import StoreLimits
from shared.contracts.batch_messages import BatchError
from shared.contracts.errors import Forbidden, NotFound, QuotaExceeded
from shared.contracts.ids import BatchId, FileId, TenantId, is_id
from shared.store.redis_store import RedisStore
from shared.store.sealed import Sealer

RETRY_S = 10.0
FORGET = 10
"""Most records of ended batches that go at once."""
MAX_DEAD_LETTERS = 100
"""Dead letters kept of one batch, the newest ones."""

_CREATE, _MOVE = lua("job_create"), lua("job_move")
_LEASE_TAKE, _LEASE_GIVE = lua("lease_take"), lua("lease_give")
_COUNTS = (
    *("in_progress_s", "finalizing_s", "completed_s", "failed_s", "expired_s", "cancelling_s", "cancelled_s"),
    *("total", "completed", "failed", "claims", "enqueued", "made_us"),
    *("prompt_tokens", "cached_tokens", "completion_tokens"),
)
_TEXTS = ("ending", "model", "output_file_id", "error_file_id")

JobValue = str | int | Sequence[BatchError]


def no_such_batch(batch_id: str) -> NotFound:
    """What is missing, or another tenant's: the two look alike."""
    return NotFound(f"there is no batch {batch_id[:64]!r}", param="batch_id")


class JobStore:
    """Batches of all tenants."""

    def __init__(self, redis: RedisStore, sealer: Sealer, keys: Keys, limits: StoreLimits) -> None:
        self._redis = redis
        self._sealer = sealer
        self._keys = keys
        self._limits = limits

    # ------------------------------------------------------------------------------------------ records

    async def create(self, tenant: TenantId, spec: JobSpec, status: str, batch_id: str = "") -> BatchId:
        """A batch over a file, which cannot be deleted until it ends. With a `batch_id`: once, however often called.

        Raises NotFound when the file is gone, Forbidden when the tenant's storage has no room for its lines, and
        QuotaExceeded when the tenant has too many batches that have not ended.
        """
        batch_id = BatchId(batch_id or f"batch-{secrets.token_hex(16)}")
        sealed = self._sealer.seal(tenant, f"job:{batch_id}", msgspec.msgpack.encode(spec))
        await self._redis.execute("SADD", self._keys.tenants, tenant)
        keys = [self._keys.job(tenant, batch_id), self._keys.file(tenant, spec.input_file_id)]
        keys += [self._keys.of(tenant, name) for name in ("jobs", "active", "serial", "stored")]
        limits = (self._limits.max_stored_bytes, self._limits.max_unfinished)
        code = int(await self._redis.script(_CREATE, keys, (batch_id, sealed, status, *limits)))
        if code == 0:
            raise no_such_file(spec.input_file_id, "input_file_id")
        if code == -1:
            raise Forbidden(
                f"a batch's lines are kept until it ends; with them you would store over {limits[0]} bytes: delete "
                "files or let batches end",
                param="input_file_id",
                code=STORAGE_LIMIT,
            )
        if code == -2:
            raise QuotaExceeded(
                f"you have {limits[1]} batches that have not ended, the most there may be", retry_after_s=RETRY_S
            )
        await self._forget_oldest(tenant)
        return batch_id

    async def get(self, tenant: TenantId, batch_id: BatchId) -> Job:
        """Raises NotFound."""
        if not is_id(batch_id):
            raise no_such_batch(batch_id)
        reply, dead = await self._redis.transaction(self._reads(tenant, batch_id))
        found = pairs(reply)
        if "spec" not in found:
            raise no_such_batch(batch_id)
        return self._job(tenant, batch_id, found, dead)

    async def page(self, tenant: TenantId, *, after: str = "", limit: int = 20) -> tuple[list[Job], bool]:
        """A page of the tenant's batches, newest first, and whether more follow. Raises NotFound for `after`."""
        index = self._keys.of(tenant, "jobs")
        ids, more = await page_of(self._redis, index, after, limit, False, no_such_batch)
        names = [BatchId(name) for name in ids]
        replies = await self._redis.transaction([read for name in names for read in self._reads(tenant, name)])
        jobs = []
        for name, reply, dead in zip(names, replies[::2], replies[1::2], strict=True):
            found = pairs(reply)
            if "spec" in found:  # else it has gone since, as the oldest do
                jobs.append(self._job(tenant, name, found, dead))
        return jobs, more

    async def status(self, tenant: TenantId, batch_id: BatchId) -> str:
        """The status alone; empty when there is no such batch."""
        found = await self._redis.execute("HGET", self._keys.job(tenant, batch_id), "status")
        return found.decode() if found else ""

    # ------------------------------------------------------------------------------------------ changes

    async def move(
        self, job: Job, changes: Mapping[str, JobValue], *, ends: bool = False, tokens: int = 0, tokens_limit: int = 0
    ) -> str:
        """Change a batch if its status is still `job.status`.

        Args:
            changes: fields of Job to set.
            ends: the batch ends: its items go, its input file may be deleted.
            tokens: what it enqueues.
            tokens_limit: most enqueued tokens of the tenant, these included; 0 = any number.

        Returns "" when done, else "moved" or "over_limit".
        """
        arguments: list[str | bytes | int] = [job.batch_id, job.status, int(ends), tokens, tokens_limit]
        for name, value in changes.items():
            arguments += [name, self._value(job, name, value)]
        input_file = job.spec.input_file_id or FileId("none")
        keys = [self._keys.job(job.tenant, job.batch_id), self._keys.of(job.tenant, "active")]
        keys += [self._keys.of(job.tenant, "enqueued"), self._keys.file(job.tenant, input_file)]
        keys += self._keys.job_parts(job.tenant, job.batch_id, "bodies", "results", "tokens", "epochs", "lost")
        keys.append(self._keys.of(job.tenant, "stored"))
        code = await self._redis.script(_MOVE, keys, arguments)
        return {1: "", 0: "moved", -1: "over_limit"}[int(code)]

    async def set_enqueued(self, job: Job, upto: int) -> None:
        """Items 1 to `upto` are on the queue."""
        await self._redis.execute("HSET", self._keys.job(job.tenant, job.batch_id), "enqueued", upto)

    async def enqueued_tokens(self, tenant: TenantId) -> int:
        """Prompt tokens of its items without a result."""
        return number(await self._redis.execute("GET", self._keys.of(tenant, "enqueued")))

    # ------------------------------------------------------------------------------------------ driving

    async def active(self) -> AsyncIterator[tuple[TenantId, BatchId]]:
        """Every batch that has not ended."""
        tenants = await self.tenants()
        found = await self._redis.transaction([("SMEMBERS", self._keys.of(tenant, "active")) for tenant in tenants])
        for tenant, batch_ids in zip(tenants, found, strict=True):
            for batch_id in batch_ids:
                yield tenant, BatchId(batch_id.decode())

    async def tenants(self) -> list[TenantId]:
        """Tenants that ever had something here."""
        return [TenantId(name.decode()) for name in await self._redis.execute("SMEMBERS", self._keys.tenants)]

    async def take_lease(self, tenant: TenantId, batch_id: BatchId, owner: str, ttl_s: float) -> bool:
        """Take or renew the right to drive a batch; False while another process has it."""
        keys = [self._keys.job(tenant, batch_id, "lease")]
        return bool(await self._redis.script(_LEASE_TAKE, keys, (owner, max(1, int(ttl_s * 1000)))))

    async def give_lease(self, tenant: TenantId, batch_id: BatchId, owner: str) -> None:
        """Give it up, if it is ours."""
        await self._redis.script(_LEASE_GIVE, [self._keys.job(tenant, batch_id, "lease")], (owner,))

    # ------------------------------------------------------------------------------------------ parts

    def _reads(self, tenant: TenantId, batch_id: BatchId) -> list[tuple[str | int, ...]]:
        key = self._keys.job(tenant, batch_id)
        return [("HGETALL", key), ("LRANGE", f"{key}:dead", 0, -1)]

    async def _forget_oldest(self, tenant: TenantId) -> None:
        index = self._keys.of(tenant, "jobs")
        excess = number(await self._redis.execute("ZCARD", index)) - self._limits.max_jobs
        if excess <= 0:
            return
        active = await self._redis.execute("SMEMBERS", self._keys.of(tenant, "active"))
        oldest = await self._redis.execute("ZRANGE", index, 0, len(active) + min(excess, FORGET) - 1)
        gone = [BatchId(name.decode()) for name in oldest if name not in active][: min(excess, FORGET)]
        for batch_id in gone:
            keys = [self._keys.job(tenant, batch_id), *self._keys.job_parts(tenant, batch_id, "dead", "settles")]
            await self._redis.transaction([("UNLINK", *keys), ("ZREM", index, batch_id)])

    def _job(self, tenant: TenantId, batch_id: BatchId, found: Mapping[str, bytes], dead: Sequence[bytes]) -> Job:
        spec = self._sealer.unseal(tenant, f"job:{batch_id}", found["spec"])
        errors: tuple[BatchError, ...] = ()
        if "errors" in found:
            opened = self._sealer.unseal(tenant, f"errors:{batch_id}", found["errors"])
            errors = msgspec.msgpack.decode(opened, type=tuple[BatchError, ...])
        letters = [self._sealer.unseal(tenant, f"dead:{batch_id}", letter) for letter in dead]
        plain: dict[str, Any] = {name: number(found.get(name)) for name in _COUNTS}
        plain |= {name: found.get(name, b"").decode() for name in _TEXTS}
        return Job(
            tenant=tenant,
            batch_id=batch_id,
            spec=msgspec.msgpack.decode(spec, type=JobSpec),
            status=found["status"].decode(),
            errors=errors,
            dead_letters=tuple(msgspec.msgpack.decode(letter, type=BatchError) for letter in letters),
            **plain,
        )

    def _value(self, job: Job, name: str, value: JobValue) -> str | bytes | int:
        if isinstance(value, str | int):
            return value
        assert name == "errors"
        return self._sealer.seal(job.tenant, f"errors:{job.batch_id}", msgspec.msgpack.encode(tuple(value)))
