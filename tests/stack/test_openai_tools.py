"""The official client's helpers for structured output and tools, unchanged, against the whole stack."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

from tests.stack.running import MODEL, Baton

pytestmark = pytest.mark.model

QUESTION: Any = [{"role": "user", "content": "What is the weather in Rome?"}]


class Sky(Enum):
    CLEAR = "clear"
    CLOUDS = "clouds"


class Report(BaseModel):
    """A weather report."""

    city: str = Field(max_length=20)
    degrees: int
    sky: Sky
    notes: list[str] = Field(max_length=0)


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=20)
    days: int


def test_parse_gives_an_object_of_the_class(stack: Baton) -> None:
    client = stack.openai()
    answer = client.chat.completions.parse(
        model=MODEL, messages=QUESTION, response_format=Report, temperature=0, max_tokens=200
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Report)
    assert answer.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(
        model=MODEL, messages=QUESTION, response_format=Report, temperature=0, max_tokens=200
    ) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == parsed
    assert "".join(pieces) == answer.choices[0].message.content


def test_an_output_cut_by_its_limit_raises_in_the_client(stack: Baton) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        stack.openai().chat.completions.parse(model=MODEL, messages=QUESTION, response_format=Report, max_tokens=5)


def test_tools_are_called_and_answered(stack: Baton) -> None:
    client = stack.openai()
    tools = [openai.pydantic_function_tool(GetWeather)]
    asked: dict[str, Any] = {"model": MODEL, "tools": tools, "temperature": 0, "max_tokens": 120}
    forced = asked | {"tool_choice": "required", "parallel_tool_calls": False}
    answer = client.chat.completions.parse(messages=QUESTION, **forced)
    (call,) = answer.choices[0].message.tool_calls or ()
    assert answer.choices[0].finish_reason == "tool_calls"
    assert isinstance(call.function.parsed_arguments, GetWeather)
    with client.chat.completions.stream(messages=QUESTION, **forced) as stream:
        pieces = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert streamed.function.arguments == call.function.arguments
    assert "".join(piece.arguments_delta for piece in pieces) == call.function.arguments
    assert len(pieces) > 1
    history = [
        *QUESTION,
        answer.choices[0].message.model_dump(exclude_unset=True),
        {"role": "tool", "tool_call_id": call.id, "content": "clear, 31 degrees"},
    ]
    replied = client.chat.completions.create(messages=history, **asked)
    assert replied.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_grammars_of_the_extension(stack: Baton) -> None:
    client = stack.openai()

    def texts(structured: dict[str, Any], **more: Any) -> list[str]:
        body = {"structured_outputs": structured}
        answer = client.chat.completions.create(model=MODEL, messages=QUESTION, extra_body=body, max_tokens=40, **more)
        return [choice.message.content or "" for choice in answer.choices]

    assert set(texts({"choice": ["sun", "rain"]}, n=3, temperature=1.5)) <= {"sun", "rain"}
    assert texts({"regex": "[0-9]{1,2} degrees"}, temperature=0)[0].endswith(" degrees")
    assert json.loads(texts({"json": {"enum": [1, 2, 3]}}, temperature=1)[0]) in (1, 2, 3)
    with pytest.raises(openai.BadRequestError) as refused:
        texts({"regex": "(?=a)b"})
    assert refused.value.param == "structured_outputs.regex"
