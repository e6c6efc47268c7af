"""Text and calls in the order in which they were written, in either API, however the output was cut."""

from __future__ import annotations

from typing import Any

import pytest

from shared.contracts.sampling import SamplingParams
from shared.ingress.choice_output import ChoiceOutput, Piece
from shared.ingress.choice_text import ChoiceText
from shared.ingress.completion_body import Usage
from shared.ingress.messages_body import MessageWriter
from shared.ingress.output_form import OutputForm
from shared.ingress.request_plan import RequestPlan
from shared.ingress.responses_body import ResponseWriter
from shared.ingress.responses_schema import ResponsesRequest
from shared.tools.formats import HERMES

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
SAID = f"One.{CALL}Two.{CALL}Three."


def pieces(cut: int) -> list[Piece]:
    """Of an output that is taken every `cut` bytes."""
    text = ChoiceText(lambda byte: bytes([byte]), ())
    output = ChoiceOutput(0, text, form=OutputForm(HERMES, ("f",)))
    found = []
    for start in range(0, len(SAID), cut):
        text.push(SAID.encode()[start : start + cut])
        output.collect()
        found.append(output.take())
    text.finish()
    output.collect()
    output.end("stop")
    return [piece for piece in (*found, output.take()) if piece is not None]


@pytest.mark.parametrize("cut", [1, 7, 40, len(SAID)])
def test_a_response_has_its_items_in_order(cut: int) -> None:
    plan = RequestPlan("chat", "m", (1,), SamplingParams(max_tokens=9), (), True, False)
    writer = ResponseWriter(ResponsesRequest(model="m"), plan, "req-1", 1)
    events = [event for piece in pieces(cut) for event in writer.piece(piece)]
    output = writer.end(Usage(1, 1))["response"]["output"]
    found = [item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in output]
    assert found == ["One.", '{"a": 1}', "Two.", '{"a": 1}', "Three."]
    deltas: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            wanted = "arguments" if output[event["output_index"]]["type"] == "function_call" else "text"
            assert wanted in event["type"]
            deltas[event["output_index"]] = deltas.get(event["output_index"], "") + event["delta"]
    assert deltas == dict(enumerate(found))


@pytest.mark.parametrize("cut", [1, 7, 40, len(SAID)])
def test_a_message_has_its_blocks_in_order(cut: int) -> None:
    writer = MessageWriter("req-1", "m", 1)
    events = [event for piece in pieces(cut) for event in writer.piece(piece)]
    message = writer.whole(Usage(1, 1))
    found: list[Any] = [block.get("text", block.get("input")) for block in message["content"]]
    assert found == ["One.", {"a": 1}, "Two.", {"a": 1}, "Three."]
    kinds = [block["type"] for block in message["content"]]
    for event in events:
        if event["type"] == "content_block_delta":
            wanted = "text_delta" if kinds[event["index"]] == "text" else "input_json_delta"
            assert event["delta"]["type"] == wanted
    assert message["stop_reason"] == "tool_use"
