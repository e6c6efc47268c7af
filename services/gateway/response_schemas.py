"""JSON Schemas of the Responses API's answers, for the API's own description. Pure; the rule is that of
`answer_schemas`."""

from __future__ import annotations

from services.gateway.answer_schemas import (
    COUNT,
    FLAG,
    NUMBER,
    TEXT,
    TIERS,
    Schema,
    is_word,
    list_of,
    map_of,
    object_of,
    or_null,
    refer,
)

_ITEM_STATUS: Schema = {"enum": ["in_progress", "completed", "incomplete"]}
_STATUS: Schema = {"enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]}
_ANY: Schema = {}


def response_schemas() -> dict[str, Schema]:
    """Responses, their items and lists of them, by name."""
    items = ("ResponseMessage", "ResponseReasoning", "ResponseFunctionCall")
    output = {"anyOf": [refer(name) for name in items]}
    listed = {"anyOf": [refer(name) for name in (*items, "ResponseInputMessage", "ResponseFunctionCallOutput")]}
    return {
        **_items(),
        "Response": _response(output),
        "ResponseItemList": object_of(
            {"object": is_word("list"), "data": list_of(listed), "first_id": TEXT, "last_id": TEXT, "has_more": FLAG}
        ),
        "ResponseDeleted": object_of({"id": TEXT, "object": is_word("response"), "deleted": {"const": True}}),
    }


def _items() -> dict[str, Schema]:
    part = object_of({"type": is_word("input_text"), "text": TEXT})
    said = {"type": is_word("output_text"), "text": TEXT, "annotations": list_of(_ANY), "logprobs": list_of(_ANY)}
    thought = object_of({"type": is_word("reasoning_text"), "text": TEXT})
    return {
        "ResponseMessage": _item("message", role=is_word("assistant"), content=list_of(object_of(said))),
        "ResponseInputMessage": _item("message", role={"enum": ["user", "system", "developer"]}, content=list_of(part)),
        "ResponseReasoning": _item("reasoning", summary=list_of(_ANY), content=list_of(thought)),
        "ResponseFunctionCall": _item("function_call", call_id=TEXT, name=TEXT, arguments=TEXT),
        "ResponseFunctionCallOutput": _item(
            "function_call_output", call_id=TEXT, output={"anyOf": [TEXT, list_of(part)]}
        ),
    }


def _item(kind: str, **fields: Schema) -> Schema:
    return object_of({"id": TEXT, "type": is_word(kind), "status": _ITEM_STATUS, **fields})


def _response(output: Schema) -> Schema:
    usage = {
        "input_tokens": COUNT,
        "input_tokens_details": object_of({"cached_tokens": COUNT, "cache_write_tokens": COUNT}),
        "output_tokens": COUNT,
        "output_tokens_details": object_of({"reasoning_tokens": COUNT}),
        "total_tokens": COUNT,
    }
    fields = {
        "id": TEXT,
        "object": is_word("response"),
        "created_at": COUNT,
        "status": _STATUS,
        "error": or_null(object_of({"code": TEXT, "message": TEXT})),
        "incomplete_details": or_null(object_of({"reason": is_word("max_output_tokens")})),
        "output": list_of(output),
        "model": TEXT,
        "background": FLAG,
        "instructions": or_null(TEXT),
        "max_output_tokens": or_null(COUNT),
        "metadata": map_of(TEXT),
        "parallel_tool_calls": FLAG,
        "previous_response_id": or_null(TEXT),
        "reasoning": map_of({"type": "null"}),
        "temperature": NUMBER,
        "top_p": NUMBER,
        "text": {"type": "object"},
        "tool_choice": {"anyOf": [TEXT, {"type": "object"}]},
        "tools": list_of({"type": "object"}),
        "truncation": is_word("disabled"),
        "usage": object_of(usage),
        "service_tier": TIERS,
        "user": TEXT,
        "safety_identifier": TEXT,
        "prompt_cache_key": TEXT,
    }
    return object_of(fields, optional=("usage", "service_tier", "user", "safety_identifier", "prompt_cache_key"))
