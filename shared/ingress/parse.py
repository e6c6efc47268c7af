"""Request bodies to checked requests; every fault becomes an InvalidInput that names the field."""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from shared.contracts.errors import InvalidInput
from shared.ingress.json_depth import too_deep
from shared.ingress.openai_schema import (
    CHAT_NEUTRAL,
    COMPLETIONS_NEUTRAL,
    MAX_CHOICES,
    MESSAGE_NEUTRAL,
    ChatRequest,
    CompletionRequest,
    drop_neutral,
)

MAX_PARAM_CHARS = 100
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_COUNTED = re.compile(r" after validation, not \w+$")
_WORDS = {
    "extra_forbidden": "unknown parameter",
    "missing": "is required",
    "union_tag_not_found": "is required",
    **dict.fromkeys(("dict_type", "model_attributes_type", "model_type"), "must be an object"),
}
"""What the library says of these in words of Python."""
_CODES = {
    "extra_forbidden": "unknown_parameter",
    "missing": "missing_required_parameter",
    "union_tag_not_found": "missing_required_parameter",
}

Model = TypeVar("Model", bound=BaseModel)


def parse_chat(body: bytes) -> ChatRequest:
    """The chat request in a body. Raises InvalidInput naming the field."""
    fields = drop_neutral(json_object(body), CHAT_NEUTRAL)
    messages = fields.get("messages")
    if isinstance(messages, list):
        fields["messages"] = [
            _message(message, f"messages.{index}.") if isinstance(message, dict) else message
            for index, message in enumerate(messages)
        ]
    request = validated(ChatRequest, fields)
    for index, message in enumerate(request.messages):
        if (fault := message.fault) is not None:
            param = f"messages.{index}.{fault[0]}"
            raise InvalidInput(f"{param}: {fault[1]}", param=param)
    both = (request.max_tokens, request.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise InvalidInput("max_tokens and max_completion_tokens differ; send one of them", param="max_tokens")
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidInput("top_logprobs: needs logprobs to be true", param="top_logprobs")
    _check_stream_options(request)
    return request


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    if message.get("role") == "assistant":  # to which OpenAI's client adds a field of its own
        message = {name: value for name, value in message.items() if name != "parsed"}
    return drop_neutral(message, MESSAGE_NEUTRAL, where)


def parse_completion(body: bytes) -> CompletionRequest:
    """The completion request in a body. Raises InvalidInput naming the field."""
    request = validated(CompletionRequest, drop_neutral(json_object(body), COMPLETIONS_NEUTRAL))
    if request.best_of is not None and request.best_of != request.choices:
        raise InvalidInput("best_of: only the value of n is supported", param="best_of")
    if request.choices * len(request.prompt) > MAX_CHOICES:
        raise InvalidInput(f"n: prompts and n come to more than {MAX_CHOICES} choices", param="n")
    _check_stream_options(request)
    return request


def parse_as(model: type[Model], body: bytes) -> Model:
    """A body that is a JSON object, as `model`. Raises InvalidInput naming the field."""
    return validated(model, json_object(body))


def _check_stream_options(request: ChatRequest | CompletionRequest) -> None:
    options = request.stream_options
    if options is not None and not request.stream:
        raise InvalidInput("stream_options is only allowed when stream is true", param="stream_options")
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        name = "stream_options.continuous_usage_stats"
        raise InvalidInput(f"{name}: needs include_usage to be true", param=name)
    if request.timings and request.stream and not (options and options.include_usage):
        raise InvalidInput("timings: a stream tells them with its usage; set include_usage", param="timings")


def json_object(body: bytes) -> dict[str, Any]:
    """A body that is a JSON object of valid text. Raises InvalidInput."""
    # NaN and Infinity pass here, so that the parameter which holds them can be named
    try:
        value = json.loads(body.removeprefix(BOM_UTF8).decode("utf-8"))
        if too_deep(value, body):
            raise RecursionError
        if _SURROGATE.search(body):
            _require_valid_text(value, ())
    except (ValueError, RecursionError) as exc:
        raise InvalidInput(f"the body is not valid JSON: {_reason(exc)}", code="invalid_json") from exc
    if not isinstance(value, dict):
        raise InvalidInput("the body must be a JSON object", code="invalid_json")
    return value


def _require_valid_text(value: Any, path: tuple[Any, ...]) -> None:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            name = param_name(path)
            raise InvalidInput(f"{name}: half of a surrogate pair is not valid Unicode", param=name) from None
    elif isinstance(value, dict):
        for key, item in value.items():
            _require_valid_text(key, (*path, key))
            _require_valid_text(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _require_valid_text(item, (*path, index))


def _reason(exc: ValueError | RecursionError) -> str:
    # other exceptions' words may quote the body
    if isinstance(exc, json.JSONDecodeError):
        return f"{exc.msg} at line {exc.lineno} column {exc.colno}"
    if isinstance(exc, RecursionError):
        return "nested too deeply"
    return "it is not UTF-8 text" if isinstance(exc, UnicodeDecodeError) else "a number in it is too long"


def validated(model: type[Model], fields: dict[str, Any], where: tuple[Any, ...] = ()) -> Model:
    """`fields` as `model`; `where` they stand in the body. Raises InvalidInput naming the field."""
    for name in fields:
        if name not in model.model_fields:  # the library would make an error of every one, of a million too
            param = param_name((*where, name))
            raise InvalidInput(f"{param}: unknown parameter", param=param, code="unknown_parameter")
    try:
        return model.model_validate(fields)
    except ValidationError as exc:
        fault = exc.errors(include_url=False, include_input=False)[0]
    kind, context = fault["type"], fault.get("ctx", {})
    path = _path(fault["loc"], fields, kind == "missing")
    if kind.startswith("union_tag"):
        path = (*path, context["discriminator"].strip("'"))
    param = param_name((*where, *path))
    message = _WORDS.get(kind, _COUNTED.sub("", fault["msg"]).removeprefix("Value error, "))
    if kind == "union_tag_invalid":
        message = f"must be one of {context['expected_tags']}"
    raise InvalidInput(f"{param}: {message[:1].lower()}{message[1:]}", param=param, code=_CODES.get(kind, ""))


def _path(loc: tuple[int | str, ...], fields: Any, missing: bool) -> tuple[int | str, ...]:
    """A fault's place without the names of forms, which the library puts between a field and what is in it."""
    path: list[int | str] = []
    value = fields
    for depth, part in enumerate(loc):
        inside = part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int)
        if inside or (missing and depth == len(loc) - 1):
            path.append(part)
            value = value[part] if inside else None
    return tuple(path)


def param_name(path: tuple[Any, ...]) -> str:
    """A field's path such as `messages.0.role`, cut and made safe to encode: unknown names come from strangers."""
    name = ".".join(str(part) or '""' for part in path)[:MAX_PARAM_CHARS]
    return name.encode("utf-8", "replace").decode()
