"""Requests to the Responses API as chat requests, and what a response's events come to."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from shared.contracts.errors import InvalidInput, Unavailable
from shared.contracts.sampling import SamplingParams
from shared.ingress.choice_output import Piece
from shared.ingress.completion_body import Usage
from shared.ingress.request_plan import RequestPlan
from shared.ingress.responses_body import ResponseWriter
from shared.ingress.responses_request import PART_NEUTRAL, named_here, parse_responses
from shared.ingress.responses_schema import (
    ITEM_NEUTRAL,
    REASONING_NEUTRAL,
    RESPONSES_NEUTRAL,
    TEXT_NEUTRAL,
    TOOL_NEUTRAL,
    ResponsesRequest,
)
from shared.tools.tool_stream import CallArguments, CallStart
from tests import openai_oracle

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "f", "arguments": '{"a": 1}'}


def parse(**fields: Any) -> Any:
    return parse_responses(json.dumps({"model": "m", "input": "hi", **fields}).encode())


def messages(**fields: Any) -> list[dict[str, Any]]:
    return [message.for_template() for message in parse(**fields).chat.messages]


# ---------------------------------------------------------------------------------------- requests


def test_text_and_instructions_are_messages() -> None:
    assert messages() == [{"role": "user", "content": "hi"}]
    assert messages(instructions="Be short.")[0] == {"role": "system", "content": "Be short."}


def test_a_turn_of_thoughts_text_and_calls_is_one_message() -> None:
    said = {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "phase": None,
        "content": [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": [], "parsed": None}],
    }
    thought = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
        "encrypted_content": None,
        "status": None,
    }
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"role": "user", "content": "weather?"},
        thought,
        said,
        CALL,
        {**CALL, "call_id": "call_2", "parsed_arguments": None},
        {"type": "function_call_output", "call_id": "call_1", "output": "sun"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "rain"}]},
        {"role": "assistant", "content": "Sun, then rain."},
        thought,
    ]
    found = messages(input=items)
    assert [message["role"] for message in found] == [
        "developer",
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "assistant",
    ]
    assert found[0]["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    turn = found[2]
    assert (turn["reasoning_content"], turn["content"]) == ("hm", "Let me see.")
    assert [(call["id"], call["function"]["arguments"]) for call in turn["tool_calls"]] == [
        ("call_1", {"a": 1}),
        ("call_2", {"a": 1}),
    ]
    assert found[4] == {"role": "tool", "tool_call_id": "call_2", "content": "rain"}
    assert found[6]["content"] == ""


def test_parameters_are_those_of_the_chat_request() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    chat = parse(
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.5,
        tools=[{**TOOL, "strict": True, "description": "d"}],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        service_tier="flex",
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        stream=True,
        stream_options={"include_obfuscation": False},
    ).chat
    assert (chat.output_limit, chat.temperature, chat.top_p, chat.stream) == (7, 0.5, 0.5, True)
    assert (chat.parallel_tool_calls, chat.service_tier) == (False, "flex")
    assert chat.tools[0].function.model_dump() == {
        "name": "f",
        "description": "d",
        "parameters": TOOL["parameters"],
        "strict": True,
    }
    assert chat.tool_choice.function.name == "f"
    assert chat.response_format.json_schema.json_schema == schema


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": "yes"}, "store"),
        ({"store": False, "background": True}, "background"),
        ({"previous_response_id": ""}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"reasoning": {"what": 1}}, "reasoning.what"),
        ({"reasoning": []}, "reasoning"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools.0.defer_loading"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"stop": ["a"]}, "stop"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ["hi"]}, "input.0"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"role": "user", "content": []}]}, "input.0.content"),
        ({"input": [{"role": "user", "content": ["x"]}]}, "input.0.content.0"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0.type",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0.text"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"input": [{"type": [], "id": "x"}]}, "input.0.type"),
        ({"input": [{**CALL, "arguments": {}}]}, "input.0.arguments"),
        ({"input": [{"type": "reasoning", "summary": [{"type": "x"}]}]}, "input.0.summary.0.type"),
        ({"safety_identifier": "s" * 65}, "safety_identifier"),
        ({"prompt_cache_key": "s" * 65}, "prompt_cache_key"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input.0.encrypted_content"),
    ],
)
def test_what_is_not_supported_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse(**fields)
    assert caught.value.param == param


def test_values_that_ask_for_nothing_pass() -> None:
    for name, values in RESPONSES_NEUTRAL.items():
        for value in values:
            parse(**{name: value})
    parse(reasoning=dict.fromkeys(REASONING_NEUTRAL), text=dict.fromkeys(TEXT_NEUTRAL))
    parse(reasoning=None, text=None, tools=[TOOL | dict.fromkeys(TOOL_NEUTRAL)])
    part = {"type": "input_text", "text": "x"} | dict.fromkeys(PART_NEUTRAL)
    parse(input=[{"role": "user", "content": [part]} | dict.fromkeys(ITEM_NEUTRAL)])


def test_no_field_of_openai_is_unknown() -> None:
    """Each works, or is refused as one that is known and has no support."""
    schema = openai_oracle._merged(openai_oracle.document()["components"]["schemas"]["CreateResponse"])
    assert schema is not None
    for field in schema["properties"]:
        assert (field in ResponsesRequest.model_fields) + (field in RESPONSES_NEUTRAL) + (field == "input") == 1, field
        with pytest.raises(InvalidInput) as caught:
            parse(**{field: [{"no": "field takes this"}]})
        assert caught.value.param.split(".")[0] == field
        assert (caught.value.param, caught.value.code) != (field, "unknown_parameter")


@pytest.mark.parametrize(
    ("param", "named"),
    [
        ("messages", "input"),
        ("max_tokens", "max_output_tokens"),
        ("tools.3.function.parameters", "tools.3.parameters"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("model", "model"),
    ],
)
def test_errors_name_fields_of_this_api(param: str, named: str) -> None:
    error = named_here(InvalidInput(f"{param}: no", param=param, code="c"))
    assert (error.param, error.message, error.code) == (named, f"{named}: no", "c")


# ---------------------------------------------------------------------------------------- responses


def writer(**asked: Any) -> ResponseWriter:
    plan = RequestPlan("chat", "m", (1,), SamplingParams(max_tokens=9), (), True, False)
    return ResponseWriter(ResponsesRequest(model="m", **asked), plan, "req-1", 1)


def told(pieces: list[Piece], found: ResponseWriter | None = None) -> list[dict[str, Any]]:
    found = found or writer()
    events = found.begin()
    for piece in pieces:
        events += found.piece(piece)
    events.append(found.end(Usage(3, 5, 1, 2)))
    for event in events:
        assert not openai_oracle.faults(event, openai_oracle.event_schemas()[event["type"]])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


PIECES = [
    Piece(0, thoughts="hm"),
    Piece(0, thoughts=", so"),
    Piece(0, text="Let me see."),
    Piece(0, calls=[CallStart(0, "f"), CallArguments(0, '{"a"')]),
    Piece(0, calls=[CallArguments(0, ": 1}"), CallStart(1, "f"), CallArguments(1, "{}")]),
    Piece(0, finish="tool_calls"),
]


def test_each_thought_text_and_call_is_an_item() -> None:
    events = told(PIECES)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        "created",
        "in_progress",
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    response = events[-1]["response"]
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert [item["status"] for item in response["output"]] == ["completed"] * 4
    assert response["output"][0]["content"][0]["text"] == "hm, so"
    assert [item["arguments"] for item in response["output"][2:]] == ['{"a": 1}', "{}"]
    assert len({item["id"] for item in response["output"]}) == 4
    assert response["usage"]["input_tokens_details"] == {"cached_tokens": 1, "cache_write_tokens": 0}
    done = [event["item"] for event in events if event["type"].endswith("item.done")]
    assert done == response["output"]
    ids = {event["output_index"]: event["item"]["id"] for event in events if event["type"].endswith("item.added")}
    assert all(ids[e["output_index"]] == e["item_id"] for e in events if "item_id" in e)


def test_what_was_told_before_does_not_change() -> None:
    found = writer()
    begun = found.begin()
    found.piece(Piece(0, text="x", finish="stop"))
    assert begun[0]["response"]["output"] == []


def test_pieces_however_they_are_cut_make_the_same_response() -> None:
    whole = told(
        [
            Piece(
                0,
                thoughts="hm, so",
                text="Let me see.",
                calls=[CallStart(0, "f"), CallArguments(0, '{"a": 1}'), CallStart(1, "f"), CallArguments(1, "{}")],
                finish="tool_calls",
            )
        ]
    )
    assert whole[-1]["response"] == told(PIECES)[-1]["response"]


def test_what_the_client_was_answered_can_be_sent_back() -> None:
    """As its library dumps it, every field set."""
    response = openai.types.responses.Response.model_validate(told(PIECES)[-1]["response"])
    output = [item.model_dump(by_alias=True) for item in response.output]
    (turn,) = messages(input=output)
    assert (turn["reasoning_content"], turn["content"], len(turn["tool_calls"])) == ("hm, so", "Let me see.", 2)


def test_a_response_that_was_cut_is_incomplete() -> None:
    last = told([Piece(0, text="x", finish="length")])[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"
    assert told([Piece(0, finish="stop")])[-1]["response"]["output"] == []


def test_one_that_failed_says_why() -> None:
    found = writer()
    found.begin()
    found.piece(Piece(0, text="x"))
    *_, last = found.failed(Unavailable("gone", code="worker_lost"))
    assert not openai_oracle.faults(last, "ResponseFailedEvent")
    response = last["response"]
    assert (last["type"], response["status"]) == ("response.failed", "failed")
    assert response["error"] == {"code": "server_error", "message": "gone"}
    assert response["output"][0]["content"][0]["text"] == "x"


def test_the_response_repeats_its_request() -> None:
    asked = {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        "metadata": {"a": "b"},
        "user": "u",
        "prompt_cache_key": "thread-1",
        "safety_identifier": "s" * 64,
        "instructions": "i",
    }
    response = told([Piece(0, finish="stop")], writer(**asked))[-1]["response"]
    assert response["tools"] == [{**TOOL, "strict": False}]
    assert {name: response[name] for name in asked if name != "tools"} == {
        name: value for name, value in asked.items() if name != "tools"
    }


def test_one_in_the_background_is_queued_first_and_may_be_cancelled() -> None:
    found = writer(background=True)
    events = [*found.queued(), *found.started(), *found.piece(Piece(0, text="a")), *found.cancelled()]
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        assert not openai_oracle.faults(event, openai_oracle.event_schemas()[event["type"]])
    last = events[-1]["response"]
    assert (last["status"], last["error"], last["output"][0]["status"]) == ("cancelled", None, "incomplete")
