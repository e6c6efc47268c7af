"""JSON Schemas of the bodies of the Responses API and of Anthropic's Messages API as this server takes them. Pure.

Their types say all but what is read by hand: items, blocks and what stands in them. Names have the API's in front.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from shared.ingress import messages_schema as messages
from shared.ingress import responses_schema as responses
from shared.ingress.messages_request import BLOCKS
from shared.ingress.request_schema import Schema, add_neutral, model_schemas
from shared.ingress.responses_request import PART_NEUTRAL

_TEXT: Schema = {"type": "string"}
_RESULT = "MessagesToolResultBlock"


def responses_schemas() -> dict[str, Schema]:
    """`ResponsesRequest` and what it refers to, by name."""
    name = responses.ResponsesRequest.__name__
    found = model_schemas(responses.ResponsesRequest, "Responses")
    found[name] = found.pop(f"Responses{name}")
    for item in responses.ITEMS.values():
        found |= model_schemas(item, "Responses")
    for item in responses.ITEMS.values():
        schema = found[f"Responses{item.__name__}"]
        add_neutral(schema, responses.ITEM_NEUTRAL)
        if item is not responses.ReasoningItem:
            for field in ("content", "output"):
                _not_empty(schema["properties"].get(field, {}))
    part = found["ResponsesTextPart"]
    add_neutral(part, PART_NEUTRAL)
    part["properties"]["parsed"] = {"description": "not read"}
    add_neutral(found[name], responses.RESPONSES_NEUTRAL)
    add_neutral(found["ResponsesReasoningOptions"], responses.REASONING_NEUTRAL)
    add_neutral(found["ResponsesTextOptions"], responses.TEXT_NEUTRAL)
    add_neutral(found["ResponsesFunctionTool"], responses.TOOL_NEUTRAL)
    items = [_refer("Responses", item) for item in responses.ITEMS.values()]
    _require(found[name], "input", {"anyOf": [_TEXT, _list({"anyOf": items})]})
    return found


def messages_schemas() -> dict[str, Schema]:
    """`MessagesRequest`, `MessagesCountRequest` and what they refer to, by name."""
    found: dict[str, Schema] = {}
    kinds: dict[str, type[BaseModel]] = {kind: model for blocks in BLOCKS.values() for kind, model in blocks.items()}
    for block in kinds.values():
        found |= model_schemas(block, "Messages")
        add_neutral(found[f"Messages{block.__name__}"], messages.BLOCK_NEUTRAL)
    texts = {"anyOf": [_TEXT, _list(_refer("Messages", messages.TextBlock))]}
    found[_RESULT]["properties"]["content"] = {"anyOf": [*texts["anyOf"], {"type": "null"}, {"const": []}]}
    for model in (messages.MessagesRequest, messages.CountRequest):
        found |= model_schemas(model, "Messages")
    add_neutral(found["MessagesTool"], messages.TOOL_NEUTRAL)
    found["MessagesRequest"] = found.pop("MessagesMessagesRequest")
    for name in ("MessagesRequest", "MessagesCountRequest"):
        add_neutral(found[name], messages.MESSAGES_NEUTRAL)
        found[name]["properties"]["system"] = {"anyOf": [*texts["anyOf"], {"type": "null"}, {"const": []}]}
        _require(found[name], "messages", _list({"oneOf": [_message(role) for role in BLOCKS]}))
    return found


def _message(role: str) -> Schema:
    blocks = [_refer("Messages", block) for block in BLOCKS[role].values()]
    content: Schema = {"anyOf": [_TEXT, _list({"anyOf": blocks}), *([{"const": []}] if role == "assistant" else [])]}
    return {
        "type": "object",
        "properties": {"role": {"const": role}, "content": content},
        "required": ["role", "content"],
        "additionalProperties": False,
    }


def _refer(prefix: str, model: type[BaseModel]) -> Schema:
    return {"$ref": f"#/components/schemas/{prefix}{model.__name__}"}


def _list(item: Mapping[str, Any]) -> Schema:
    return {"type": "array", "items": dict(item), "minItems": 1}


def _not_empty(schema: Schema) -> None:
    for form in schema.get("anyOf", ()):
        if form.get("type") == "array":
            form["minItems"] = 1


def _require(schema: Schema, name: str, field: Schema) -> None:
    schema["properties"][name] = field
    schema["required"] = [*schema.get("required", ()), name]
