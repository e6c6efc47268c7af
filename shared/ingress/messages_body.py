"""A message as Anthropic's Messages API gives it: its events, the object they come to, and its errors. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.ingress.call_arguments import read_arguments
from shared.ingress.choice_output import Piece
from shared.ingress.completion_body import Usage, call_id
from shared.tools.tool_stream import CallStart, Content

Event = dict[str, Any]
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "invalid_request_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    499: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_KINDS = {
    "service_unavailable_error": "overloaded_error",
    "authentication_error": "authentication_error",
    "permission_error": "permission_error",
    "not_found_error": "not_found_error",
    "rate_limit_error": "rate_limit_error",
    "timeout_error": "timeout_error",
    "invalid_request_error": "invalid_request_error",
}
"""Types of errors in a stream, which has no status of theirs, by those of OpenAI's API."""


class MessageWriter:
    """One message on its way.

    Args:
        prompt_tokens: of the request.
    """

    def __init__(self, request_id: str, model: str, prompt_tokens: int) -> None:
        self._request_id = request_id
        self._message: dict[str, Any] = {
            "id": f"msg_{request_id.removeprefix('req-')}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(Usage(prompt_tokens, 0)),
        }
        self._content: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._texts: list[str] = []

    def begin(self) -> list[Event]:
        """The first events."""
        return [{"type": "message_start", "message": dict(self._message)}, {"type": "ping"}]

    def piece(self, piece: Piece) -> list[Event]:
        """The events of what came."""
        events: list[Event] = []
        if piece.thoughts:
            events += self._add("thinking", piece.thoughts)
        for news in piece.in_order:
            if isinstance(news, Content):
                events += self._add("text", news.text)
            elif isinstance(news, CallStart):
                block = {"id": call_id(self._request_id, 0, news.index), "name": news.name, "input": {}}
                events += self._close() + self._begin({"type": "tool_use", **block})
            elif news.text:
                events += self._delta({"type": "input_json_delta", "partial_json": news.text}, news.text)
        if piece.finish:
            events += self._close()
            stopped = piece.stop if piece.finish == "stop" else ""  # calls are to be answered, whatever ended them
            self._message["stop_reason"] = "stop_sequence" if stopped else _REASONS[piece.finish]
            self._message["stop_sequence"] = stopped or None
        return events

    def end(self, usage: Usage) -> list[Event]:
        """The last events."""
        self._message |= {"content": self._content, "usage": _usage(usage)}
        told = {name: self._message[name] for name in ("stop_reason", "stop_sequence")}
        return [{"type": "message_delta", "delta": told, "usage": _usage(usage)}, {"type": "message_stop"}]

    def whole(self, usage: Usage) -> dict[str, Any]:
        """The message, once it has ended."""
        self.end(usage)
        return self._message

    # ------------------------------------------------------------------------------------------ inside

    def _add(self, kind: str, text: str) -> list[Event]:
        events: list[Event] = []
        if self._open is None or self._open["type"] != kind:
            signed = {"signature": ""} if kind == "thinking" else {}
            events += self._close() + self._begin({"type": kind, kind: "", **signed})
        delta, field = _DELTAS[kind]
        return [*events, *self._delta({"type": delta, field: text}, text)]

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        self._open, self._texts = block, []
        return [{"type": "content_block_start", "index": len(self._content), "content_block": block}]

    def _delta(self, delta: dict[str, Any], text: str) -> list[Event]:
        self._texts.append(text)
        return [{"type": "content_block_delta", "index": len(self._content), "delta": delta}]

    def _close(self) -> list[Event]:
        block, text = self._open, "".join(self._texts)
        if block is None:
            return []
        kind = block["type"]
        told = {"type": "content_block_stop", "index": len(self._content)}
        self._content.append({**block, "input": read_arguments(text)} if kind == "tool_use" else {**block, kind: text})
        self._open = None
        return [told]


def _usage(usage: Usage) -> dict[str, int]:
    """Of this API's: tokens from the cache are not counted among the input's."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def error_as_message(body: Mapping[str, Any], status: int = 0) -> dict[str, Any]:
    """The body of an error of OpenAI's form in this API's; `status` 0: in a stream."""
    error = body["error"]
    kind = _ERRORS.get(status, "api_error") if status else _KINDS.get(str(error.get("type")), "api_error")
    message, param = str(error.get("message", "")), error.get("param")
    if param and not message.startswith(param):
        message = f"{param}: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}}
