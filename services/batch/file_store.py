"""Files in Redis: a record and sealed chunks of FILE_CHUNK_BYTES. A file exists for others once it is closed."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from services.batch.keys import Keys, lua
from services.batch.records import PURPOSE_INPUT, PURPOSE_OUTPUT, FileMeta, StoredFile
from services.batch.redis_types import number, page_of, pairs
from services.batch.store_limits import StoreLimits
from shared.contracts.batch_messages import FILE_CHUNK_BYTES
from shared.contracts.errors import BodyTooLarge, Conflict, Forbidden, NotFound
from shared.contracts.ids import FileId, TenantId, is_id
from shared.store.redis_store import RedisStore
from shared.store.sealed import Sealer

STORAGE_LIMIT = "storage_limit_exceeded"
PAGE = 200
SWEEP = 100
"""About so many files one sweep of a tenant deletes, of each kind."""
ONCE_S = 86400
"""An upload's `once` is remembered for so long."""
UPLOAD_IDLE_S = 3600
"""An upload that took no chunk for so long was given up by its client."""

_OPEN, _APPEND, _CLOSE, _DELETE = (lua(f"file_{name}") for name in ("open", "append", "close", "delete"))


def no_such_file(file_id: str, param: str = "file_id") -> NotFound:
    """What is missing, or another tenant's: the two look alike."""
    return NotFound(f"there is no file {file_id[:64]!r}", param=param)


