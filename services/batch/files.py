"""Answers `batch.files`: uploads in chunks, records, contents, deletion."""

from __future__ import annotations

import time
from collections.abc import Callable

from services.batch.open_requests import OpenRequests
from services.batch.records import PURPOSE_INPUT, FileMeta
from services.batch.runner_config import RunnerConfig
from services.batch.store import BatchStore
from shared.bus.bus import Delivery
from shared.contracts.batch_messages import (
    FILE_CHUNK_BYTES,
    FileAppend,
    FileAppended,
    FileBytes,
    FileClose,
    FileDelete,
    FileDeleted,
    FileGet,
    FileInfo,
    FileList,
    FileOpen,
    FileOpened,
    FilePage,
    FileRead,
    FileReply,
    FileRequest,
)
from shared.contracts.errors import BodyTooLarge, InvalidInput
from shared.contracts.ids import is_id

MAX_FILENAME_CHARS = 255
AT_WORK, MAX_OPEN = 16, 256
"""Requests of one tenant answered at the same time, and those that may be open."""
MAX_PAGE = 10_000
PAGE = 500
"""Most files in one answer, which must fit a message; the asker comes again for more."""


class FileDesk:
    """Files over the bus. The gateway has checked whose key asked."""

    def __init__(self, store: BatchStore, config: RunnerConfig, clock: Callable[[], float] = time.time) -> None:
        self._files = store.files
        self._config = config
        self._clock = clock
        self._open_requests = OpenRequests(AT_WORK, MAX_OPEN)

    async def answer(self, delivery: Delivery) -> FileReply:
        """Raises NotFound, InvalidInput, Conflict, BodyTooLarge, Forbidden, Overloaded, Unavailable."""
        request: FileRequest = delivery.message
        async with self._open_requests.one(request.tenant):
            return await self._answer(request)

    async def _answer(self, request: FileRequest) -> FileReply:
        if isinstance(request, FileOpen):
            return await self._open(request)
        if isinstance(request, FileAppend):
            return await self._append(request)
        if isinstance(request, FileRead):
            return await self._read(request)
        if isinstance(request, FileList):
            return await self._list(request)
        if isinstance(request, FileDelete):
            await self._files.delete(request.tenant, request.file_id)
            return FileDeleted(file_id=request.file_id)
        if isinstance(request, FileClose):
            return await self._close(request)
        assert isinstance(request, FileGet)
        return (await self._files.get(request.tenant, request.file_id)).info()

    async def _open(self, request: FileOpen) -> FileOpened:
        if request.purpose != PURPOSE_INPUT:
            raise InvalidInput(f"purpose must be {PURPOSE_INPUT!r}", param="purpose")
        if not 0 < len(request.filename) <= MAX_FILENAME_CHARS:
            raise InvalidInput(f"a file name has 1 to {MAX_FILENAME_CHARS} characters", param="file")
        now_s = int(self._clock())
        expires_s = now_s + request.expires_after_s if request.expires_after_s else 0
        meta = FileMeta(request.filename, request.purpose, now_s, expires_s)
        return FileOpened(file_id=await self._files.open(request.tenant, meta, now_s))

    async def _append(self, request: FileAppend) -> FileAppended:
        if request.number < 0:
            raise InvalidInput("chunks are numbered from 0", param="number")
        if request.number * FILE_CHUNK_BYTES + len(request.data) > self._config.max_file_bytes:
            raise BodyTooLarge(f"a file has at most {self._config.max_file_bytes} bytes", param="file")
        now_s = int(self._clock())
        held = await self._files.append(request.tenant, request.file_id, request.number, request.data, now_s)
        return FileAppended(num_bytes=held)

    async def _close(self, request: FileClose) -> FileInfo | FileDeleted:
        if request.abort:
            await self._files.abort(request.tenant, request.file_id)
            return FileDeleted(file_id=request.file_id)
        if request.once and not is_id(request.once):
            raise InvalidInput("once is not an id", param="once")
        closed = await self._files.close(request.tenant, request.file_id, request.expires_after_s, request.once)
        return closed.info()

    async def _read(self, request: FileRead) -> FileBytes:
        if request.offset < 0:
            raise InvalidInput("offset must be 0 or more", param="offset")
        file = await self._files.get(request.tenant, request.file_id)
        data = await self._files.read(request.tenant, request.file_id, request.offset)
        return FileBytes(data=data, num_bytes=file.num_bytes)

    async def _list(self, request: FileList) -> FilePage:
        if not 1 <= request.limit <= MAX_PAGE:
            raise InvalidInput(f"limit must be 1 to {MAX_PAGE}", param="limit")
        files, more = await self._files.page(
            request.tenant,
            purpose=request.purpose,
            after=request.after,
            limit=min(request.limit, PAGE),
            ascending=request.ascending,
        )
        return FilePage(files=tuple(file.info() for file in files), has_more=more)
