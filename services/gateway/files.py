"""`/v1/files`: uploads go to the batch service as they come, chunk by chunk, and contents come from there likewise."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse

from services.gateway.answers import error_response, json_response
from services.gateway.auth import key_hash
from services.gateway.keyed import Keyed
from services.gateway.once import idempotency_key
from services.gateway.query import query
from services.gateway.service import GatewayService
from services.gateway.upload import FORM_BYTES, Upload
from shared.contracts import batch_messages as b
from shared.contracts import subjects
from shared.contracts.errors import BatonError, BodyTooLarge, Cancelled, Internal, InvalidInput, QuotaExceeded
from shared.contracts.ids import FileId, TenantId
from shared.contracts.messages import Identity
from shared.security.keeping import kept_s

UPLOADS_AT_ONCE = 16
"""Uploads of one tenant at the same time, here."""
MIN_BYTES_S = 4096
"""An upload slower than this, over all of it and but for its first pause, is given up."""
MAX_PAGE = 10_000


class Files:
    """Handlers of the routes under `/v1/files`."""

    def __init__(self, service: GatewayService, keyed: Keyed) -> None:
        self._service = service
        self._keyed = keyed
        self._uploads: Counter[TenantId] = Counter()

    def add_to(self, app: FastAPI) -> None:
        """Add the routes."""
        app.add_api_route("/v1/files", self.create, methods=["POST"])
        app.add_api_route("/v1/files", self.list, methods=["GET"])
        app.add_api_route("/v1/files/{file_id}", self.get, methods=["GET"])
        app.add_api_route("/v1/files/{file_id}", self.delete, methods=["DELETE"])
        app.add_api_route("/v1/files/{file_id}/content", self.content, methods=["GET"])

    async def create(self, request: Request) -> Response:
        """POST /v1/files: a form of `file`, `purpose` and perhaps `expires_after[anchor|seconds]`, in any order."""
        try:
            return await self._create(request)
        except ClientDisconnect:
            return Response(status_code=Cancelled.status)
        except BatonError as error:
            if getattr(request.state, "whole", False):
                return error_response(error)
            return error_response(error, {"connection": "close"}, sending=True)

    async def _create(self, request: Request) -> Response:
        self._service.ingress.require_open()
        identity = await self._identity(request)
        tenant = identity.tenant
        idempotency_key(request.headers)  # what is wrong with it is told before the upload
        limit = self._service.config.max_file_bytes
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and (len(declared) > 18 or int(declared) > limit + FORM_BYTES):
            raise BodyTooLarge(f"a file has at most {limit} bytes", param="file")
        upload = Upload(request.headers.get("content-type", ""), limit)
        with self._counted(tenant):
            return await self._receive(request, upload, _Sender(self._service, identity, upload))

    async def _receive(self, request: Request, upload: Upload, sender: _Sender) -> Response:
        try:
            async for data in self._body(request):
                upload.feed(data)
                await sender.go_on()
            upload.finish()
            await sender.rest()
            return await self._closed(request, sender)
        finally:
            await asyncio.shield(sender.abort())

    async def _closed(self, request: Request, sender: _Sender) -> Response:
        # of a form the boundary is another each time, so what it holds stands for the body
        key = await self._keyed.key_of(request, sender.tenant, key_hash(request.headers), sender.digest())
        if key is None:
            return json_response(file_body(await sender.close()))

        async def make(request_id: str) -> dict[str, Any]:
            return file_body(await sender.close(request_id))

        return await self._keyed.whole(key, make)

    @contextmanager
    def _counted(self, tenant: TenantId) -> Iterator[None]:
        if self._uploads[tenant] >= UPLOADS_AT_ONCE:
            raise QuotaExceeded(f"you have {UPLOADS_AT_ONCE} uploads under way", param="file", retry_after_s=1.0)
        self._uploads[tenant] += 1
        try:
            yield
        finally:
            self._uploads[tenant] -= 1
            if not self._uploads[tenant]:
                del self._uploads[tenant]

    async def list(self, request: Request) -> Response:
        """GET /v1/files: after, limit, order (asc | desc), purpose."""
        identity = await self._identity(request)
        asked = query(request, limit=(MAX_PAGE, MAX_PAGE), order=("desc", "asc"), after=None, purpose=None)
        files: list[b.FileInfo] = []
        after, more = asked["after"], True
        while more and len(files) < asked["limit"]:
            page: b.FilePage = await self._ask(
                b.FileList(
                    tenant=identity.tenant,
                    purpose=asked["purpose"],
                    after=after,
                    limit=asked["limit"] - len(files),
                    ascending=asked["order"] == "asc",
                )
            )
            files += page.files
            more, after = page.has_more, page.files[-1].file_id if page.files else ""
        return json_response(list_body([file_body(info) for info in files], more))

    async def get(self, request: Request, file_id: str) -> Response:
        """GET /v1/files/{id}"""
        identity = await self._identity(request)
        return json_response(file_body(await self._ask(b.FileGet(tenant=identity.tenant, file_id=FileId(file_id)))))

    async def delete(self, request: Request, file_id: str) -> Response:
        """DELETE /v1/files/{id}"""
        identity = await self._identity(request)
        await self._ask(b.FileDelete(tenant=identity.tenant, file_id=FileId(file_id)))
        return json_response({"id": file_id, "object": "file", "deleted": True})

    async def content(self, request: Request, file_id: str) -> Response:
        """GET /v1/files/{id}/content. The first chunk is here before the status is sent."""
        identity = await self._identity(request)
        first = await self._read(identity.tenant, file_id, 0)
        headers = {
            "content-length": str(first.num_bytes),
            "cache-control": "no-store",
            "x-content-type-options": "nosniff",
        }
        chunks = self._chunks(identity.tenant, file_id, first)
        return StreamingResponse(chunks, media_type="application/octet-stream", headers=headers)

    async def _chunks(self, tenant: TenantId, file_id: str, first: b.FileBytes) -> AsyncIterator[bytes]:
        part, offset = first, 0
        while True:
            yield part.data
            offset += len(part.data)
            if offset >= first.num_bytes:
                return
            part = await self._read(tenant, file_id, offset)
            if not part.data:
                raise Internal(f"file {file_id} ends at {offset}, before its end")

    async def _read(self, tenant: TenantId, file_id: str, offset: int) -> b.FileBytes:
        found: b.FileBytes = await self._ask(b.FileRead(tenant=tenant, file_id=FileId(file_id), offset=offset))
        return found

    async def _body(self, request: Request) -> AsyncIterator[bytes]:
        pieces, declared = request.stream().__aiter__(), request.headers.get("content-length", "")
        pause_s = self._service.config.body_timeout_s
        size, waited_s = 0, 0.0  # time that we took ourselves is not the client's
        while True:
            began = time.monotonic()
            try:
                async with asyncio.timeout(min(pause_s, pause_s + size / MIN_BYTES_S - waited_s)):
                    piece = await anext(pieces, None)
            except TimeoutError as exc:
                raise InvalidInput(f"too little came, or nothing for {pause_s:g} s", code="request_timeout") from exc
            if piece is None:
                request.state.whole = True
                return
            waited_s += time.monotonic() - began
            size += len(piece)
            request.state.whole = declared == str(size)  # nothing is to come behind a refusal
            yield piece

    async def _identity(self, request: Request) -> Identity:
        return await self._service.authenticate(key_hash(request.headers))

    async def _ask(self, message: b.FileRequest) -> Any:
        return await self._service.ask(subjects.BATCH_FILES, message, b.FileReply)


class _Sender:
    """Sends an upload's bytes on in full chunks."""

    def __init__(self, service: GatewayService, identity: Identity, upload: Upload) -> None:
        self.tenant = identity.tenant
        self._retention_s = identity.retention_s
        self._service = service
        self._upload = upload
        self._content = hashlib.sha256()
        self._file_id = FileId("")
        self._sent = 0
        self._closed = False

    async def go_on(self) -> None:
        """Send what is a full chunk by now. A wrong purpose ends it before the first one."""
        upload = self._upload
        upload.check_purpose()
        if not upload.begun:
            return
        await self._open()
        while upload.waiting >= b.FILE_CHUNK_BYTES:
            await self._append(upload.take(b.FILE_CHUNK_BYTES))

    async def rest(self) -> None:
        """Send what is left."""
        await self._open()
        if self._upload.waiting:
            await self._append(self._upload.take(b.FILE_CHUNK_BYTES))

    def digest(self) -> bytes:
        """Stands for all that the form said."""
        upload = self._upload
        said = [upload.filename, str(upload.expires_after_s()), self._content.hexdigest()]
        return json.dumps(said).encode()

    async def close(self, once: str = "") -> b.FileInfo:
        """The file's record; `once`: or that of one closed under the same id before."""
        expires_after_s = kept_s(self._upload.expires_after_s(), self._retention_s)
        info: b.FileInfo = await self._ask(
            b.FileClose(tenant=self.tenant, file_id=self._file_id, expires_after_s=expires_after_s, once=once)
        )
        self._closed = True
        return info

    async def abort(self) -> None:
        """Give the upload up, if it has begun and not ended; what is left of it when nobody answers is swept later."""
        if self._file_id and not self._closed:
            with suppress(BatonError):
                await self._ask(b.FileClose(tenant=self.tenant, file_id=self._file_id, abort=True))

    async def _open(self) -> None:
        if not self._file_id:
            message = b.FileOpen(tenant=self.tenant, filename=self._upload.filename, purpose="batch")
            opened: b.FileOpened = await self._ask(message)
            self._file_id = opened.file_id

    async def _append(self, data: bytes) -> None:
        self._content.update(data)
        message = b.FileAppend(tenant=self.tenant, file_id=self._file_id, number=self._sent, data=data)
        await self._ask(message)
        self._sent += 1

    async def _ask(self, message: b.FileRequest) -> Any:
        return await self._service.ask(subjects.BATCH_FILES, message, b.FileReply)


def file_body(info: b.FileInfo) -> dict[str, Any]:
    """A file in OpenAI's form."""
    return {
        "id": info.file_id,
        "object": "file",
        "bytes": info.num_bytes,
        "created_at": info.created_s,
        "expires_at": info.expires_s or None,
        "filename": info.filename,
        "purpose": info.purpose,
        "status": "processed",
        "status_details": None,
    }


def list_body(data: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """A page in OpenAI's form."""
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }
