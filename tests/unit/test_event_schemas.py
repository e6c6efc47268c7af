"""Every event of responses and messages is one that the API's description tells, and nothing is in it beside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from services.gateway.answer_schemas import answer_schemas, refer
from services.gateway.message_schemas import message_schemas
from services.gateway.response_events import response_event_schemas
from services.gateway.response_schemas import response_schemas
from shared.contracts.errors import Unavailable
from shared.contracts.sampling import SamplingParams
from shared.ingress.choice_output import Piece
from shared.ingress.completion_body import Usage
from shared.ingress.messages_body import MessageWriter
from shared.ingress.request_plan import RequestPlan
from shared.ingress.responses_body import ResponseWriter
from shared.ingress.responses_schema import ResponsesRequest
from shared.tools.tool_stream import CallArguments, CallStart

SCHEMAS = {**answer_schemas(), **response_schemas(), **response_event_schemas(), **message_schemas()}
CALLS = [CallStart(0, "f"), CallArguments(0, '{"a": 1}')]
PIECES = [Piece(0, thoughts="hm"), Piece(0, text="so"), Piece(0, calls=list(CALLS))]
ENDS = [Piece(0, finish=finish) for finish in ("stop", "length", "tool_calls")] + [Piece(0, finish="stop", stop="x")]
ALL = Usage(3, 5, 1, 2)


def faults(name: str, value: Any) -> list[str]:
    validator = Draft202012Validator({"components": {"schemas": SCHEMAS}, **refer(name)})
    return [error.message for error in validator.iter_errors(value)]


def of_responses(end: Piece) -> list[dict[str, Any]]:
    plan = RequestPlan("chat", "m", (1,), SamplingParams(max_tokens=9), (), True, False)
    asked = ResponsesRequest(model="m", user="u", prompt_cache_key="k", safety_identifier="s")
    whole, failed = (ResponseWriter(asked, plan, "req-1", 1, "flex") for _ in range(2))
    events = [*whole.queued(), *whole.started(), *failed.begin()]
    for piece in PIECES:
        events += [*whole.piece(piece), *failed.piece(piece)]
    return [*events, *whole.piece(end), whole.end(ALL), *failed.failed(Unavailable("gone"))]


def of_messages(end: Piece) -> list[dict[str, Any]]:
    writer = MessageWriter("req-1", "m", 5)
    return [*writer.begin(), *(event for piece in [*PIECES, end] for event in writer.piece(piece)), *writer.end(ALL)]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.stop or end.finish)
@pytest.mark.parametrize(("name", "made"), [("ResponseEvent", of_responses), ("MessageEvent", of_messages)])
def test_every_event_is_described_and_closed(
    name: str, made: Callable[[Piece], list[dict[str, Any]]], end: Piece
) -> None:
    events = made(end)
    for event in events:
        assert faults(name, event) == []
        assert faults(name, {**event, "more": 1})
        assert event.keys() == {"type"} or faults(name, {"type": event["type"]})
    assert len({event["type"] for event in events}) >= 6


def test_whole_answers_are_described_and_closed() -> None:
    for end in ENDS:
        writer = MessageWriter("req-1", "m", 5)
        for piece in [*PIECES, end]:
            writer.piece(piece)
        message = writer.whole(ALL)
        assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
        assert faults("Message", message) == []
        assert faults("Message", {**message, "more": 1})
        response = of_responses(end)[-1]["response"]
        assert faults("Response", response) == []
        assert faults("Response", {**response, "more": 1})