class FileStore:
    """Uploads, files, their order and their end."""

    def __init__(self, redis: RedisStore, sealer: Sealer, keys: Keys, limits: StoreLimits) -> None:
        self._redis = redis
        self._sealer = sealer
        self._keys = keys
        self._limits = limits

    # ------------------------------------------------------------------------------------------ writing

    async def open(
        self,
        tenant: TenantId,
        meta: FileMeta,
        now_s: int,
        file_id: FileId | None = None,
        made_us: int | None = None,
    ) -> FileId:
        """Begin an upload; one that has begun under `file_id` before goes on as it is. Returns its id.

        Args:
            made_us: a purge takes what was made before it was ordered, and a batch's answers with the batch: when that
                was made, unix microseconds. None: now.

        Raises Forbidden when the tenant has too many files; not for one whose id is given.
        """
        limit = 0 if file_id else self._limits.max_files
        file_id = file_id or FileId(f"file-{secrets.token_hex(16)}")
        sealed = self._seal_meta(tenant, file_id, meta)
        made = "" if made_us is None else str(made_us)
        await self._redis.execute("SADD", self._keys.tenants, tenant)
        keys = [self._keys.file(tenant, file_id), self._keys.of(tenant, "uploads"), self._index(tenant, "")]
        if await self._redis.script(_OPEN, keys, (file_id, sealed, now_s, limit, made)) == b"full":
            raise Forbidden(
                f"you have {limit} files, the most there may be; delete some", param="file", code=STORAGE_LIMIT
            )
        return file_id

    async def append(
        self, tenant: TenantId, file_id: FileId, chunk: int, data: bytes, now_s: int, *, limited: bool = True
    ) -> int:
        """The upload's chunk of that number, from 0; all but the last are full. Returns the bytes held so far.

        Args:
            limited: it counts against what the tenant may store.

        Raises:
            NotFound: there is no such upload.
            Conflict: a chunk before it is missing or was not full.
            Forbidden: the tenant has stored too much.
        """
        if len(data) > FILE_CHUNK_BYTES:
            raise BodyTooLarge(f"a chunk has at most {FILE_CHUNK_BYTES} bytes", param="data")
        if not is_id(file_id):
            raise no_such_file(file_id)
        sealed = self._sealer.seal(tenant, f"file:{file_id}:{chunk}", data)
        keys = [self._keys.file(tenant, file_id), self._keys.file(tenant, file_id, "data")]
        keys += [self._keys.of(tenant, "stored"), self._keys.of(tenant, "uploads")]
        limit = self._limits.max_stored_bytes if limited else 0
        code, held = await self._redis.script(
            _APPEND, keys, (file_id, chunk, sealed, len(data), FILE_CHUNK_BYTES, limit, now_s)
        )
        if code == -1:
            raise no_such_file(file_id)
        if code == -2:
            raise Conflict(f"chunk {chunk} does not follow the {held} bytes held", param="number")
        if code == -3:
            raise Forbidden(
                f"your files would take over {limit} bytes; delete some",
                param="file",
                code=STORAGE_LIMIT,
            )
        return int(held)

    async def close(self, tenant: TenantId, file_id: FileId, expires_after_s: int = 0, once: str = "") -> StoredFile:
        """The upload becomes a file, as opened, or expiring that long after its creation. Raises NotFound.

        Safe to repeat. `once` is an id: when another upload was closed under it and is still a file, that is answered,
        and this one goes.
        """
        if once and (earlier := await self._closed_before(tenant, file_id, once)) is not None:
            await self.abort(tenant, file_id)
            return earlier
        file = await self._record(tenant, file_id)
        if file is None:
            raise no_such_file(file_id)
        if expires_after_s:
            meta = msgspec.structs.replace(file.meta, expires_s=file.meta.created_s + expires_after_s)
            file = msgspec.structs.replace(file, meta=meta)
        if not await self._close(tenant, file):
            raise no_such_file(file_id)
        return msgspec.structs.replace(file, ready=True)

    async def _closed_before(self, tenant: TenantId, file_id: FileId, once: str) -> StoredFile | None:
        key = self._keys.of(tenant, f"once:{once}")
        first = await self._redis.execute("GET", key)
        if first is not None and first.decode() != file_id:
            earlier = await self._record(tenant, FileId(first.decode()))
            if earlier is not None and earlier.ready:
                return earlier
        await self._redis.execute("SET", key, file_id, "EX", ONCE_S)
        return None

    async def abort(self, tenant: TenantId, file_id: FileId) -> None:
        """The upload and what it holds goes; nothing when there is none."""
        file = await self._record(tenant, file_id)
        if file is not None:
            await self._delete(tenant, file, "uploading")

    async def delete(self, tenant: TenantId, file_id: FileId) -> None:
        """Raises NotFound, or Conflict while a batch reads it."""
        file = await self.get(tenant, file_id)
        gone = await self._delete(tenant, file, "ready")
        if gone < 0:
            raise Conflict(f"file {file_id!r} is the input of a batch that has not ended", param="file_id")
        if gone == 0:
            raise no_such_file(file_id)

    # ------------------------------------------------------------------------------------------ reading

    async def get(self, tenant: TenantId, file_id: FileId) -> StoredFile:
        """Raises NotFound."""
        file = await self._record(tenant, file_id)
        if file is None or not file.ready:
            raise no_such_file(file_id)
        return file

    async def is_ready(self, tenant: TenantId, file_id: FileId) -> bool:
        """True if there is such a file, and it is no upload any more."""
        file = await self._record(tenant, file_id)
        return file is not None and file.ready

    async def page(
        self, tenant: TenantId, *, purpose: str = "", after: str = "", limit: int = PAGE, ascending: bool = False
    ) -> tuple[list[StoredFile], bool]:
        """A page in the order of completion, and whether more follow. Raises NotFound for an unknown `after`."""
        if purpose not in ("", PURPOSE_INPUT, PURPOSE_OUTPUT):
            return [], False
        ids, more = await page_of(self._redis, self._index(tenant, purpose), after, limit, ascending, no_such_file)
        names = [FileId(name) for name in ids]
        replies = await self._redis.transaction([("HGETALL", self._keys.file(tenant, name)) for name in names])
        found = [self._opened(tenant, name, reply) for name, reply in zip(names, replies, strict=True)]
        return [file for file in found if file is not None], more

    async def chunk(self, tenant: TenantId, file_id: FileId, number_: int) -> bytes:
        """One chunk; empty behind the last. Raises Internal when it was tampered with."""
        sealed = await self._redis.execute("HGET", self._keys.file(tenant, file_id, "data"), str(number_))
        return self._sealer.unseal(tenant, f"file:{file_id}:{number_}", sealed) if sealed else b""

    async def read(self, tenant: TenantId, file_id: FileId, offset: int) -> bytes:
        """Bytes from `offset` to the end of its chunk; empty at the end of the file."""
        first, skip = divmod(offset, FILE_CHUNK_BYTES)
        return (await self.chunk(tenant, file_id, first))[skip:]

    async def chunks(self, tenant: TenantId, file_id: FileId) -> AsyncIterator[bytes]:
        """The whole file, chunk by chunk."""
        at = 0
        while data := await self.chunk(tenant, file_id, at):
            yield data
            at += 1

    # ------------------------------------------------------------------------------------------ sweeping

    async def due(self, tenants: Sequence[TenantId], now_s: int) -> list[TenantId]:
        """Those of them for whom `sweep` has something to do."""
        asked = [("ZCOUNT", self._keys.of(t, "expiry"), "-inf", now_s) for t in tenants]
        asked += [("ZCOUNT", self._keys.of(t, "uploads"), "-inf", now_s - UPLOAD_IDLE_S) for t in tenants]
        found = await self._redis.transaction(asked)
        return [t for t, expired, idle in zip(tenants, found, found[len(tenants) :], strict=False) if expired or idle]

    async def sweep(self, tenant: TenantId, now_s: int) -> int:
        """Delete expired files and abandoned uploads; returns how many. A file a batch still reads waits for it."""
        swept = 0
        for index, before, state in (("expiry", now_s, "ready"), ("uploads", now_s - UPLOAD_IDLE_S, "uploading")):
            gone = kept = 0
            ids = [b""]
            while ids and gone < SWEEP:
                ids = await self._redis.execute(
                    "ZRANGEBYSCORE", self._keys.of(tenant, index), "-inf", before, "LIMIT", kept, SWEEP
                )
                for file_id in ids:
                    file = await self._record(tenant, FileId(file_id.decode()))
                    deleted = file is not None and await self._delete(tenant, file, state) > 0
                    gone, kept = gone + deleted, kept + (not deleted)
            swept += gone
        return swept

    async def stored_bytes(self, tenant: TenantId) -> int:
        """Bytes of all its files and uploads."""
        return number(await self._redis.execute("GET", self._keys.of(tenant, "stored")))

    # ------------------------------------------------------------------------------------------ parts

    async def _record(self, tenant: TenantId, file_id: FileId) -> StoredFile | None:
        if not is_id(file_id):
            return None
        return self._opened(tenant, file_id, await self._redis.execute("HGETALL", self._keys.file(tenant, file_id)))

    def _opened(self, tenant: TenantId, file_id: FileId, reply: Any) -> StoredFile | None:
        found = pairs(reply)
        if "meta" not in found:
            return None
        meta = self._sealer.unseal(tenant, f"file:{file_id}", found["meta"])
        return StoredFile(
            file_id=file_id,
            meta=msgspec.msgpack.decode(meta, type=FileMeta),
            num_bytes=number(found["bytes"]),
            ready=found["state"] == b"ready",
            readers=number(found.get("readers")),
        )

    def _seal_meta(self, tenant: TenantId, file_id: FileId, meta: FileMeta) -> bytes:
        return self._sealer.seal(tenant, f"file:{file_id}", msgspec.msgpack.encode(meta))

    async def _close(self, tenant: TenantId, file: StoredFile) -> bool:
        keys = [self._keys.file(tenant, file.file_id), self._keys.of(tenant, "uploads"), self._index(tenant, "")]
        keys += [self._index(tenant, file.meta.purpose), self._keys.of(tenant, "expiry")]
        keys.append(self._keys.of(tenant, "serial"))
        sealed = self._seal_meta(tenant, file.file_id, file.meta)
        return bool(await self._redis.script(_CLOSE, keys, (file.file_id, file.meta.expires_s, sealed)))

    async def _delete(self, tenant: TenantId, file: StoredFile, state: str) -> int:
        keys = [self._keys.file(tenant, file.file_id), self._keys.file(tenant, file.file_id, "data")]
        keys += [self._keys.of(tenant, "stored"), self._keys.of(tenant, "uploads"), self._index(tenant, "")]
        keys += [self._index(tenant, file.meta.purpose), self._keys.of(tenant, "expiry")]
        return int(await self._redis.script(_DELETE, keys, (file.file_id, state)))

    def _index(self, tenant: TenantId, purpose: str) -> str:
        return self._keys.of(tenant, "files", purpose) if purpose else self._keys.of(tenant, "files")
