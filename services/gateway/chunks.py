"""Response bodies: JSON for whole answers, SSE bytes for streamed ones. Pure.

Of a stream: every choice has exactly one chunk with a `finish_reason`, its last; the usage chunk comes after all of
them and only when asked for; then `[DONE]`. A stream that fails ends with an `error` frame and without `[DONE]`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from services.gateway.errors import error_body
from shared.contracts.errors import BatonError

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.encode


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a finished request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    def body(self) -> dict[str, Any]:
        """OpenAI's form."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Choice(msgspec.Struct, frozen=True):
    """One whole output."""

    text: str
    finish: str


def response_id(kind: str, request_id: str) -> str:
    """The id clients see: the request id with OpenAI's prefix, so that a trace can be found by it."""
    return f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{request_id.removeprefix('req-')}"


def whole_body(
    kind: str, request_id: str, model: str, created: int, choices: Sequence[Choice], usage: Usage
) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    listed: list[dict[str, Any]] = []
    for index, choice in enumerate(choices):
        common = {"index": index, "logprobs": None, "finish_reason": choice.finish}
        if kind == "chat":
            listed.append(common | {"message": {"role": "assistant", "content": choice.text, "refusal": None}})
        else:
            listed.append(common | {"text": choice.text})
    return {
        "id": response_id(kind, request_id),
        "object": "chat.completion" if kind == "chat" else "text_completion",
        "created": created,
        "model": model,
        "choices": listed,
        "usage": usage.body(),
    }


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
