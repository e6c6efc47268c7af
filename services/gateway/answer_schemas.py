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


def object_of(fields: Mapping[str, Schema], optional: Iterable[str] = ()) -> Schema:
    """A closed object; every field but the optional ones is there."""
    left = set(optional)
    return {
        "type": "object",
        "properties": dict(fields),
        "required": [name for name in fields if name not in left],
        "additionalProperties": False,
    }


def list_of(item: Schema) -> Schema:
    """A list of them."""
    return {"type": "array", "items": item}


def map_of(value: Schema) -> Schema:
    """An object of any names with such values."""
    return {"type": "object", "additionalProperties": value}


def or_null(schema: Schema) -> Schema:
    """It, or null."""
    return {"anyOf": [schema, NULL]}


def _page(item: str) -> Schema:
    one = or_null(TEXT)
    return object_of(
        {"object": is_word("list"), "data": list_of(refer(item)), "first_id": one, "last_id": one, "has_more": FLAG}
    )


def is_word(word: str) -> Schema:
    """This word."""
    return {"const": word}


def answer_schemas() -> dict[str, Schema]:
    """Every answer and what it refers to, by name."""
    return {**_shared(), **_chat(), **_completion(), **_files(), **_batches(), **_tokens(), **_of_the_stack()}


def _shared() -> dict[str, Schema]:
    error = {"message": {"type": "string", "minLength": 1}, "type": TEXT, "param": or_null(TEXT)}
    details = ("reasoning_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens")
    usage = {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": object_of({"cached_tokens": COUNT}),
        "completion_tokens_details": object_of(dict.fromkeys(details, COUNT), optional=details[1:]),
    }
    names = ("total_ms", "queue_ms", "first_token_ms", "tokens_per_second")
    model = {"id": TEXT, "object": is_word("model"), "created": COUNT, "owned_by": TEXT}
    return {
        "Error": object_of({"error": object_of({**error, "code": or_null(TEXT)})}),
        "MessageError": object_of({"type": is_word("error"), "error": object_of({"type": TEXT, "message": TEXT})}),
        "Usage": object_of(usage),
        "Timings": object_of(dict.fromkeys(names, NUMBER), optional=names[1:]),
        "Model": object_of(model),
        "ModelList": object_of({"object": is_word("list"), "data": list_of(refer("Model"))}),
    }


def _generated(object_: str, choice: str, **more: Schema) -> Schema:
    fields: dict[str, Schema] = {
        "id": TEXT,
        "object": is_word(object_),
        "created": COUNT,
        "model": TEXT,
        "choices": list_of(refer(choice)),
        "usage": refer("Usage"),
        "service_tier": TIERS,
        "timings": refer("Timings"),
        **more,
    }
    return object_of(fields, optional=("service_tier", "timings", *more))


def _chunk(object_: str, choice: str) -> Schema:
    chunk = _generated(object_, choice)
    chunk["properties"]["usage"] = or_null(refer("Usage"))
    chunk["required"].remove("usage")
    return chunk


def _chat() -> dict[str, Schema]:
    function = object_of({"name": TEXT, "arguments": TEXT})
    piece = object_of({"name": TEXT, "arguments": TEXT}, optional=("name",))
    called = {"index": COUNT, "function": piece, "id": TEXT, "type": is_word("function")}
    message = {
        "role": is_word("assistant"),
        "content": or_null(TEXT),
        "refusal": NULL,
        "annotations": {"type": "array", "maxItems": 0},
        "reasoning_content": TEXT,
        "tool_calls": list_of(refer("AnsweredCall")),
    }
    delta = {
        "role": is_word("assistant"),
        "content": TEXT,
        "refusal": NULL,
        "reasoning_content": TEXT,
        "tool_calls": list_of(object_of(called, optional=("id", "type"))),
    }
    scored = {"token": TEXT, "logprob": NUMBER, "bytes": list_of(COUNT)}
    top = {"top_logprobs": list_of(object_of(scored))}
    scores = or_null(object_of({"content": list_of(object_of({**scored, **top})), "refusal": NULL}))
    choice = {"index": COUNT, "logprobs": scores}
    ended, running = {"enum": FINISH}, {"enum": [*FINISH, None]}
    return {
        "AnsweredCall": object_of({"id": TEXT, "type": is_word("function"), "function": function}),
        "ChatMessageAnswer": object_of(message, optional=("reasoning_content", "tool_calls")),
        "ChatChoice": object_of({**choice, "finish_reason": ended, "message": refer("ChatMessageAnswer")}),
        "ChatCompletion": _generated("chat.completion", "ChatChoice"),
        "ChatChunkChoice": object_of({**choice, "finish_reason": running, "delta": object_of(delta, optional=delta)}),
        "ChatCompletionChunk": _chunk("chat.completion.chunk", "ChatChunkChoice"),
    }


