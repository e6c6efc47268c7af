"""From requests to the grammar of their outputs: what it lets through is what the parser then finds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.contracts.errors import InvalidInput
from shared.grammar.compiler import GrammarCompiler
from shared.ingress.openai_schema import ChatRequest
from shared.ingress.output_form import OutputParser
from shared.ingress.parse import parse_chat, parse_completion
from shared.ingress.structure import ModelForm, Structure, structure_of
from shared.text.tokenizer import Tokenizer
from shared.tools.formats import HERMES, LLAMA3, MISTRAL, ToolFormat
from shared.tools.prompt import tell_tools
from shared.tools.tool_stream import CallArguments, CallStart
from tests.tiny_tokenizer import SPECIALS, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
MARKED = tiny_tokenizer(specials=(*SPECIALS, "[TOOL_CALLS]", "<tool_call>", "</tool_call>", "<think>", "</think>"))
USER = {"role": "user", "content": "hi"}


def tool(name: str, strict: bool | None = None, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    function = {"name": name, "parameters": schema} | ({} if strict is None else {"strict": strict})
    return {"type": "function", "function": function}


def chat(**fields: Any) -> ChatRequest:
    return parse_chat(json.dumps({"model": "m", "messages": [USER]} | fields).encode())


def form_of(tokenizer: Tokenizer, form: ToolFormat | None = HERMES, thinks: bool = False) -> ModelForm:
    return ModelForm(form, thinks, {text: token.id for text, token in tokenizer.special_tokens.items()})


def lets(structure: Structure, text: str, tokenizer: Tokenizer = TOKENIZER) -> bool:
    """True when a whole output may be this text, whose special tokens count as such."""
    place = GrammarCompiler(tokenizer).constraint(structure.grammar)
    ids = tokenizer.encode(text, parse_special=True)
    return place._matcher.validate_tokens(ids) == len(ids) and (place.advance_to(ids), place.may_end)[1]


def calls_in(structure: Structure, text: str) -> list[tuple[str, Any]]:
    parser = OutputParser(structure.form)
    pieces = [*parser.push(text).calls, *parser.finish().calls]
    names = {piece.index: piece.name for piece in pieces if isinstance(piece, CallStart)}
    arguments = {i: "".join(p.text for p in pieces if isinstance(p, CallArguments) and p.index == i) for i in names}
    return [(name, json.loads(arguments[i])) for i, name in names.items()]


F = tool("f", city={"enum": ["Rome", "Oslo"]})
G = tool("g", n={"type": "integer"})


def written(form: ToolFormat, *calls: tuple[str, dict[str, Any]]) -> str:
    texts = [f'{{"name": "{name}", "{form.arguments}": {json.dumps(arguments)}}}' for name, arguments in calls]
    if form is HERMES:
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    return f"[TOOL_CALLS][{', '.join(texts)}]" if form is MISTRAL else "; ".join(texts)


GOOD, OTHER, BAD = ("f", {"city": "Rome"}), ("g", {"n": 7}), ("f", {"city": "Bonn"})


@pytest.mark.parametrize("tokenizer", [TOKENIZER, MARKED], ids=["markers are text", "markers are tokens"])
@pytest.mark.parametrize("form", [HERMES, LLAMA3, MISTRAL], ids=lambda form: form.name)
def test_required_calls_are_forced_and_found(form: ToolFormat, tokenizer: Tokenizer) -> None:
    model = form_of(tokenizer, form)
    required = structure_of(chat(tools=[F, G], tool_choice="required"), model, "")
    assert lets(required, written(form, GOOD), tokenizer)
    assert lets(required, written(form, GOOD, OTHER), tokenizer)
    for text in ("", "text", written(form, BAD), written(form, ("h", {})), written(form, GOOD) + "x"):
        assert not lets(required, text, tokenizer), text
    assert calls_in(required, written(form, GOOD, OTHER)) == [GOOD, OTHER]
    one = structure_of(chat(tools=[F, G], tool_choice="required", parallel_tool_calls=False), model, "")
    assert lets(one, written(form, OTHER), tokenizer)
    assert not lets(one, written(form, GOOD, OTHER), tokenizer)
    named = {"type": "function", "function": {"name": "g"}}
    chosen = structure_of(chat(tools=[F, G], tool_choice=named), model, "")
    assert lets(chosen, written(form, OTHER), tokenizer)
    assert not lets(chosen, written(form, GOOD), tokenizer)
    assert not lets(chosen, written(form, OTHER, OTHER), tokenizer)


@pytest.mark.parametrize("tokenizer", [TOKENIZER, MARKED], ids=["markers are text", "markers are tokens"])
@pytest.mark.parametrize("form", [HERMES, LLAMA3, MISTRAL], ids=lambda form: form.name)
def test_strict_tools_may_be_called_or_not_but_only_as_they_say(form: ToolFormat, tokenizer: Tokenizer) -> None:
    free = structure_of(chat(tools=[tool("f", True, city={"enum": ["Rome"]}), G]), form_of(tokenizer, form), "")
    for text in ("", "just text {", written(form, GOOD), written(form, OTHER)):
        assert lets(free, text, tokenizer), text
    assert not lets(free, written(form, BAD), tokenizer)
    # a tool that is not strict takes any object
    assert lets(free, written(form, ("g", {"whatever": []})), tokenizer)
    if form is not LLAMA3:
        assert lets(free, "Well. " + written(form, GOOD), tokenizer)
        assert not lets(free, "Well. " + written(form, BAD), tokenizer)


def test_tools_at_the_models_will_need_no_grammar() -> None:
    structure = structure_of(chat(tools=[F, G]), form_of(TOKENIZER), "")
    assert structure.grammar == ""
    assert structure.form.tools == ("f", "g")
    none = structure_of(chat(tools=[F, G], tool_choice="none"), form_of(TOKENIZER), "")
    assert none.form.is_plain


def test_one_call_at_most_is_enforced() -> None:
    structure = structure_of(chat(tools=[F, G], parallel_tool_calls=False), form_of(TOKENIZER), "")
    assert lets(structure, written(HERMES, ("f", {"any": "thing"})))
    assert not lets(structure, written(HERMES, GOOD, OTHER))
    assert structure.form.most_calls == 1


def test_a_schema_stands_beside_tools() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    structure = structure_of(chat(tools=[F], response_format=wanted), form_of(TOKENIZER), "")
    assert lets(structure, "12")
    assert lets(structure, written(HERMES, ("f", {"city": "Bonn"})))
    assert not lets(structure, "text")


def test_references_inside_a_tools_schema_hold() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/x"}},
        "required": ["a"],
        "$defs": {"x": {"const": 1}},
    }
    defined = {"type": "function", "function": {"name": "f", "parameters": schema}}
    structure = structure_of(chat(tools=[defined], tool_choice="required"), form_of(TOKENIZER), "")
    assert lets(structure, written(HERMES, ("f", {"a": 1})))
    assert not lets(structure, written(HERMES, ("f", {"a": 2})))


@pytest.mark.parametrize("tokenizer", [TOKENIZER, MARKED], ids=["marks are text", "marks are tokens"])
def test_thoughts_may_come_before_what_is_asked_for(tokenizer: Tokenizer) -> None:
    def lets_(structure: Structure, text: str) -> bool:
        return lets(structure, text, tokenizer)

    model = form_of(tokenizer, thinks=True)
    wanted = chat(response_format={"type": "json_object"})
    first = structure_of(wanted, model, "<|im_start|>assistant\n")
    assert lets_(first, "{}")
    assert lets_(first, "<think>hm {\n</think>\n\n{}")
    assert not lets_(first, "<think>hm")
    opened = structure_of(wanted, model, "<|im_start|>assistant\n<think>\n")
    assert lets_(opened, "hm\n</think>\n\n{}")
    assert not lets_(opened, "{}")
    assert opened.form.thoughts is not None
    assert opened.form.thoughts.inside


@pytest.mark.parametrize(
    ("structured", "good", "bad"),
    [
        ({"regex": "[ab]+/"}, "ab/", "c"),
        ({"choice": ["yes", "no"]}, "no", "maybe"),
        ({"json": {"type": "boolean"}}, "true", "1"),
        ({"grammar": 'start: "x" y*\ny: "y" | "z"'}, "xyz", "y"),
    ],
)
def test_the_extension_works_for_completions_too(structured: dict[str, Any], good: str, bad: str) -> None:
    body = {"model": "m", "prompt": "hi", "structured_outputs": structured}
    for request in (parse_completion(json.dumps(body).encode()), chat(structured_outputs=structured)):
        structure = structure_of(request, form_of(TOKENIZER), "")
        assert lets(structure, good)
        assert not lets(structure, bad)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 3, "max_tokens": 5}, "min_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "h"}}, "tools": [F]}, "tool_choice"),
        ({"tools": [F], "structured_outputs": {"grammar": 'start: "a"'}}, "structured_outputs.grammar"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"x-guidance": {}}}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a" * 30_000}, "n": 64}, "n"),
    ],
)
def test_contradictions_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        structure_of(chat(**fields), form_of(TOKENIZER), "")
    assert refused.value.param == param


def test_a_model_that_calls_no_tools_says_so() -> None:
    with pytest.raises(InvalidInput) as refused:
        structure_of(chat(tools=[F]), form_of(TOKENIZER, None), "")
    assert refused.value.param == "tools"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"guess": "a"}}, "structured_outputs.guess"),
        ({"tools": [F, F]}, "tools"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools.0.function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
            "tools.0.function.parameters",
        ),
        ({"tools": [F], "tool_choice": "always"}, "tool_choice"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
            "tools.0.function.parameters",
        ),
        ({"tools": [F], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)
def test_bad_fields_are_refused_by_place(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        chat(**fields)
    assert refused.value.param.startswith(param)


def test_tools_are_told_to_a_model_whose_template_knows_none() -> None:
    request = chat(
        messages=[
            {"role": "system", "content": "Be brief."},
            USER,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city":"Rome"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "sun"},
            {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "rain"}]},
        ]
    )
    told = tell_tools([message.for_template() for message in request.messages], [F])
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user"]
    assert told[0]["content"].startswith("Be brief.\n\n# Tools")
    assert json.dumps(F) in told[0]["content"]
    assert told[2]["content"] == '<tool_call>\n{"name": "f", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert told[3]["content"] == "<tool_response>\nsun\n</tool_response>\n<tool_response>\nrain\n</tool_response>"
    assert tell_tools([USER], [F])[0]["role"] == "system"
    assert tell_tools([USER], None) == [USER]


@pytest.mark.parametrize(
    ("parameters", "empty"),
    [
        (None, True),
        ({"type": "object", "properties": {}}, True),
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "title": "t",
                "type": "object",
                "properties": {},
                "required": [],
            },
            True,
        ),
        ({"type": "object"}, True),
        ({}, True),
        ({"description": "d", "required": []}, True),
        ({"type": "object", "additionalProperties": True}, False),
        ({"type": "object", "additionalProperties": {}}, False),
        ({"type": "object", "minProperties": 0}, False),
        ({"type": "object", "required": ["a"]}, False),
        ({"type": "object", "properties": {}, "additionalProperties": True}, False),
        ({"type": "object", "properties": {}, "required": ["a"]}, False),
        ({"properties": {}, "patternProperties": {"^a$": {"type": "integer"}}}, False),
    ],
)
def test_a_forced_tool_that_takes_nothing_gets_nothing(parameters: dict[str, Any] | None, empty: bool) -> None:
    function = {"name": "f"} if parameters is None else {"name": "f", "parameters": parameters}
    structure = structure_of(
        chat(tools=[{"type": "function", "function": function}], tool_choice="required"), form_of(TOKENIZER), ""
    )
    assert lets(structure, written(HERMES, ("f", {"a": 1}))) is not empty
    if "required" not in (parameters or {}) or empty:
        assert lets(structure, written(HERMES, ("f", {})))
