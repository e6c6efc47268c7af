"""JSON Schemas of the answers, for the API's own description. Pure.

Objects are closed, and every field is always there unless it is said to be optional.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from shared.contracts.parts import SpanRecord
from shared.telemetry.trace_buffer import TraceSummary
from shared.telemetry.trace_rows import TraceRow

Schema = dict[str, Any]

_TEMPLATE = "#/components/schemas/{name}"
TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
FINISH = ["stop", "length", "tool_calls"]
TIERS: Schema = {"enum": ["default", "flex", "priority"]}
STATUSES = [
    *("validating", "failed", "in_progress", "finalizing"),
    *("completed", "expired", "cancelling", "cancelled"),
]


def refer(name: str) -> Schema:
    """A reference to a schema of this document."""
    return {"$ref": _TEMPLATE.format(name=name)}


def _object(fields: Mapping[str, Schema], optional: Iterable[str] = ()) -> Schema:
    left = set(optional)
    return {
        "type": "object",
        "properties": dict(fields),
        "required": [name for name in fields if name not in left],
        "additionalProperties": False,
    }


def _list(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def _map(value: Schema) -> Schema:
    return {"type": "object", "additionalProperties": value}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def _page(item: str) -> Schema:
    one = _or_null(TEXT)
    return _object(
        {"object": _is("list"), "data": _list(refer(item)), "first_id": one, "last_id": one, "has_more": FLAG}
    )


def _is(word: str) -> Schema:
    return {"const": word}


def answer_schemas() -> dict[str, Schema]:
    """Every answer and what it refers to, by name."""
    return {**_shared(), **_chat(), **_completion(), **_files(), **_batches(), **_tokens(), **_of_the_stack()}


def _shared() -> dict[str, Schema]:
    error = {"message": {"type": "string", "minLength": 1}, "type": TEXT, "param": _or_null(TEXT)}
    usage = {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": _object({"cached_tokens": COUNT}),
        "completion_tokens_details": _object({"reasoning_tokens": COUNT}),
    }
    names = ("total_ms", "queue_ms", "first_token_ms", "tokens_per_second")
    model = {"id": TEXT, "object": _is("model"), "created": COUNT, "owned_by": TEXT}
    return {
        "Error": _object({"error": _object({**error, "code": _or_null(TEXT)})}),
        "MessageError": _object({"type": _is("error"), "error": _object({"type": TEXT, "message": TEXT})}),
        "Usage": _object(usage),
        "Timings": _object(dict.fromkeys(names, NUMBER), optional=names[1:]),
        "Model": _object(model),
        "ModelList": _object({"object": _is("list"), "data": _list(refer("Model"))}),
    }


def _generated(object_: str, choice: str, **more: Schema) -> Schema:
    fields: dict[str, Schema] = {
        "id": TEXT,
        "object": _is(object_),
        "created": COUNT,
        "model": TEXT,
        "choices": _list(refer(choice)),
        "usage": refer("Usage"),
        "service_tier": TIERS,
        "timings": refer("Timings"),
        **more,
    }
    return _object(fields, optional=("service_tier", "timings", *more))


def _chunk(object_: str, choice: str) -> Schema:
    chunk = _generated(object_, choice)
    chunk["properties"]["usage"] = _or_null(refer("Usage"))
    chunk["required"].remove("usage")
    return chunk


def _chat() -> dict[str, Schema]:
    function = _object({"name": TEXT, "arguments": TEXT})
    piece = _object({"name": TEXT, "arguments": TEXT}, optional=("name",))
    called = {"index": COUNT, "function": piece, "id": TEXT, "type": _is("function")}
    message = {
        "role": _is("assistant"),
        "content": _or_null(TEXT),
        "refusal": NULL,
        "annotations": {"type": "array", "maxItems": 0},
        "reasoning_content": TEXT,
        "tool_calls": _list(refer("AnsweredCall")),
    }
    delta = {
        "role": _is("assistant"),
        "content": TEXT,
        "refusal": NULL,
        "reasoning_content": TEXT,
        "tool_calls": _list(_object(called, optional=("id", "type"))),
    }
    scored = {"token": TEXT, "logprob": NUMBER, "bytes": _list(COUNT)}
    top = {"top_logprobs": _list(_object(scored))}
    scores = _or_null(_object({"content": _list(_object({**scored, **top})), "refusal": NULL}))
    choice = {"index": COUNT, "logprobs": scores}
    ended, running = {"enum": FINISH}, {"enum": [*FINISH, None]}
    return {
        "AnsweredCall": _object({"id": TEXT, "type": _is("function"), "function": function}),
        "ChatMessageAnswer": _object(message, optional=("reasoning_content", "tool_calls")),
        "ChatChoice": _object({**choice, "finish_reason": ended, "message": refer("ChatMessageAnswer")}),
        "ChatCompletion": _generated("chat.completion", "ChatChoice"),
        "ChatChunkChoice": _object({**choice, "finish_reason": running, "delta": _object(delta, optional=delta)}),
        "ChatCompletionChunk": _chunk("chat.completion.chunk", "ChatChunkChoice"),
    }


def _completion() -> dict[str, Schema]:
    scores = {
        "tokens": _list(TEXT),
        "token_logprobs": _list(_or_null(NUMBER)),
        "top_logprobs": _list(_or_null(_map(NUMBER))),
        "text_offset": _list(COUNT),
    }
    choice = {"index": COUNT, "text": TEXT, "logprobs": _or_null(_object(scores))}
    return {
        "CompletionChoice": _object({**choice, "finish_reason": {"enum": FINISH}}),
        "Completion": _generated("text_completion", "CompletionChoice"),
        "CompletionChunkChoice": _object({**choice, "finish_reason": {"enum": [*FINISH, None]}}),
        "CompletionChunk": _chunk("text_completion", "CompletionChunkChoice"),
    }


def _files() -> dict[str, Schema]:
    file = {
        "id": TEXT,
        "object": _is("file"),
        "bytes": COUNT,
        "created_at": COUNT,
        "expires_at": _or_null(COUNT),
        "filename": TEXT,
        "purpose": TEXT,
        "status": _is("processed"),
        "status_details": NULL,
    }
    return {
        "File": _object(file),
        "FileList": _page("File"),
        "FileDeleted": _object({"id": TEXT, "object": _is("file"), "deleted": _is_true()}),
    }


def _is_true() -> Schema:
    return {"const": True}


def _batches() -> dict[str, Schema]:
    text, time_s = _or_null(TEXT), _or_null(COUNT)
    fault = _object({"code": TEXT, "message": TEXT, "line": time_s, "param": text})
    letter = _object({"custom_id": TEXT, "line": COUNT, "code": TEXT, "message": TEXT})
    usage = {
        "input_tokens": COUNT,
        "input_tokens_details": _object({"cached_tokens": COUNT}),
        "output_tokens": COUNT,
        "output_tokens_details": _object({"reasoning_tokens": COUNT}),
        "total_tokens": COUNT,
    }
    times = ("expires", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    batch = {
        "id": TEXT,
        "object": _is("batch"),
        "endpoint": TEXT,
        "model": text,
        "errors": _or_null(_object({"object": _is("list"), "data": _list(fault)})),
        "input_file_id": TEXT,
        "completion_window": TEXT,
        "status": {"enum": STATUSES},
        "output_file_id": text,
        "error_file_id": text,
        "created_at": COUNT,
        **{f"{name}_at": time_s for name in times},
        "request_counts": _object(dict.fromkeys(("total", "completed", "failed"), COUNT)),
        "usage": _object(usage),
        "metadata": _or_null(_map(TEXT)),
        "dead_letters": _list(letter),
    }
    return {"Batch": _object(batch, optional=("dead_letters",)), "BatchList": _page("Batch")}


def _tokens() -> dict[str, Schema]:
    made_of = {"id": TEXT, "tokenizer": TEXT, "weights": _list(TEXT), "kernels": _list(TEXT)}
    return {
        "Tokenized": _object({"count": COUNT, "max_model_len": COUNT, "tokens": _list(COUNT)}),
        "Detokenized": _object({"prompt": TEXT}),
        "MessageTokens": _object({"input_tokens": COUNT}),
        "Version": _object({"version": TEXT, "python": TEXT, "models": _list(_object(made_of))}),
    }


def _of_the_stack() -> dict[str, Schema]:
    kinds = (TraceSummary, TraceRow, SpanRecord)
    structs, found = msgspec.json.schema_components(kinds, ref_template=_TEMPLATE)
    summary, row, span = structs
    trace = {
        "trace_id": TEXT,
        "summary": _or_null(summary),
        "length_s": NUMBER,
        "rows": _list(row),
        "spans": _list(span),
    }
    listed: Schema = _list({"type": "object"})
    scheduler: Schema = {"type": ["object", "null"]}
    cluster = {
        "gateway": _object({"id": TEXT, "requests": COUNT, "draining": FLAG}),
        "checks": _map(FLAG),
        "scheduler": scheduler,
        "pools": _list(_object({"pool": TEXT, "scheduler": scheduler, "models": _list(TEXT)})),
        "ingresses": listed,
        "workers": listed,
    }
    return {
        **found,
        "Identity": _object({"tenant": TEXT, "key_id": TEXT, "admin": FLAG}),
        "TraceList": _object({"data": _list(summary)}),
        "Trace": _object(trace),
        "Cluster": _object(cluster),
        "Health": _object({"status": _is("ok")}),
        "Readiness": _object({"status": {"enum": ["ready", "not ready"]}, "checks": _map(FLAG)}),
    }
