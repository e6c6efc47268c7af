"""JSON Schemas of the events of a response's stream, for the API's own description. Pure; as `answer_schemas`."""

from __future__ import annotations

from collections.abc import Mapping

from services.gateway.answer_schemas import COUNT, TEXT, Schema, is_word, list_of, object_of, refer

_WHOLE = ("created", "queued", "in_progress", "completed", "incomplete", "failed")
_SCORES: Schema = {"type": "array", "maxItems": 0}


def response_event_schemas() -> dict[str, Schema]:
    """`ResponseEvent`, of whose kinds each has its own fields, by name."""
    item: Schema = {"anyOf": [refer(name) for name in ("ResponseMessage", "ResponseReasoning", "ResponseFunctionCall")]}
    said = object_of({"type": is_word("output_text"), "text": TEXT, "annotations": list_of({}), "logprobs": _SCORES})
    thought = object_of({"type": is_word("reasoning_text"), "text": TEXT})
    part: Schema = {"oneOf": [said, thought]}
    kinds: dict[str, Mapping[str, Schema]] = {
        **{kind: {"response": refer("Response")} for kind in _WHOLE},
        **{f"output_item.{when}": {"output_index": COUNT, "item": item} for when in ("added", "done")},
        **{f"content_part.{when}": _of_part(part=part) for when in ("added", "done")},
        "output_text.delta": _of_part(delta=TEXT, logprobs=_SCORES),
        "output_text.done": _of_part(text=TEXT, logprobs=_SCORES),
        "reasoning_text.delta": _of_part(delta=TEXT),
        "reasoning_text.done": _of_part(text=TEXT),
        "function_call_arguments.delta": _of_item(delta=TEXT),
        "function_call_arguments.done": _of_item(name=TEXT, arguments=TEXT),
    }
    return {"ResponseEvent": {"oneOf": [_event(f"response.{kind}", fields) for kind, fields in kinds.items()]}}


def _event(kind: str, fields: Mapping[str, Schema]) -> Schema:
    return object_of({"type": is_word(kind), "sequence_number": COUNT, **fields})


def _of_item(**fields: Schema) -> dict[str, Schema]:
    return {"item_id": TEXT, "output_index": COUNT, **fields}


def _of_part(**fields: Schema) -> dict[str, Schema]:
    return _of_item(content_index=COUNT, **fields)
