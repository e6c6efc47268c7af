"""From the body of a request to Anthropic's Messages API to the chat request that it is. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from shared.contracts.errors import InvalidInput
from shared.ingress.messages_schema import (
    BLOCK_NEUTRAL,
    MESSAGES_NEUTRAL,
    TOOL_NEUTRAL,
    CountRequest,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from shared.ingress.named import Names, renamed
from shared.ingress.openai_schema import ChatRequest, drop_neutral
from shared.ingress.parse import json_object, validated

ERROR_MARK = "Error: "
"""Before the content of a tool's result that is an error."""
BLOCKS: Mapping[str, Mapping[str, type[BaseModel]]] = {
    "user": {"text": TextBlock, "tool_result": ToolResultBlock},
    "assistant": {"text": TextBlock, "thinking": ThinkingBlock, "tool_use": ToolUseBlock},
}
_NAMES: Names = (
    (re.compile(r"^tools\.(\d+)\.function\.parameters\b"), r"tools.\1.input_schema"),
    (re.compile(r"^tools\.(\d+)\.function\b"), r"tools.\1"),
    (re.compile(r"^tool_choice\.function\b"), "tool_choice"),
    (re.compile(r"^stop\b"), "stop_sequences"),
)
"""Fields of the chat request by the names they have here."""
_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}


def parse_messages(body: bytes) -> ChatRequest:
    """The chat request of a `POST /v1/messages`. Raises InvalidInput naming the field."""
    fields, messages = _split(body)
    asked = validated(MessagesRequest, fields)
    same = ("max_tokens", "temperature", "top_p", "top_k", "stream")
    more: dict[str, Any] = {name: getattr(asked, name) for name in same}
    return _request(asked, messages, more | {"stop": asked.stop_sequences})


def parse_count(body: bytes) -> ChatRequest:
    """The chat request whose prompt is to be counted. Raises InvalidInput naming the field."""
    fields, messages = _split(body)
    return _request(validated(CountRequest, fields), messages, {})


def named_here(error: InvalidInput) -> InvalidInput:
    """An error of the chat request, by the name that its field has in this API."""
    return renamed(error, _NAMES)


def _split(body: bytes) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The fields whose types tell all about them, and the messages."""
    fields = drop_neutral(json_object(body), MESSAGES_NEUTRAL)
    messages = _system(fields.pop("system", None)) + _messages(fields.pop("messages", None))
    if isinstance(tools := fields.get("tools"), list):
        fields["tools"] = [
            drop_neutral(tool, TOOL_NEUTRAL, f"tools.{index}.") if isinstance(tool, dict) else tool
            for index, tool in enumerate(tools)
        ]
    return fields, messages


def _request(asked: CountRequest, messages: list[dict[str, Any]], more: dict[str, Any]) -> ChatRequest:
    found: dict[str, Any] = {"model": asked.model, "messages": messages, **more}
    if asked.tools:
        found["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                },
            }
            for tool in asked.tools
        ]
    if (choice := asked.tool_choice) is not None:
        if (choice.type == "tool") != (choice.name is not None):
            raise InvalidInput("tool_choice.name: belongs to type tool, which needs it", param="tool_choice.name")
        one = {"type": "function", "function": {"name": choice.name}}
        found["tool_choice"] = one if choice.type == "tool" else _CHOICES[choice.type]
        if choice.disable_parallel_tool_use is not None:
            found["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    try:
        return validated(ChatRequest, found)
    except InvalidInput as error:
        raise named_here(error) from None


# ------------------------------------------------------------------------------------------ messages


def _system(given: Any) -> list[dict[str, Any]]:
    if given is None or given == []:
        return []
    blocks = _blocks(given, "system", {"text": TextBlock})
    return [{"role": "system", "content": _content(blocks)}]


def _messages(given: Any) -> list[dict[str, Any]]:
    if given is None:
        raise InvalidInput("messages: is required", param="messages", code="missing_required_parameter")
    if not isinstance(given, list) or not given:
        raise InvalidInput("messages: must be a list of messages, and not empty", param="messages")
    found = [message for index, item in enumerate(given) for message in _message(item, f"messages.{index}")]
    if given[-1]["role"] == "assistant":
        message = "messages: the last one must be of role user: models here do not go on with a message of theirs"
        raise InvalidInput(message, param="messages")
    return found


def _message(item: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(item, dict):
        raise InvalidInput(f"{where}: must be a message, an object", param=where)
    for name in item:
        if name not in ("role", "content"):
            raise InvalidInput(f"{where}: has a role and a content, and nothing else", param=where)
    role = item.get("role")
    if not isinstance(role, str) or role not in BLOCKS:
        raise InvalidInput(f"{where}.role: must be user or assistant", param=f"{where}.role")
    content = item.get("content")
    if role == "assistant" and content == []:
        content = ""  # an answer without a word, sent back
    blocks = _blocks(content, f"{where}.content", BLOCKS[role])
    return _user(blocks) if role == "user" else _assistant(blocks)


Block = tuple[BaseModel, str]
"""A block, and the content of a tool's result."""


def _blocks(given: Any, where: str, kinds: Mapping[str, type[BaseModel]]) -> list[Block]:
    if isinstance(given, str):
        given = [{"type": "text", "text": given}]
    if not isinstance(given, list) or not given:
        raise InvalidInput(f"{where}: must be a text or a list of blocks, and not empty", param=where)
    return [_block(block, f"{where}.{number}", kinds) for number, block in enumerate(given)]


def _block(block: Any, where: str, kinds: Mapping[str, type[BaseModel]]) -> Block:
    if not isinstance(block, dict):
        raise InvalidInput(f"{where}: must be a block, an object", param=where)
    kind = block.get("type")
    model = kinds.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise InvalidInput(f"{where}.type: must be one of {', '.join(kinds)}", param=f"{where}.type")
    fields = drop_neutral(block, BLOCK_NEUTRAL, f"{where}.")
    content = ""
    if model is ToolResultBlock and (given := fields.pop("content", None)) not in (None, []):
        content = _texts(_blocks(given, f"{where}.content", {"text": TextBlock}))
    return validated(model, fields, tuple(where.split("."))), content


def _texts(blocks: Sequence[Block]) -> str:
    return "".join(block.text for block, _ in blocks if isinstance(block, TextBlock))


def _content(blocks: Sequence[Block]) -> str | list[dict[str, str]]:
    texts = [block.text for block, _ in blocks if isinstance(block, TextBlock)]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _user(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """A message for each tool's result, and one for the text between them."""
    found: list[dict[str, Any]] = []
    said: list[Block] = []
    for block, content in blocks:
        if not isinstance(block, ToolResultBlock):
            said.append((block, ""))
            continue
        if said:
            found.append({"role": "user", "content": _content(said)})
            said = []
        text = ERROR_MARK + content if block.is_error else content
        found.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
    return [*found, {"role": "user", "content": _content(said)}] if said else found


def _assistant(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    message: dict[str, Any] = {"role": "assistant", "content": _texts(blocks)}
    thoughts = "".join(block.thinking for block, _ in blocks if isinstance(block, ThinkingBlock))
    if thoughts:
        message["reasoning_content"] = thoughts
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)},
        }
        for block, _ in blocks
        if isinstance(block, ToolUseBlock)
    ]
    return [message | {"tool_calls": calls} if calls else message]
