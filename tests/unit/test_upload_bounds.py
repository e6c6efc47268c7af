"""Uploads by clients that mean harm: without end, a byte at a time, very many at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Request

from services.gateway import files as files_module
from services.gateway.files import UPLOADS_AT_ONCE, Files
from services.gateway.upload import FORM_BYTES, Upload
from shared.contracts import batch_messages as b
from shared.contracts.errors import BodyTooLarge, InvalidInput
from shared.contracts.ids import FileId, TenantId
from shared.contracts.messages import Identity
from tests.unit.test_upload_form import FILE, PURPOSE, TYPE, form

PIECE = 1000


@pytest.mark.parametrize(
    ("start", "endless"),
    [(form(PURPOSE, FILE), b"z"), (b"", b"\r\n"), (b"--cut\r\n", b"X: y\r\n")],
    ids=["epilogue", "preamble", "headers"],
)
def test_what_is_no_file_ends_at_a_limit(start: bytes, endless: bytes) -> None:
    upload = Upload(TYPE, 10**12)
    upload.feed(start)
    piece = endless * (PIECE // len(endless))
    with pytest.raises((BodyTooLarge, InvalidInput)):
        feed_all(upload, [piece] * (FORM_BYTES // len(piece) + 2))


def feed_all(upload: Upload, pieces: Iterable[bytes]) -> None:
    for piece in pieces:
        upload.feed(piece)


def test_a_large_file_is_no_large_form() -> None:
    upload = Upload(TYPE, 10 * FORM_BYTES)
    head, _, tail = form(FILE, PURPOSE).partition(b"line one")
    upload.feed(head)
    for _ in range(9):
        upload.feed(b"x" * FORM_BYTES)
    upload.feed(tail)
    upload.finish()


# ---------------------------------------------------------------------------------------------- at the door


class Service:
    """A gateway's service as far as uploads need it; the batch service behind it takes everything."""

    def __init__(self, body_timeout_s: float = 5.0) -> None:
        self.config = SimpleNamespace(max_file_bytes=10**9, body_timeout_s=body_timeout_s)
        self.ingress = SimpleNamespace(require_open=lambda: None)
        self.aborted = 0

    async def authenticate(self, key: bytes) -> Identity:
        return Identity(tenant=TenantId("ann"), key_id="k")

    async def ask(self, subject: str, message: b.FileRequest, reply: Any) -> Any:
        if isinstance(message, b.FileOpen):
            return b.FileOpened(file_id=FileId("file-1"))
        if isinstance(message, b.FileClose):
            self.aborted += message.abort
            return b.FileInfo(file_id=FileId("file-1"), filename="f", purpose="batch", num_bytes=1, created_s=1)
        return b.FileAppended(num_bytes=1)


async def no_key(*asked: object) -> None:
    return None


NO_KEYS: Any = SimpleNamespace(key_of=no_key)


def request(pieces: AsyncIterator[bytes]) -> Request:
    async def receive() -> dict[str, Any]:
        piece = await anext(pieces, None)
        return {"type": "http.request", "body": piece or b"", "more_body": piece is not None}

    headers = [(b"authorization", b"Bearer k"), (b"content-type", TYPE.encode())]
    return Request({"type": "http", "method": "POST", "path": "/v1/files", "headers": headers}, receive)


async def test_an_upload_of_a_byte_now_and_then_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "MIN_BYTES_S", 10_000)

    async def dripping() -> AsyncIterator[bytes]:
        yield form(PURPOSE, FILE)[:-40]
        while True:
            await asyncio.sleep(0.05)
            yield b"x"

    service = Service(body_timeout_s=0.5)
    answer = await asyncio.wait_for(Files(service, NO_KEYS).create(request(dripping())), 10)  # type: ignore[arg-type]
    assert (answer.status_code, service.aborted) == (400, 1)
    assert json.loads(bytes(answer.body))["error"]["code"] == "request_timeout"


async def test_a_tenant_has_so_many_uploads_at_once() -> None:
    service, go_on = Service(), asyncio.Event()
    files = Files(service, NO_KEYS)  # type: ignore[arg-type]

    async def waiting() -> AsyncIterator[bytes]:
        yield PURPOSE
        await go_on.wait()
        yield form(FILE)

    async def at_once() -> AsyncIterator[bytes]:
        yield form(PURPOSE, FILE)

    held = [asyncio.create_task(files.create(request(waiting()))) for _ in range(UPLOADS_AT_ONCE)]
    await asyncio.sleep(0.05)
    over = await files.create(request(at_once()))
    assert over.status_code == 429
    assert over.headers["retry-after"]
    go_on.set()
    assert {answer.status_code for answer in await asyncio.gather(*held)} == {200}
    assert (await files.create(request(at_once()))).status_code == 200
