"""SSE bytes of streamed answers. Pure.

Of a stream: every choice has exactly one chunk with a `finish_reason`, its last; the usage chunk comes after all of
them and only when asked for; then `[DONE]`. A stream that fails ends with an `error` frame and without `[DONE]`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from shared.contracts.errors import BatonError
from shared.ingress.choice_output import Piece, ScoredToken
from shared.ingress.completion_body import Usage, call_id, response_id
from shared.ingress.error_body import error_body
from shared.ingress.logprob_body import FormLogprobs
from shared.tools.tool_stream import CallStart

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.encode


class ChunkWriter:
    """SSE bytes of one stream. What does not change is encoded once, so a delta costs one string encoding.

    Args:
        kind: chat | completions.
        created: unix seconds.
        include_usage: the client asked for the usage chunk; then the others carry `"usage": null`.
        logprobs: how log-probabilities are written; None: none were asked for.
        extra: fields of every chunk.
        usage: the usage so far, which every chunk then has.
    """

    def __init__(
        self,
        kind: str,
        request_id: str,
        model: str,
        created: int,
        include_usage: bool,
        logprobs: FormLogprobs | None = None,
        extra: Mapping[str, Any] = MappingProxyType({}),
        usage: Callable[[], Usage] | None = None,
    ) -> None:
        self._chat = kind == "chat"
        self._request_id = request_id
        head = {
            "id": response_id(kind, request_id),
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": created,
            "model": model,
            **extra,
        }
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._tail = (b'],"usage":null}' if include_usage else b"]}") + b"\n\n"
        self._include_usage = include_usage
        self._logprobs = logprobs
        self._usage = usage

    def role(self, choice: int) -> bytes:
        """The first chunk of a chat choice; nothing for completions."""
        if not self._chat:
            return b""
        return self._chunk(choice, b'"delta":{"role":"assistant","content":"","refusal":null}', b"null")

    def piece(self, piece: Piece) -> bytes:
        """What came of a choice: its text, and its last chunk when it ended."""
        tokens, body = piece.tokens, b""
        if piece.thoughts:
            delta = b'"delta":{"reasoning_content":' + _encode(piece.thoughts) + b"}"
            body, tokens = self._chunk(piece.choice, delta, b"null", tokens), []
        if piece.text:
            body, tokens = body + self.delta(piece.choice, piece.text, tokens), []
        if piece.calls:
            delta = b'"delta":' + _encode({"tool_calls": self._calls(piece)})
            body, tokens = body + self._chunk(piece.choice, delta, b"null", tokens), []
        return body + self.finish(piece.choice, piece.finish, tokens) if piece.finish else body

    def _calls(self, piece: Piece) -> list[dict[str, Any]]:
        """News of calls: one entry a call, with id and name where it begins."""
        entries: dict[int, dict[str, Any]] = {}
        for news in piece.calls:
            entry = entries.setdefault(news.index, {"index": news.index, "function": {"arguments": ""}})
            if isinstance(news, CallStart):
                entry |= {"id": call_id(self._request_id, piece.choice, news.index), "type": "function"}
                entry["function"]["name"] = news.name
            else:
                entry["function"]["arguments"] += news.text
        return list(entries.values())

    def delta(self, choice: int, text: str, tokens: Sequence[ScoredToken] = ()) -> bytes:
        """A piece of text, with the scores of its tokens."""
        piece = _encode(text)
        body = b'"delta":{"content":' + piece + b"}" if self._chat else b'"text":' + piece
        return self._chunk(choice, body, b"null", tokens)

    def finish(self, choice: int, reason: str, tokens: Sequence[ScoredToken] = ()) -> bytes:
        """The last chunk of a choice."""
        return self._chunk(choice, b'"delta":{}' if self._chat else b'"text":""', _encode(reason), tokens)

    def end(self, usage: Usage, extra: Mapping[str, Any] = MappingProxyType({})) -> bytes:
        """What follows the last choice's last chunk; `extra` comes with the usage."""
        if not self._include_usage:
            return DONE
        return self._head + b"]," + _encode({"usage": usage.body(), **extra})[1:] + b"\n\n" + DONE

    def _chunk(self, choice: int, body: bytes, finish: bytes, tokens: Sequence[ScoredToken] = ()) -> bytes:
        index = b'{"index":%d,' % choice
        scores = _encode(self._logprobs(tokens)) if tokens and self._logprobs is not None else b"null"
        tail = self._tail if self._usage is None else b'],"usage":' + _encode(self._usage().body()) + b"}\n\n"
        return self._head + index + body + b',"logprobs":' + scores + b',"finish_reason":' + finish + b"}" + tail


def error_frame(error: BatonError) -> bytes:
    """The last frame of a stream that failed; client libraries raise on it."""
    return b"data: " + json.dumps(error_body(error)).encode() + b"\n\n"
