"""Requests to the Messages API as chat requests, and what a message's events come to."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

from shared.contracts.errors import InvalidInput, Unavailable
from shared.ingress.call_arguments import MALFORMED
from shared.ingress.choice_output import Piece
from shared.ingress.completion_body import Usage
from shared.ingress.error_body import error_body
from shared.ingress.messages_body import MessageWriter, error_as_message
from shared.ingress.messages_request import named_here, parse_count, parse_messages
from shared.ingress.messages_schema import BLOCK_NEUTRAL, MESSAGES_NEUTRAL, TOOL_NEUTRAL
from shared.tools.tool_stream import CallArguments, CallStart

TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
HI = {"role": "user", "content": "hi"}
USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}


def parse(**fields: Any) -> Any:
    return parse_messages(json.dumps({"model": "m", "max_tokens": 9, "messages": [HI], **fields}).encode())


def blocks(role: str, *content: Any) -> dict[str, Any]:
    """Messages whose first one holds these blocks."""
    return {"messages": [{"role": role, "content": list(content)}, HI]}


def test_turns_are_messages() -> None:
    found = parse(
        system=[{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            HI,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "Let me see."},
                    USE,
                    {**USE, "id": "t2"},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sun"}]},
                    {"type": "tool_result", "tool_use_id": "t2", "content": "no such city", "is_error": True},
                    {"type": "text", "text": "a"},
                    {"type": "text", "text": "b"},
                ],
            },
        ],
    )
    messages = [message.for_template() for message in found.messages]
    assert messages[0] == {"role": "system", "content": "Be short."}
    assert (messages[2]["content"], messages[2]["reasoning_content"]) == ("Let me see.", "hm")
    assert [(call["id"], call["function"]["arguments"]) for call in messages[2]["tool_calls"]] == [
        ("t1", {"a": 1}),
        ("t2", {"a": 1}),
    ]
    assert messages[3:5] == [
        {"role": "tool", "tool_call_id": "t1", "content": "sun"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no such city"},
    ]
    assert messages[5] == {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}


def test_parameters_are_those_of_the_chat_request() -> None:
    chat = parse(
        temperature=0.5, top_p=0.5, top_k=3, stream=True, stop_sequences=["x"], tools=[{**TOOL, "description": "d"}]
    )
    assert (chat.output_limit, chat.temperature, chat.top_p, chat.top_k) == (9, 0.5, 0.5, 3)
    assert (chat.stream, chat.stop) == (True, ("x",))
    assert chat.tools[0].function.parameters == TOOL["input_schema"]
    for choice, wanted in (("auto", "auto"), ("any", "required"), ("none", "none")):
        assert parse(tools=[TOOL], tool_choice={"type": choice}).tool_choice == wanted
    one = parse(tools=[TOOL], tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True})
    assert (one.tool_choice.function.name, one.parallel_tool_calls) == ("f", False)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": ["a"] * 5}, "stop_sequences"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"output_config": {"effort": "low"}}, "output_config"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"n": 2}, "n"),
        ({"tools": [{**TOOL, "type": "web_search"}]}, "tools.0.type"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{**TOOL, "input_schema": {"type": "array"}}]}, "tools.0.input_schema"),
        ({"tools": [{**TOOL, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]}, "tools.0.cache_control"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.name"),
        ({"system": [{"type": "image"}]}, "system.0.type"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["hi"]}, "messages.0"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{**HI, "name": "x"}]}, "messages.0"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [HI, {"role": "assistant", "content": "I"}]}, "messages"),
        (blocks("user"), "messages.0.content"),
        (blocks("user", "x"), "messages.0.content.0"),
        (blocks("user", {"type": "image", "source": {}}), "messages.0.content.0.type"),
        (blocks("user", USE), "messages.0.content.0.type"),
        (blocks("user", {"type": "text"}), "messages.0.content.0.text"),
        (blocks("user", {"type": "text", "text": "x", "what": 1}), "messages.0.content.0.what"),
        (blocks("assistant", {**USE, "input": "x"}), "messages.0.content.0.input"),
        (blocks("user", {"type": "tool_result", "tool_use_id": "t", "content": {}}), "messages.0.content.0.content"),
        ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, "cache_control"),
        ({"speed": "fast"}, "speed"),
        (
            blocks("user", {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}),
            "messages.0.content.0.content.0.type",
        ),
    ],
)
def test_what_is_not_supported_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse(**fields)
    assert caught.value.param == param


def test_values_that_ask_for_nothing_pass() -> None:
    for name, values in MESSAGES_NEUTRAL.items():
        for value in values:
            parse(**{name: value})
    for name, values in TOOL_NEUTRAL.items():
        for value in values:
            parse(tools=[{**TOOL, name: value}])
    for name, values in BLOCK_NEUTRAL.items():
        for value in values:
            parse(**blocks("user", {"type": "text", "text": "x", name: value}))


def test_what_the_client_was_answered_can_be_sent_back() -> None:
    """As its library dumps it, every field set."""
    _, whole = told([*PIECES])
    content = anthropic.types.Message.model_validate(whole).model_dump()["content"]
    assert len(parse(messages=[{"role": "assistant", "content": content}, HI]).messages[0].tool_calls) == 2
    empty = parse(messages=[HI, {"role": "assistant", "content": []}, HI])
    assert empty.messages[1].content == ""


def test_no_system_blocks_are_no_system() -> None:
    assert [message.role for message in parse(system=[]).messages] == ["user"]


def test_an_empty_result_is_one() -> None:
    for content in (None, [], ""):
        result = {"type": "tool_result", "tool_use_id": "t1", "content": content}
        assert parse(**blocks("user", result)).messages[0].content == ""


def test_counting_needs_no_limit() -> None:
    body = {"model": "m", "messages": [HI], "tools": [TOOL], "tool_choice": {"type": "auto"}}
    assert parse_count(json.dumps(body).encode()).tools is not None
    with pytest.raises(InvalidInput) as caught:
        parse_count(json.dumps(body | {"max_tokens": 1}).encode())
    assert caught.value.param == "max_tokens"


def test_errors_name_fields_of_this_api() -> None:
    error = named_here(InvalidInput("no", param="tools.3.function.parameters"))
    assert error.param == "tools.3.input_schema"


# ---------------------------------------------------------------------------------------- messages


def told(pieces: list[Piece]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    streamed, whole, usage = MessageWriter("req-1", "m", 5), MessageWriter("req-1", "m", 5), Usage(5, 4, 2)
    events = streamed.begin()
    for piece in pieces:
        events += streamed.piece(piece)
        whole.piece(piece)
    return events + streamed.end(usage), whole.whole(usage)


PIECES = [
    Piece(0, thoughts="hm"),
    Piece(0, text="Let me"),
    Piece(0, text=" see."),
    Piece(0, calls=[CallStart(0, "f"), CallArguments(0, '{"a"')]),
    Piece(0, calls=[CallArguments(0, ": 1}"), CallStart(1, "f"), CallArguments(1, "{}")]),
    Piece(0, finish="tool_calls"),
]


def test_each_thought_text_and_call_is_a_block() -> None:
    events, whole = told(PIECES)
    assert [(event["type"], event.get("index")) for event in events] == [
        ("message_start", None),
        ("ping", None),
        *(("content_block_start", 0), ("content_block_delta", 0), ("content_block_stop", 0)),
        *(("content_block_start", 1), *[("content_block_delta", 1)] * 2, ("content_block_stop", 1)),
        *(("content_block_start", 2), *[("content_block_delta", 2)] * 2, ("content_block_stop", 2)),
        *(("content_block_start", 3), ("content_block_delta", 3), ("content_block_stop", 3)),
        ("message_delta", None),
        ("message_stop", None),
    ]
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole["content"][1]["text"] == "Let me see."
    assert [block["input"] for block in whole["content"][2:]] == [{"a": 1}, {}]
    assert len({block["id"] for block in whole["content"][2:]}) == 2
    assert whole["stop_reason"] == events[-2]["delta"]["stop_reason"] == "tool_use"
    assert whole["usage"] == events[-2]["usage"]
    assert (whole["usage"]["input_tokens"], whole["usage"]["cache_read_input_tokens"]) == (3, 2)
    assert events[0]["message"]["content"] == []
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block.get("text", block.get("thinking", block.get("input"))) for block in starts] == ["", "", {}, {}]


@pytest.mark.parametrize(
    ("finish", "stop", "reason"),
    [
        ("stop", "", "end_turn"),
        ("stop", "x", "stop_sequence"),
        ("length", "", "max_tokens"),
        ("tool_calls", "", "tool_use"),
    ],
)
def test_why_it_stopped(finish: str, stop: str, reason: str) -> None:
    _, whole = told([Piece(0, text="a", finish=finish, stop=stop)])
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, stop or None)


def test_calls_are_told_even_if_a_stop_sequence_came_behind_them() -> None:
    _, whole = told([*PIECES[:-1], Piece(0, finish="tool_calls", stop="x")])
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)


DEEP = '{"a":' * 101 + "1" + "}" * 101


def test_an_input_that_is_no_object_is_kept_whole() -> None:
    for text in ('{"a": ', "[1]", '{"a": NaN}', '{"a": -1e999}', '{"a": "\\ud800"}', DEEP, "[" * 5000):
        calls = [CallStart(0, "f"), CallArguments(0, text)]
        assert told([Piece(0, calls=list(calls), finish="length")])[1]["content"][0]["input"] == {MALFORMED: text}


def test_a_call_of_nothing_has_an_empty_input() -> None:
    said = told([Piece(0, calls=[CallStart(0, "f"), CallArguments(0, "")], finish="tool_calls")])
    assert said[1]["content"][0]["input"] == {}


def test_errors_have_this_apis_form() -> None:
    body = error_body(InvalidInput("must be 1 or more", param="max_tokens"))
    message = {"type": "invalid_request_error", "message": "max_tokens: must be 1 or more"}
    for status in (400, 0):
        assert error_as_message(body, status) == {"type": "error", "error": message}
    gone = error_as_message(error_body(Unavailable("gone", code="worker_lost")))
    assert gone["error"] == {"type": "overloaded_error", "message": "gone"}
