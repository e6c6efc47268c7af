"""JSON Schemas of what Anthropic's Messages API answers, for the API's own description. Pure; as `answer_schemas`."""

from __future__ import annotations

from services.gateway.answer_schemas import COUNT, NULL, TEXT, Schema, is_word, list_of, object_of, or_null, refer

_REASONS: Schema = {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]}


def message_schemas() -> dict[str, Schema]:
    """`Message`, the events of its stream, and what they refer to, by name."""
    events = _events()
    return {
        **_blocks(),
        **events,
        "MessageUsage": object_of(
            dict.fromkeys(
                ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens"), COUNT
            )
        ),
        "Message": _message(list_of(refer("MessageBlock")), _REASONS, or_null(TEXT)),
        "MessageEvent": {"oneOf": [refer(name) for name in events]},
    }


def _message(content: Schema, reason: Schema, sequence: Schema) -> Schema:
    return object_of(
        {
            "id": TEXT,
            "type": is_word("message"),
            "role": is_word("assistant"),
            "model": TEXT,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": refer("MessageUsage"),
        }
    )


def _blocks() -> dict[str, Schema]:
    text = object_of({"type": is_word("text"), "text": TEXT})
    thinking = object_of({"type": is_word("thinking"), "thinking": TEXT, "signature": is_word("")})
    use = object_of({"type": is_word("tool_use"), "id": TEXT, "name": TEXT, "input": {"type": "object"}})
    return {"MessageBlock": {"oneOf": [text, thinking, use]}}


def _events() -> dict[str, Schema]:
    deltas = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
    delta: Schema = {"oneOf": [object_of({"type": is_word(kind), field: TEXT}) for kind, field in deltas.items()]}
    ended = object_of({"stop_reason": _REASONS, "stop_sequence": or_null(TEXT)})
    begun = _message({"type": "array", "maxItems": 0}, NULL, NULL)
    return {
        "MessageStart": _event("message_start", message=begun),
        "MessagePing": _event("ping"),
        "MessageBlockStart": _event("content_block_start", index=COUNT, content_block=refer("MessageBlock")),
        "MessageBlockDelta": _event("content_block_delta", index=COUNT, delta=delta),
        "MessageBlockStop": _event("content_block_stop", index=COUNT),
        "MessageDelta": _event("message_delta", delta=ended, usage=refer("MessageUsage")),
        "MessageStop": _event("message_stop"),
    }


def _event(kind: str, **fields: Schema) -> Schema:
    return object_of({"type": is_word(kind), **fields})
