"""Lines of a batch's output and error file, and of queue results; the same form for all. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec

from services.batch.records import ItemResult
from shared.contracts.batch_messages import FILE_CHUNK_BYTES
from shared.contracts.ids import BatchId
from shared.text.line_ends import in_lines

ITEM_MESSAGES = {
    "batch_cancelled": "the batch was cancelled before this line had a result",
    "batch_expired": "the batch expired before this line had a result",
}


def result_line(batch_id: BatchId, number: int, result: ItemResult) -> bytes:
    """One line without its newline: `{"id", "custom_id", "response", "error"}`, as OpenAI's.

    A line with an answer has a `response` {status_code, request_id, body}, also when the answer is an error; `error`
    {code, message} is null only for a success.
    """
    response: dict[str, Any] | None = None
    if result.body:
        response = {
            "status_code": result.status_code,
            "request_id": result.request_id,
            "body": msgspec.Raw(result.body),
        }
    error = None if result.ok else {"code": result.error_code, "message": result.error_message}
    name = hashlib.blake2b(f"{batch_id} {number}".encode(), digest_size=16).hexdigest()
    # a line of the queue may have had no usable custom_id
    line = {"id": f"batch_req_{name}", "custom_id": result.custom_id or None, "response": response, "error": error}
    return in_lines(msgspec.json.encode(line))


def unfinished(custom_id: str, code: str) -> ItemResult:
    """The result of an item that got none of its own."""
    return ItemResult(custom_id, error_code=code, error_message=ITEM_MESSAGES[code])


class Chunks:
    """Lines to file chunks: all but the last are full."""

    def __init__(self, chunk_bytes: int = FILE_CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._held = bytearray()
        self.lines = 0

    def add(self, line: bytes) -> Iterator[bytes]:
        """Chunks that are full with this line."""
        self.lines += 1
        self._held += line + b"\n"
        while len(self._held) >= self._chunk_bytes:
            yield bytes(self._held[: self._chunk_bytes])
            del self._held[: self._chunk_bytes]

    def rest(self) -> bytes:
        """What is left at the end."""
        return bytes(self._held)
