"""What a response was made from: as it is listed, kept and read again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.gateway.event_log import PART_BYTES
from services.gateway.stored_request import make_stored, pack, request_id_of, unpack
from shared.ingress.responses_items import page, told_items
from shared.ingress.responses_request import items_of, parse_responses
from tests import openai_oracle

CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
GIVEN: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "developer", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"role": "assistant", "content": "said"},
    CALL,
    {"type": "function_call_output", "call_id": "c", "output": "2"},
    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "2"}]},
]
NAME = b"n" * 32


def test_listed_items_are_openais_and_read_as_the_same_input() -> None:
    items = items_of(GIVEN)
    told = told_items(items, NAME)
    ids = [item["id"] for item in told]
    found = {"object": "list", "data": told, "first_id": ids[0], "last_id": ids[-1], "has_more": False}
    assert not openai_oracle.faults(found, "ResponseItemList")
    assert ids[2] == "rs_1"
    assert len(set(ids)) == len(ids)
    assert told_items(items, b"m" * 32)[0]["id"] != ids[0]
    assert told_items(items_of(told), b"other") == told


def test_an_id_that_came_before_is_not_listed_again() -> None:
    given = [{"id": "msg_1", "role": "user", "content": text} for text in "abc"]
    told = told_items(items_of(given), NAME)
    ids = [item["id"] for item in told]
    assert ids[0] == "msg_1"
    assert len(set(ids)) == len(ids)
    seen, after = [], ""
    while len(seen) < len(ids):
        (one,), _ = page(told, limit=1, descending=False, after=after, before="")
        seen.append(one["content"][0]["text"])
        after = one["id"]
    assert seen == ["a", "b", "c"]


def test_a_page_of_items() -> None:
    items = [{"id": str(number)} for number in range(5)]

    def ids(**asked: Any) -> tuple[str, bool]:
        found, more = page(items, **({"limit": 2, "descending": False, "after": "", "before": ""} | asked))
        return "".join(item["id"] for item in found), more

    assert ids() == ("01", True)
    assert ids(after="2") == ("34", False)
    assert ids(after="4") == ("", False)
    assert ids(descending=True) == ("43", True)
    assert ids(descending=True, after="1") == ("0", False)
    assert ids(before="2") == ("01", False)
    assert ids(descending=True, after="4", before="1", limit=9) == ("32", False)
    for name in ("after", "before"):
        with pytest.raises(LookupError, match=name):
            ids(**{name: "9"})


def test_a_kept_request_is_run_again_as_it_was() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tool = {"type": "function", "name": "f", "parameters": schema, "strict": True}
    fields: dict[str, Any] = {
        "model": "m",
        "instructions": "i",
        "temperature": 0.5,
        "tools": [tool],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        "reasoning": {},
        "background": True,
        "stream": True,
        "stream_options": {"include_obfuscation": False},
        "previous_response_id": "resp_1",
        "metadata": {"a": "b"},
    }
    first = parse_responses(_encode({**fields, "input": GIVEN}))
    kept = unpack(pack(make_stored(first.asked, first.items, NAME, {"id": "resp_1"})))
    assert kept is not None
    assert (kept.background, kept.stream, kept.name) == (True, True, NAME)
    again = parse_responses(kept.body())
    assert again.asked == first.asked
    assert told_items(again.items, NAME) == kept.items
    said = [message.content if isinstance(message.content, str) else None for message in again.chat.messages]
    assert len(said) == len(first.chat.messages)
    assert again.chat.tools == first.chat.tools


def _encode(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def test_a_request_is_kept_in_parts_and_not_by_half() -> None:
    parsed = parse_responses(_encode({"model": "m", "input": "x" * (PART_BYTES * 2)}))
    parts = pack(make_stored(parsed.asked, parsed.items, NAME, {}))
    assert len(parts) == 3
    assert max(map(len, parts)) <= PART_BYTES
    found = unpack(parts)
    assert found is not None
    assert found.items[0]["content"][0]["text"] == "x" * (PART_BYTES * 2)
    assert unpack(parts[:2]) is None
    assert unpack([]) is None


@pytest.mark.parametrize("given", ["", "resp_", "resp_1", "msg_" + "0" * 32, "resp_" + "G" * 32, "resp_" + "0" * 33])
def test_what_is_no_id_reaches_no_store(given: str) -> None:
    assert request_id_of(given) is None
    assert request_id_of("resp_" + "0" * 32) == "req-" + "0" * 32
