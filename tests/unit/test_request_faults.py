"""What is wrong with a request is told by the field's own path and in words of JSON, whatever form the field has."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Callable
from typing import Any

import pytest

from shared.contracts.errors import InvalidInput
from shared.ingress.call_arguments import MAX_DEPTH, read_arguments
from shared.ingress.messages_request import parse_messages
from shared.ingress.parse import parse_chat, parse_completion
from shared.ingress.responses_request import parse_responses
from shared.text.chat_template import plain_messages
from tests.unit.test_structure import USER

F = {"type": "function", "function": {"name": "f"}}
FORMATS = "must be one of 'text', 'json_object', 'json_schema'"
WORDS = "input should be 'none', 'auto' or 'required'"
NAMED = {"type": "json_schema", "json_schema": {"schema": {}}}


def body_of(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()


def chat(**fields: Any) -> InvalidInput:
    return fault(parse_chat, {"messages": [USER]} | fields)


def completion(**fields: Any) -> InvalidInput:
    return fault(parse_completion, {"prompt": "a"} | fields)


def responses(**fields: Any) -> InvalidInput:
    return fault(parse_responses, {"input": "a"} | fields)


def messages(**fields: Any) -> InvalidInput:
    return fault(parse_messages, {"messages": [USER], "max_tokens": 1} | fields)


def fault(parse: Callable[[bytes], Any], fields: dict[str, Any]) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        parse(body_of({"model": "m"} | fields))
    return caught.value


def image(where: str = "image_url") -> list[Any]:
    return [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": where}]}]


@pytest.mark.parametrize(
    ("ask", "fields", "param", "words"),
    [
        (chat, {"tools": [F], "tool_choice": "any"}, "tool_choice", WORDS),
        (chat, {"tools": [F], "tool_choice": True}, "tool_choice", WORDS),
        (chat, {"tools": [F], "tool_choice": {}}, "tool_choice.type", "is required"),
        (chat, {"tools": [F], "tool_choice": {"type": "function"}}, "tool_choice.function", "is required"),
        (chat, {"tools": [F], "tool_choice": {"type": "tool"}}, "tool_choice.type", "input should be 'function'"),
        (chat, {"tools": [None]}, "tools.0", "must be an object"),
        (chat, {"messages": ["hi"]}, "messages.0", "must be an object"),
        (chat, {"messages": image()}, "messages.0.content", "part 1 is of type image_url, but must be "),
        (chat, {"messages": image("a secret")}, "messages.0.content", "part 1 must be "),
        (chat, {"response_format": "json"}, "response_format", "must be an object"),
        (chat, {"response_format": {}}, "response_format.type", "is required"),
        (chat, {"response_format": {"type": "xml"}}, "response_format.type", FORMATS),
        (chat, {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is required"),
        (chat, {"response_format": NAMED}, "response_format.json_schema.name", "is required"),
        (chat, {"response_format": {"type": "text", "text": 1}}, "response_format.text", "unknown parameter"),
        (chat, {"stream": True, "stream_options": []}, "stream_options", "must be an object"),
        (chat, {"metadata": {"a": 1}}, "metadata.a", "input should be a valid string"),
        (chat, {"metadata": {"a" * 65: "b"}}, "metadata", "names must have 1 to 64 characters"),
        (completion, {"metadata": {"a": "b" * 513}}, "metadata", "values must have at most 512 characters"),
        (completion, {"repetition_penalty": 1e-300}, "repetition_penalty", "input should be greater than or equal to"),
        (completion, {"suffix": "b"}, "suffix", "suffix is not supported"),
        (completion, {"structured_outputs": {"json": True}}, "structured_outputs.json", "must be an object"),
        (responses, {"tool_choice": "any"}, "tool_choice", WORDS),
        (responses, {"tool_choice": {"type": "function"}}, "tool_choice.name", "is required"),
        (responses, {"text": {"format": {"type": "xml"}}}, "text.format.type", FORMATS),
        (responses, {"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name", "is required"),
        (responses, {"metadata": {str(i): "" for i in range(17)}}, "metadata", "must hold at most 16 pairs"),
        (responses, {"metadata": {"": "b"}}, "metadata", "names must have 1 to 64 characters"),
        (messages, {"tool_choice": "auto"}, "tool_choice", "must be an object"),
        (messages, {"stop_sequences": ["a"] * 5}, "stop_sequences", "list should have at most 4 items"),
    ],
)
def test_a_fault_is_told_by_its_own_path(
    ask: Callable[..., InvalidInput], fields: dict[str, Any], param: str, words: str
) -> None:
    error = ask(**fields)
    assert (error.param, error.code or "missing_required_parameter") == (param, error.code)
    assert words in error.message
    assert not any(word in error.message for word in ("dictionary", "instance of", "discriminator", "validation"))
    assert "secret" not in error.message


def test_what_asks_for_nothing_passes() -> None:
    parse_completion(body_of({"model": "m", "prompt": "a", "suffix": "", "repetition_penalty": 1e-9}))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"prompt": "\xe9"}', "it is not UTF-8 text"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "a number in it is too long"),
        (b"[" * 101 + b"]" * 101, "nested too deeply"),
        (b"{", "line 1 column 2"),
        (b"[]", "must be a JSON object"),
    ],
    ids=["Latin-1", "long number", "deep", "cut", "list"],
)
def test_what_is_no_json_says_why(body: bytes, words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as caught:
        parse_completion(body)
    assert (caught.value.param, caught.value.code) == ("", "invalid_json")


def test_a_byte_order_mark_is_passed_over() -> None:
    assert parse_completion(BOM_UTF8 + body_of({"model": "m", "prompt": "a"})).prompt == ("a",)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ('{"a": [1]}', {"a": [1]}),
        ("", {}),
        (" \n", {}),
        ('{"a": ', {"malformed": '{"a": '}),
        ("[1]", {"malformed": "[1]"}),
        ('{"a": NaN}', {"malformed": '{"a": NaN}'}),
        ('{"a": "\\ud800"}', {"malformed": '{"a": "\\ud800"}'}),
        ("[" * 5000, {"malformed": "[" * 5000}),
    ],
    ids=["object", "nothing", "space", "cut", "list", "NaN", "half a pair", "deep"],
)
def test_arguments_come_back_as_a_model_wrote_them(text: str, read: dict[str, Any]) -> None:
    assert read_arguments(text) == read
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    body = {"model": "m", "messages": [USER, {"role": "assistant", "tool_calls": [call]}]}
    calls = parse_chat(body_of(body)).messages[1].for_template()["tool_calls"]
    assert calls[0]["function"]["arguments"] == read


def test_arguments_that_a_template_cannot_take_do_not_end_the_conversation() -> None:
    for levels in (1, MAX_DEPTH, MAX_DEPTH + 1, 32, 90, 5000):
        text = '{"a":' * levels + "[]" + "}" * levels
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
        said = {"role": "assistant", "tool_calls": [call]}
        (message,) = plain_messages(
            [parse_chat(body_of({"model": "m", "messages": [said]})).messages[0].for_template()]
        )
        read = message["tool_calls"][0]["function"]["arguments"]
        # the list is a level too
        assert read == ({"malformed": text} if levels >= MAX_DEPTH else json.loads(text))
