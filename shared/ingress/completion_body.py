"""The JSON body of an answer that is not streamed, and the parts every form of answer shares. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a finished request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    thought_tokens: int = 0
    prediction: tuple[int, int] | None = None  # tokens of a prediction that were right, and wrong; None: there is none

    def body(self) -> dict[str, Any]:
        """OpenAI's form."""
        details = {"reasoning_tokens": self.thought_tokens}
        if self.prediction is not None:
            details |= dict(
                zip(("accepted_prediction_tokens", "rejected_prediction_tokens"), self.prediction, strict=True)
            )
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": details,
        }

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            self.thought_tokens + other.thought_tokens,
            _added(self.prediction, other.prediction),
        )


def _added(one: tuple[int, int] | None, other: tuple[int, int] | None) -> tuple[int, int] | None:
    if one is None or other is None:
        return one or other
    return one[0] + other[0], one[1] + other[1]


class Call(msgspec.Struct, frozen=True):
    """A whole call of a tool; `arguments` is JSON, as the model wrote it."""

    id: str
    name: str
    arguments: str

    def body(self) -> dict[str, Any]:
        """OpenAI's form."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Choice(msgspec.Struct, frozen=True):
    """One whole output."""

    text: str
    finish: str
    logprobs: dict[str, Any] | None = None
    thoughts: str | None = None
    calls: tuple[Call, ...] = ()


def response_id(kind: str, request_id: str) -> str:
    """The id clients see: the request id with OpenAI's prefix, so that a trace can be found by it."""
    return f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{request_id.removeprefix('req-')}"


def call_id(request_id: str, choice: int, index: int) -> str:
    """The id of a call: the same however often the answer is given."""
    return f"call_{hashlib.blake2b(f'{request_id}|{choice}|{index}'.encode(), digest_size=12).hexdigest()}"


def _message(choice: Choice) -> dict[str, Any]:
    content = None if choice.calls and not choice.text else choice.text
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, "annotations": []}
    if choice.thoughts:
        message["reasoning_content"] = choice.thoughts
    if choice.calls:
        message["tool_calls"] = [call.body() for call in choice.calls]
    return message


def whole_body(
    kind: str,
    request_id: str,
    model: str,
    created: int,
    choices: Sequence[Choice],
    usage: Usage,
    extra: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """The body of an answer that is not streamed; `extra` are fields that a request asks for."""
    listed: list[dict[str, Any]] = []
    for index, choice in enumerate(choices):
        common = {"index": index, "logprobs": choice.logprobs, "finish_reason": choice.finish}
        if kind == "chat":
            listed.append(common | {"message": _message(choice)})
        else:
            listed.append(common | {"text": choice.text})
    return {
        "id": response_id(kind, request_id),
        "object": "chat.completion" if kind == "chat" else "text_completion",
        "created": created,
        "model": model,
        "choices": listed,
        "usage": usage.body(),
        **extra,
    }
