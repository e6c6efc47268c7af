"""From the body of a request to the Responses API to the chat request that it is. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from shared.contracts.errors import InvalidInput
from shared.ingress.named import Names, renamed
from shared.ingress.openai_schema import ChatRequest, drop_neutral
from shared.ingress.parse import json_object, validated
from shared.ingress.responses_schema import (
    ITEM_NEUTRAL,
    ITEMS,
    REASONING_NEUTRAL,
    RESPONSES_NEUTRAL,
    TEXT_NEUTRAL,
    TOOL_NEUTRAL,
    FunctionCallItem,
    FunctionOutputItem,
    InputItem,
    MessageItem,
    PartType,
    ReasoningItem,
    ResponsesRequest,
    SchemaFormat,
    TextPart,
)

PART_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"annotations": (None, []), "logprobs": (None, [])}
_CONTENTS = ("content", "output", "summary")
_NAMES: Names = (
    (re.compile(r"^tools\.(\d+)\.function\b"), r"tools.\1"),
    (re.compile(r"^tool_choice\.function\b"), "tool_choice"),
    (re.compile(r"^response_format\.json_schema\b"), "text.format"),
    (re.compile(r"^response_format\b"), "text.format"),
    (re.compile(r"^messages\b"), "input"),
    (re.compile(r"^max_(completion_)?tokens\b"), "max_output_tokens"),
)
"""Fields of the chat request by the names they have here."""


@dataclass(frozen=True, slots=True)
class ParsedResponses:
    """`chat` is what is run, `asked` what the response repeats, `items` what is new of its input."""

    chat: ChatRequest
    asked: ResponsesRequest
    items: tuple[InputItem, ...]


def parse_responses(body: bytes) -> ParsedResponses:
    """The request in a body; one that goes on from another is run with what came before. Raises InvalidInput naming
    the field."""
    fields = drop_neutral(json_object(body), RESPONSES_NEUTRAL)
    items = _items(fields.pop("input", None))
    _drop_inside(fields, "reasoning", REASONING_NEUTRAL)
    _drop_inside(fields, "text", TEXT_NEUTRAL)
    if isinstance(tools := fields.get("tools"), list):
        fields["tools"] = [
            drop_neutral(tool, TOOL_NEUTRAL, f"tools.{index}.") if isinstance(tool, dict) else tool
            for index, tool in enumerate(tools)
        ]
    asked = validated(ResponsesRequest, fields)
    if asked.stream_options is not None and not asked.stream:
        raise InvalidInput("stream_options is only allowed when stream is true", param="stream_options")
    if asked.background and asked.store is False:
        raise InvalidInput("background: needs store, as its answer is asked for later", param="background")
    return ParsedResponses(chat_of(asked, items), asked, tuple(items))


def chat_of(asked: ResponsesRequest, items: Sequence[InputItem]) -> ChatRequest:
    """The chat request that a request with this whole input is. Raises InvalidInput naming the field."""
    try:
        return validated(ChatRequest, _chat(asked, items))
    except InvalidInput as error:
        raise named_here(error) from None


def items_of(given: Sequence[Mapping[str, Any]]) -> list[InputItem]:
    """Items as they are stored or answered, read as input. Raises InvalidInput."""
    return [_item(item, index) for index, item in enumerate(given)]


def named_here(error: InvalidInput) -> InvalidInput:
    """An error of the chat request, by the name that its field has in this API."""
    return renamed(error, _NAMES)


def _drop_inside(fields: dict[str, Any], name: str, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    if isinstance(fields.get(name), dict):
        fields[name] = drop_neutral(fields[name], neutral, f"{name}.")


# ------------------------------------------------------------------------------------------ input


def _items(given: Any) -> list[InputItem]:
    if given is None:
        raise InvalidInput("input: is required", param="input", code="missing_required_parameter")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise InvalidInput("input: must be a text or a list of items, and not empty", param="input")
    return [_item(item, index) for index, item in enumerate(given)]


def _item(item: Any, index: int) -> InputItem:
    where = f"input.{index}"
    if not isinstance(item, dict):
        raise InvalidInput(f"{where}: must be an item, an object", param=where)
    kind = item.get("type", "message")
    model = ITEMS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise InvalidInput(f"{where}.type: must be one of {', '.join(ITEMS)}", param=f"{where}.type")
    fields = drop_neutral(item, ITEM_NEUTRAL, f"{where}.")
    for name in _CONTENTS:
        parts = fields.get(name)
        if parts == [] and kind != "reasoning":
            raise InvalidInput(f"{where}.{name}: must hold at least one part", param=f"{where}.{name}")
        if isinstance(parts, list):
            fields[name] = [_part(part, f"{where}.{name}.{number}") for number, part in enumerate(parts)]
        elif parts is not None and not isinstance(parts, str):
            raise InvalidInput(f"{where}.{name}: must be a text or a list of parts", param=f"{where}.{name}")
    found: InputItem = validated(model, fields, ("input", index))
    return found


def _part(part: Any, where: str) -> TextPart:
    if not isinstance(part, dict):
        raise InvalidInput(f"{where}: must be a part, an object", param=where)
    if part.get("type") not in get_args(PartType):
        raise InvalidInput(f"{where}.type: must be one of {', '.join(get_args(PartType))}", param=f"{where}.type")
    fields = drop_neutral(part, PART_NEUTRAL, f"{where}.")
    fields.pop("parsed", None)  # the client library's own reading of the text
    return validated(TextPart, fields, tuple(where.split(".")))


# ------------------------------------------------------------------------------------------ the chat request


def _chat(asked: ResponsesRequest, items: Sequence[InputItem]) -> dict[str, Any]:
    found: dict[str, Any] = {"messages": _messages(asked, items)}
    same = ("model", "temperature", "top_p", "parallel_tool_calls", "service_tier", "stream", "cache_salt")
    found |= {name: getattr(asked, name) for name in same}
    found["max_completion_tokens"] = asked.max_output_tokens
    if asked.tools:
        found["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in asked.tools
        ]
    choice = asked.tool_choice
    if choice is not None:
        found["tool_choice"] = (
            choice if isinstance(choice, str) else {"type": "function", "function": {"name": choice.name}}
        )
    if asked.text is not None and (form := asked.text.format) is not None:
        found["response_format"] = form.model_dump(exclude_none=True, by_alias=True)
        if isinstance(form, SchemaFormat):
            schema = form.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
            found["response_format"] = {"type": "json_schema", "json_schema": schema}
    return found


def _messages(asked: ResponsesRequest, items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """One message each, but what a model thought, said and called in a turn is one."""
    found: list[dict[str, Any]] = []
    if asked.instructions is not None:
        found.append({"role": "system", "content": asked.instructions})
    turn: dict[str, Any] | None = None
    for item in items:
        if isinstance(item, MessageItem) and item.role != "assistant":
            turn = None
            found.append({"role": item.role, "content": _content(item.content)})
        elif isinstance(item, FunctionOutputItem):
            turn = None
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})
        else:
            if turn is None or not _goes_on(turn, item):
                turn = {"role": "assistant", "content": None}
                found.append(turn)
            _add(turn, item)
    for message in found:
        if message["content"] is None and not message.get("tool_calls"):
            message["content"] = ""  # thoughts alone
    return found


def _goes_on(turn: Mapping[str, Any], item: InputItem) -> bool:
    """True if the item may belong to the turn: thoughts, then what is said, then calls."""
    if isinstance(item, FunctionCallItem):
        return True
    begun = turn["content"] is not None or "tool_calls" in turn
    return not begun and not (isinstance(item, ReasoningItem) and "reasoning_content" in turn)


def _add(turn: dict[str, Any], item: InputItem) -> None:
    if isinstance(item, ReasoningItem):
        turn["reasoning_content"] = "".join(part.text for part in item.content or ())
    elif isinstance(item, MessageItem):
        turn["content"] = _content(item.content)
    elif isinstance(item, FunctionCallItem):
        call = {"name": item.name, "arguments": item.arguments}
        turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": call})


def _content(content: str | list[TextPart]) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    texts = [part.text for part in content]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
