"""What each route takes and answers, for the API's own description. A new route gets a line in `OPERATIONS`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from services.gateway.answer_schemas import Schema, refer
from services.gateway.batches import MAX_PAGE as MAX_BATCHES
from services.gateway.batches import BatchBody
from services.gateway.files import MAX_PAGE as MAX_FILES
from services.gateway.observe import MAX_TRACES
from services.gateway.once import MAX_KEY_CHARS
from services.gateway.query import MAX_CHARS
from services.gateway.stored_routes import FLAG, MAX_EVENT
from services.gateway.stored_routes import MAX_PAGE as MAX_ITEMS
from services.gateway.token_routes import DetokenizeBody, EmbeddingsBody
from services.gateway.upload import FIELDS, MAX_EXPIRY_S, MIN_EXPIRY_S
from shared.ingress.dialect_schemas import messages_schemas, responses_schemas
from shared.ingress.request_schema import chat_schemas, completion_schemas, model_schemas

JSON = "application/json"
Content = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Operation:
    """A route's own part.

    Attributes:
        answers: by status, content by media type.
        errors: statuses beside those that every route has.
        body: content by media type; None: it reads no body.
        parameters: of query and headers.
        path_schema: of its path parameters, where not any text will do.
        error: the schema of its errors; empty: any.
    """

    answers: Mapping[int, Content]
    errors: tuple[int, ...] = ()
    body: Content | None = None
    body_required: bool = True
    parameters: tuple[Mapping[str, Any], ...] = ()
    path_schema: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    error: str = "Error"


def body_schemas() -> dict[str, Schema]:
    """Every body and what it refers to, by name."""
    found = {**chat_schemas(), **completion_schemas()}
    for model in (BatchBody, DetokenizeBody, EmbeddingsBody):
        found |= model_schemas(model)
    found |= {**responses_schemas(), **messages_schemas()}
    return {**found, "TokenizeRequest": _tokenize(found), "Upload": _upload()}


def _tokenize(found: Mapping[str, Schema]) -> Schema:
    prompt = {"type": "string", "minLength": 1}
    text = found["CompletionRequest"]
    one = {**text, "properties": {**text["properties"], "prompt": prompt}}
    return {"anyOf": [refer("ChatRequest"), one]}


def _upload() -> Schema:
    seconds = {"type": "integer", "minimum": MIN_EXPIRY_S, "maximum": MAX_EXPIRY_S}
    purpose, anchor, length = FIELDS
    fields = {
        "file": {"type": "string", "format": "binary"},
        purpose: {"const": "batch"},
        anchor: {"const": "created_at"},
        length: seconds,
    }
    return {
        "type": "object",
        "properties": fields,
        "required": ["file", purpose],
        "dependentRequired": {anchor: [length], length: [anchor]},
        "additionalProperties": False,
    }


def _json(name: str) -> Content:
    return {JSON: {"schema": refer(name)}}


def _parameter(where: str, name: str, schema: Mapping[str, Any], description: str = "") -> Mapping[str, Any]:
    told = {"description": description} if description else {}
    return {"name": name, "in": where, "required": False, "schema": schema, **told}


def _stream(whole: str, event: str) -> Content:
    told = f"`data: ` and one {event} each, then `data: [DONE]`; a failure is a last event `data: ` with an Error."
    return {
        **_json(whole),
        "text/event-stream": {"schema": {"description": told}, "x-event-schema": refer(event)},
    }


_SHORT: Schema = {"type": "string", "maxLength": MAX_CHARS}
_AFTER = _parameter("query", "after", _SHORT, "the id behind which the page begins")
_KEY = _parameter(
    "header",
    "Idempotency-Key",
    {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARS, "pattern": "^[!-~]+( +[!-~]+)*$"},
    "the same request under the same key is run once",
)
_RESUME = _parameter(
    "header",
    "Last-Event-ID",
    {"type": "string", "pattern": "^[0-9]{1,9}-[0-9]{1,9}(-[0-9]{1,9}f?)*$"},
    "goes on behind this event; of a stream with an Idempotency-Key",
)
_GENERATION = (400, 403, 404, 409, 413, 422, 499, 504)


def _limit(most: int) -> Mapping[str, Any]:
    return _parameter("query", "limit", {"type": "integer", "minimum": 1, "maximum": most})


def _generate(body: str, whole: str, event: str) -> Operation:
    return Operation({200: _stream(whole, event)}, _GENERATION, _json(body), parameters=(_KEY, _RESUME))


def _named_stream(whole: str, event: str, failure: str) -> Content:
    told = f"`event: ` and `data: ` with one {event} each; {failure}."
    return {
        **_json(whole),
        "text/event-stream": {"schema": {"description": told}, "x-event-schema": refer(event)},
    }


_ANY: Content = {JSON: {}, "text/event-stream": {}}
_RESPONSE = _named_stream("Response", "ResponseEvent", "a failure of the door itself is a last `data: ` with an Error")
_MESSAGE = _named_stream("Message", "MessageEvent", "a failure is a last `event: error` with a MessageError")
_EVENT: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_EVENT}
UNKNOWN = Operation({200: _ANY}, _GENERATION, {JSON: {}}, body_required=False, error="")
"""A route that nothing here tells of."""

_FILE: Content = {kind: {} for kind in ("text/html", "text/css", "text/javascript", "image/svg+xml", "text/plain")}
_NOTHING: Content = {}


def _read(path: str, operation: Operation) -> dict[tuple[str, str], Operation]:
    return {(method, path): operation for method in ("GET", "HEAD")}


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): _generate("ChatRequest", "ChatCompletion", "ChatCompletionChunk"),
    ("POST", "/v1/completions"): _generate("CompletionRequest", "Completion", "CompletionChunk"),
    **_read("/v1/models", Operation({200: _json("ModelList")})),
    **_read("/v1/models/{model_id}", Operation({200: _json("Model")}, (404,))),
    ("POST", "/v1/files"): Operation(
        {200: _json("File")},
        (400, 409, 413, 422),
        {"multipart/form-data": {"schema": refer("Upload")}},
        parameters=(_KEY,),
    ),
    ("GET", "/v1/files"): Operation(
        {200: _json("FileList")},
        (400, 404),
        parameters=(
            _limit(MAX_FILES),
            _parameter("query", "order", {"enum": ["desc", "asc"]}),
            _AFTER,
            _parameter("query", "purpose", _SHORT),
        ),
    ),
    ("GET", "/v1/files/{file_id}"): Operation({200: _json("File")}, (404,)),
    ("DELETE", "/v1/files/{file_id}"): Operation({200: _json("FileDeleted")}, (404, 409)),
    ("GET", "/v1/files/{file_id}/content"): Operation({200: {"application/octet-stream": {}}}, (404,)),
    ("POST", "/v1/batches"): Operation(
        {200: _json("Batch")}, (400, 404, 409, 413, 422), _json("BatchBody"), parameters=(_KEY,)
    ),
    ("GET", "/v1/batches"): Operation({200: _json("BatchList")}, (400, 404), parameters=(_limit(MAX_BATCHES), _AFTER)),
    ("GET", "/v1/batches/{batch_id}"): Operation({200: _json("Batch")}, (404,)),
    ("POST", "/v1/batches/{batch_id}/cancel"): Operation({200: _json("Batch")}, (400, 404, 409)),
    ("POST", "/tokenize"): Operation({200: _json("Tokenized")}, (400, 404, 413), _json("TokenizeRequest")),
    ("POST", "/v1/messages"): Operation(
        {200: _MESSAGE},
        _GENERATION,
        _json("MessagesRequest"),
        parameters=(_KEY, _RESUME),
        error="MessageError",
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        {200: _json("MessageTokens")}, (400, 404, 413), _json("MessagesCountRequest"), error="MessageError"
    ),
    ("POST", "/v1/responses"): Operation(
        {200: _RESPONSE}, _GENERATION, _json("ResponsesRequest"), parameters=(_KEY, _RESUME)
    ),
    ("GET", "/v1/responses/{response_id}"): Operation(
        {200: _RESPONSE},
        (400, 404, 409),
        parameters=(
            _parameter("query", "stream", {"enum": list(FLAG)}, "its events; of one in the background"),
            _parameter("query", "starting_after", _EVENT, "the event behind which the stream begins"),
            _parameter("query", "include_obfuscation", {"const": "false"}),
        ),
    ),
    ("DELETE", "/v1/responses/{response_id}"): Operation({200: _json("ResponseDeleted")}, (404,)),
    ("POST", "/v1/responses/{response_id}/cancel"): Operation({200: _json("Response")}, (400, 404)),
    ("GET", "/v1/responses/{response_id}/input_items"): Operation(
        {200: _json("ResponseItemList")},
        (400, 404),
        parameters=(
            _limit(MAX_ITEMS),
            _parameter("query", "order", {"enum": ["desc", "asc"]}),
            _AFTER,
            _parameter("query", "before", _SHORT, "the id before which the page ends"),
        ),
    ),
    ("POST", "/detokenize"): Operation({200: _json("Detokenized")}, (400, 404, 413), _json("DetokenizeBody")),
    ("POST", "/v1/embeddings"): Operation({}, (400, 404, 413), _json("EmbeddingsBody")),
    ("GET", "/version"): Operation({200: _json("Version")}),
    ("GET", "/openapi.json"): Operation({200: {JSON: {"schema": {"type": "object"}}}}),
    ("GET", "/baton/identity"): Operation({200: _json("Identity")}),
    ("GET", "/baton/traces"): Operation({200: _json("TraceList")}, (400,), parameters=(_limit(MAX_TRACES),)),
    ("GET", "/baton/traces/{trace_id}"): Operation({200: _json("Trace")}, (404,)),
    ("GET", "/baton/cluster"): Operation({200: _json("Cluster")}, (403,)),
    **_read("/health", Operation({200: _json("Health")})),
    **_read("/ready", Operation({200: _json("Readiness"), 503: _json("Readiness")})),
    **_read("/", Operation({307: _NOTHING}, (404,))),
    **_read("/console", Operation({200: _FILE, 304: _NOTHING})),
    **_read("/console/{path}", Operation({200: _FILE, 304: _NOTHING, 307: _NOTHING}, (404,))),
}
