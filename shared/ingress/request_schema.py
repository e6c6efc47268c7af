"""JSON Schemas of the bodies of OpenAI's requests as this server takes them. Pure.

They come from the strict types themselves, with what those never see: known parameters without support, which pass with
values that ask for nothing, and what client libraries add to messages that they hand back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from shared.ingress.field_docs import MEANING
from shared.ingress.openai_schema import (
    CHAT_NEUTRAL,
    COMPLETIONS_NEUTRAL,
    MESSAGE_NEUTRAL,
    ChatRequest,
    CompletionRequest,
)

_DROPPED: Mapping[str, tuple[str, ...]] = {
    "CalledFunction": ("parsed_arguments",),
    "ChatMessage": ("parsed",),
    "ToolCall": ("index",),
}
"""Fields that are taken and mean nothing, by type."""

Schema = dict[str, Any]
_NULL: Schema = {"type": "null"}


def chat_schemas() -> dict[str, Schema]:
    """`ChatRequest` and what it refers to, by name."""
    found = model_schemas(ChatRequest)
    add_neutral(found["ChatRequest"], CHAT_NEUTRAL)
    add_neutral(found["ChatMessage"], MESSAGE_NEUTRAL)
    for name, fields in _DROPPED.items():
        found[name]["properties"] |= {field: {"description": "not read"} for field in fields}
    found["ChatMessage"] = _by_role(found["ChatMessage"])
    found["ChatRequest"]["properties"]["messages"]["minItems"] = 1
    return _described(found, "ChatRequest")


def completion_schemas() -> dict[str, Schema]:
    """`CompletionRequest` and what it refers to, by name."""
    found = model_schemas(CompletionRequest)
    add_neutral(found["CompletionRequest"], COMPLETIONS_NEUTRAL)
    return _described(found, "CompletionRequest")


def model_schemas(model: type[BaseModel], prefix: str = "") -> dict[str, Schema]:
    """The schema of a type and of those it refers to, by name with `prefix` in front."""
    schema = model.model_json_schema(ref_template=f"#/components/schemas/{prefix}{{model}}")
    found: dict[str, Schema] = schema.pop("$defs", {})
    return {f"{prefix}{name}": _closed(schema) for name, schema in {model.__name__: schema, **found}.items()}


def _closed(schema: Any) -> Any:
    """Without what the library adds and clients need not know; names that no pattern allows are none."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    # a field may have the same name; its value is a schema
    kept = {
        name: _closed(value)
        for name, value in schema.items()
        if name not in ("title", "default") or isinstance(value, dict)
    }
    return {**kept, "additionalProperties": False} if "patternProperties" in kept else kept


def _by_role(message: Schema) -> Schema:
    """A message as `ChatMessage.fault` has it: what each role must hold, and what belongs to others."""
    fields = message["properties"]
    others = [role for role in fields["role"]["enum"] if role not in ("assistant", "tool")]
    calls = {"properties": {"tool_calls": {"type": "array", "minItems": 1}}, "required": ["tool_calls"]}
    text = {"properties": {"content": {"type": ["string", "array"]}}, "required": ["content"]}
    assistant = {**fields, "role": {"const": "assistant"}, "tool_call_id": _NULL}
    apart = {"tool_calls": _NULL, "reasoning_content": _NULL, "content": _not_null(fields["content"])}
    rest = {name: schema for name, schema in {**fields, **apart}.items() if name != "parsed"}
    tool = {**rest, "role": {"const": "tool"}, "tool_call_id": _not_null(fields["tool_call_id"])}
    plain = {**rest, "role": {"enum": others}, "tool_call_id": _NULL}
    needed = ["role", "content"]
    return {
        "description": message["description"],
        "oneOf": [
            {**message, "properties": plain, "required": needed},
            {**message, "properties": assistant, "anyOf": [text, calls]},
            {**message, "properties": tool, "required": [*needed, "tool_call_id"]},
        ],
    }


def _not_null(schema: Schema) -> Schema:
    return {**schema, "anyOf": [form for form in schema["anyOf"] if form != _NULL]}


def add_neutral(schema: Schema, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Add the fields without support, with the values that ask for nothing."""
    schema["properties"] |= {
        name: {"enum": list(values), "description": "not supported: these values ask for nothing"}
        for name, values in neutral.items()
    }


def _described(found: dict[str, Schema], name: str) -> dict[str, Schema]:
    outputs = found["StructuredOutputs"]
    given = ({"required": [form], "properties": {form: {"not": _NULL}}} for form in outputs["properties"])
    outputs["oneOf"] = list(given)
    for field, schema in found[name]["properties"].items():
        schema.setdefault("description", MEANING[field])
    return found
