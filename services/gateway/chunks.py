"""SSE bytes of streamed answers. Pure.

Of a stream: every choice has exactly one chunk with a `finish_reason`, its last; the usage chunk comes after all of
them and only when asked for; then `[DONE]`. A stream that fails ends with an `error` frame and without `[DONE]`.
"""

from __future__ import annotations

import json

import msgspec

from shared.contracts.errors import BatonError
from shared.ingress.completion_body import Usage, response_id
from shared.ingress.error_body import error_body

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.encode


class ChunkWriter:
    """SSE bytes of one stream. What does not change is encoded once, so a delta costs one string encoding.

    Args:
        kind: chat | completions.
        created: unix seconds.
        include_usage: the client asked for the usage chunk; then the others carry `"usage": null`.
    """

    def __init__(self, kind: str, request_id: str, model: str, created: int, include_usage: bool) -> None:
        self._chat = kind == "chat"
        head = {
            "id": response_id(kind, request_id),
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": created,
            "model": model,
        }
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._tail = (b'],"usage":null}' if include_usage else b"]}") + b"\n\n"
        self._include_usage = include_usage

    def role(self, choice: int) -> bytes:
        """The first chunk of a chat choice; nothing for completions."""
        if not self._chat:
            return b""
        return self._chunk(choice, b'"delta":{"role":"assistant","content":"","refusal":null}', b"null")

    def delta(self, choice: int, text: str) -> bytes:
        """A piece of text."""
        piece = _encode(text)
        body = b'"delta":{"content":' + piece + b"}" if self._chat else b'"text":' + piece
        return self._chunk(choice, body, b"null")

    def finish(self, choice: int, reason: str) -> bytes:
        """The last chunk of a choice."""
        return self._chunk(choice, b'"delta":{}' if self._chat else b'"text":""', _encode(reason))

    def end(self, usage: Usage) -> bytes:
        """What follows the last choice's last chunk."""
        if not self._include_usage:
            return DONE
        return self._head + b'],"usage":' + _encode(usage.body()) + b"}\n\n" + DONE

    def _chunk(self, choice: int, body: bytes, finish: bytes) -> bytes:
        index = b'{"index":%d,' % choice
        return self._head + index + body + b',"logprobs":null,"finish_reason":' + finish + b"}" + self._tail


def error_frame(error: BatonError) -> bytes:
    """The last frame of a stream that failed; client libraries raise on it."""
    return b"data: " + json.dumps(error_body(error)).encode() + b"\n\n"