def _completion() -> dict[str, Schema]:
    scores = {
        "tokens": list_of(TEXT),
        "token_logprobs": list_of(or_null(NUMBER)),
        "top_logprobs": list_of(or_null(map_of(NUMBER))),
        "text_offset": list_of(COUNT),
    }
    choice = {"index": COUNT, "text": TEXT, "logprobs": or_null(object_of(scores))}
    return {
        "CompletionChoice": object_of({**choice, "finish_reason": {"enum": FINISH}}),
        "Completion": _generated("text_completion", "CompletionChoice"),
        "CompletionChunkChoice": object_of({**choice, "finish_reason": {"enum": [*FINISH, None]}}),
        "CompletionChunk": _chunk("text_completion", "CompletionChunkChoice"),
    }


def _files() -> dict[str, Schema]:
    file = {
        "id": TEXT,
        "object": is_word("file"),
        "bytes": COUNT,
        "created_at": COUNT,
        "expires_at": or_null(COUNT),
        "filename": TEXT,
        "purpose": TEXT,
        "status": is_word("processed"),
        "status_details": NULL,
    }
    return {
        "File": object_of(file),
        "FileList": _page("File"),
        "FileDeleted": object_of({"id": TEXT, "object": is_word("file"), "deleted": _is_true()}),
    }


def _is_true() -> Schema:
    return {"const": True}


def _batches() -> dict[str, Schema]:
    text, time_s = or_null(TEXT), or_null(COUNT)
    fault = object_of({"code": TEXT, "message": TEXT, "line": time_s, "param": text})
    letter = object_of({"custom_id": TEXT, "line": COUNT, "code": TEXT, "message": TEXT})
    usage = {
        "input_tokens": COUNT,
        "input_tokens_details": object_of({"cached_tokens": COUNT}),
        "output_tokens": COUNT,
        "output_tokens_details": object_of({"reasoning_tokens": COUNT}),
        "total_tokens": COUNT,
    }
    times = ("expires", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    batch = {
        "id": TEXT,
        "object": is_word("batch"),
        "endpoint": TEXT,
        "model": text,
        "errors": or_null(object_of({"object": is_word("list"), "data": list_of(fault)})),
        "input_file_id": TEXT,
        "completion_window": TEXT,
        "status": {"enum": STATUSES},
        "output_file_id": text,
        "error_file_id": text,
        "created_at": COUNT,
        **{f"{name}_at": time_s for name in times},
        "request_counts": object_of(dict.fromkeys(("total", "completed", "failed"), COUNT)),
        "usage": object_of(usage),
        "metadata": or_null(map_of(TEXT)),
        "dead_letters": list_of(letter),
    }
    return {"Batch": object_of(batch, optional=("dead_letters",)), "BatchList": _page("Batch")}


def _tokens() -> dict[str, Schema]:
    made_of = {"id": TEXT, "tokenizer": TEXT, "weights": list_of(TEXT), "kernels": list_of(TEXT)}
    return {
        "Tokenized": object_of({"count": COUNT, "max_model_len": COUNT, "tokens": list_of(COUNT)}),
        "Detokenized": object_of({"prompt": TEXT}),
        "MessageTokens": object_of({"input_tokens": COUNT}),
        "Version": object_of({"version": TEXT, "python": TEXT, "models": list_of(object_of(made_of))}),
    }


def _of_the_stack() -> dict[str, Schema]:
    kinds = (TraceSummary, TraceRow, SpanRecord)
    structs, found = msgspec.json.schema_components(kinds, ref_template=_TEMPLATE)
    summary, row, span = structs
    trace = {
        "trace_id": TEXT,
        "summary": or_null(summary),
        "length_s": NUMBER,
        "rows": list_of(row),
        "spans": list_of(span),
    }
    listed: Schema = list_of({"type": "object"})
    scheduler: Schema = {"type": ["object", "null"]}
    cluster = {
        "gateway": object_of({"id": TEXT, "requests": COUNT, "draining": FLAG}),
        "checks": map_of(FLAG),
        "scheduler": scheduler,
        "pools": list_of(object_of({"pool": TEXT, "scheduler": scheduler, "models": list_of(TEXT)})),
        "ingresses": listed,
        "workers": listed,
    }
    return {
        **found,
        "Identity": object_of({"tenant": TEXT, "key_id": TEXT, "admin": FLAG}),
        "TraceList": object_of({"data": list_of(summary)}),
        "Trace": object_of(trace),
        "Cluster": object_of(cluster),
        "Health": object_of({"status": is_word("ok")}),
        "Readiness": object_of({"status": {"enum": ["ready", "not ready"]}, "checks": map_of(FLAG)}),
    }
