"""Calls and thoughts found in an output's text, however it is split."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.ingress.output_form import OutputForm, OutputParser
from shared.tools.call_scanner import CallScanner
from shared.tools.formats import FORMATS, HERMES, LLAMA3, MISTRAL, ToolFormat, reads_tools, thinks, tool_format
from shared.tools.grammar import Thoughts
from shared.tools.think_stream import ThinkStream
from shared.tools.tool_stream import CallArguments, CallStart, Content, Piece, ToolStream, joined

NAMES = ("f", "get_time")


def read(form: ToolFormat, parts: Iterable[str], most: int = 0) -> tuple[list[Piece], int]:
    stream = ToolStream(form, NAMES, most)
    pieces = [piece for part in parts for piece in stream.push(part)]
    return joined([*pieces, *stream.finish()]), stream.num_calls


def call(index: int, name: str, arguments: str) -> list[Piece]:
    return [CallStart(index, name), CallArguments(index, arguments)]


F = '{"name": "f", "arguments": {"a": 1}}'
T = '{"name": "get_time", "arguments": {}}'
P = F.replace("arguments", "parameters")
ODD = r'{"a": "}{\"\\", "b": [{}, [1, {"c": "</tool_call>"}]], "ä": "\u00e9🫠"}'

CASES: list[tuple[ToolFormat, str, list[Piece], int]] = [
    (HERMES, "", [], 0),
    (HERMES, "just text", [Content("just text")], 0),
    (HERMES, f"<tool_call>\n{F}\n</tool_call>", call(0, "f", '{"a": 1}'), 1),
    (
        HERMES,
        f"Let me see.\n\n<tool_call>{F}</tool_call>\n<tool_call>\n{T}\n</tool_call>\n",
        [Content("Let me see."), *call(0, "f", '{"a": 1}'), *call(1, "get_time", "{}")],
        2,
    ),
    (HERMES, f'<tool_call>{{"name": "f", "arguments": {ODD}}}</tool_call>', call(0, "f", ODD), 1),
    (HERMES, '<tool_call>{"arguments": {"a": 2}, "name": "f"}</tool_call>', call(0, "f", '{"a": 2}'), 1),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', call(0, "f", "{}"), 1),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', call(0, "f", "{}"), 1),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', call(0, "f", '{"a": 1}'), 1),
    (HERMES, '<tool_call>{"id": 7, "name": "f", "x": [1, "]"], "arguments": {}}</tool_call>', call(0, "f", "{}"), 1),
    (HERMES, f"<tool_call>{F}</tool_call>and more", [*call(0, "f", '{"a": 1}'), Content("and more")], 1),
    (HERMES, f"<tool_call>{F}", call(0, "f", '{"a": 1}'), 1),
    (HERMES, f"<tool_call>{F} nonsense", [*call(0, "f", '{"a": 1}'), Content("nonsense")], 1),
    # cut by a limit in the middle of the arguments: a call, but not a complete one
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "x', call(0, "f", '{"a": "x'), 0),
    # arguments that break off are all there is of the call; what follows its end is text
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": 1]}</tool_call>after',
        [*call(0, "f", '{"a": 1'), Content("after")],
        0,
    ),
    *(
        (HERMES, text, [Content(text)], 0)
        for text in (
            "<tool_call>nothing of the kind</tool_call>",
            '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
            '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
            '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
            "<tool_call>[]</tool_call>",
            '<tool_call>{"na',
            "<tool_call>",
            "a < b <tool",
            "</tool_call> alone",
            "  spaces around  ",
        )
    ),
    (LLAMA3, P, call(0, "f", '{"a": 1}'), 1),
    (LLAMA3, f"\n {P}", call(0, "f", '{"a": 1}'), 1),
    (LLAMA3, f"<|python_tag|>{P}; {T}", [*call(0, "f", '{"a": 1}'), *call(1, "get_time", "{}")], 2),
    (LLAMA3, f"{P}\n{T}", [*call(0, "f", '{"a": 1}'), *call(1, "get_time", "{}")], 2),
    (LLAMA3, '{"answer": 42}', [Content('{"answer": 42}')], 0),
    (LLAMA3, f"I would call {P}", [Content(f"I would call {P}")], 0),
    (LLAMA3, " {", [Content(" {")], 0),
    (LLAMA3, "<|python", [Content("<|python")], 0),
    (MISTRAL, f"[TOOL_CALLS][{F}]", call(0, "f", '{"a": 1}'), 1),
    (
        MISTRAL,
        f"Now: [TOOL_CALLS] [{F}, {T}]",
        [Content("Now:"), *call(0, "f", '{"a": 1}'), *call(1, "get_time", "{}")],
        2,
    ),
    (MISTRAL, "[TOOL_CALLS] none", [Content("[TOOL_CALLS] none")], 0),
    (MISTRAL, "see [1] and [TOOL", [Content("see [1] and [TOOL")], 0),
]


@pytest.mark.parametrize(("form", "text", "wanted", "calls"), CASES, ids=[f"{c[0].name}-{c[1][:40]}" for c in CASES])
def test_calls_are_found_for_every_split(form: ToolFormat, text: str, wanted: list[Piece], calls: int) -> None:
    assert read(form, [text]) == (joined(wanted), calls)
    for at in range(len(text) + 1):
        assert read(form, [text[:at], text[at:]]) == (joined(wanted), calls), (text[:at], text[at:])
    assert read(form, list(text)) == (joined(wanted), calls)


def test_calls_beyond_the_most_are_dropped() -> None:
    text = f"<tool_call>{F}</tool_call><tool_call>{T}</tool_call>"
    assert read(HERMES, [text], most=1) == (call(0, "f", '{"a": 1}'), 1)


MARKERS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", F, P, T, '{"name": "f"', '"arguments"']
TOKENS = [
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    ",",
    ":",
    ";",
    " ",
    "\n",
    '"parameters"',
    '"name"',
    '"f"',
    "x",
    "1",
    "null",
    "é",
    "<",
]
FRAGMENTS = st.sampled_from([*MARKERS, *TOKENS])


@settings(max_examples=250, deadline=None)
@given(
    form=st.sampled_from(sorted(FORMATS)),
    fragments=st.lists(FRAGMENTS, max_size=14),
    cuts=st.lists(st.integers(0, 400), max_size=6),
)
def test_any_text_is_read_alike_however_it_is_split(form: str, fragments: Sequence[str], cuts: Sequence[int]) -> None:
    text = "".join(fragments)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[a:b] for a, b in pairwise(edges)]
    whole = read(FORMATS[form], [text])
    assert read(FORMATS[form], parts) == whole
    assert read(FORMATS[form], list(text)) == whole
    starts = [piece.index for piece in whole[0] if isinstance(piece, CallStart)]
    assert starts == list(range(len(starts)))
    if not starts:  # nothing is lost of what is no call
        assert "".join(piece.text for piece in whole[0] if isinstance(piece, Content)) == text


@settings(max_examples=80, deadline=None)
@given(
    arguments=st.dictionaries(
        st.text(max_size=5),
        st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda s: st.lists(s, max_size=3)),
    ),
    ensure_ascii=st.booleans(),
    indent=st.sampled_from([None, 2]),
)
def test_arguments_come_as_they_were_written(
    arguments: dict[str, object], ensure_ascii: bool, indent: int | None
) -> None:
    written = json.dumps(arguments, ensure_ascii=ensure_ascii, indent=indent)
    scanner = CallScanner()
    for char in f'{{"name": "f", "arguments": {written}}}':
        assert not scanner.done
        scanner.push(char)
    assert scanner.done
    assert not scanner.broken
    assert (scanner.name, scanner.take_arguments()) == ("f", written)


THINKING = [
    ("<think>hm, well</think>\n\nyes", False, ("hm, well", "yes")),
    ("<think>\nhm\n\nwell\n</think>yes</think>", False, ("hm\n\nwell", "yes</think>")),
    ("\n<think></think>yes", False, ("", "yes")),
    ("no thoughts", False, ("", "no thoughts")),
    ("a</think>b", False, ("", "a</think>b")),
    ("<thin", False, ("", "<thin")),
    ("  ", False, ("", "  ")),
    ("<think>cut off </thi", False, ("cut off </thi", "")),
    ("hm</think>\n\nyes", True, ("hm", "yes")),
    ("</think>yes", True, ("", "yes")),
    ("hm and on", True, ("hm and on", "")),
]


@pytest.mark.parametrize(("text", "inside", "wanted"), THINKING, ids=[case[0][:20] for case in THINKING])
def test_thoughts_are_found_for_every_split(text: str, inside: bool, wanted: tuple[str, str]) -> None:
    def split(parts: Iterable[str]) -> tuple[str, str]:
        stream = ThinkStream(inside)
        found = [*map(stream.push, parts), stream.finish()]
        return "".join(part[0] for part in found), "".join(part[1] for part in found)

    assert split([text]) == wanted
    for at in range(len(text) + 1):
        assert split([text[:at], text[at:]]) == wanted, (text[:at], text[at:])
    assert split(text) == wanted


def test_thoughts_come_before_calls() -> None:
    text = f"<think>I call f with <tool_call></think>\n\n<tool_call>{F}</tool_call>"
    form = OutputForm(HERMES, NAMES, thoughts=Thoughts())
    for at in range(len(text) + 1):
        parser = OutputParser(form)
        found = [parser.push(text[:at]), parser.push(text[at:]), parser.finish()]
        assert "".join(part.thoughts for part in found) == "I call f with <tool_call>"
        assert "".join(part.said for part in found) == ""
        calls = [piece for part in found for piece in part.calls]
        assert joined(calls) == call(0, "f", '{"a": 1}')
        assert [parser.reason(finish) for finish in ("stop", "length")] == ["tool_calls", "length"]


def test_an_output_without_calls_keeps_its_finish_reason() -> None:
    parser = OutputParser(OutputForm(HERMES, NAMES))
    parser.push("hello")
    parser.finish()
    assert parser.reason("stop") == "stop"


QWEN = "{% if tools %}<tools>{{ tools }}</tools> <tool_call>{% endif %}"
LLAMA = '{% if tools %}{"name": function name, "parameters": dictionary}{{ tools }}{% endif %}'


@pytest.mark.parametrize(
    ("template", "wanted"),
    [(QWEN, HERMES), (LLAMA, LLAMA3), ("{{ tools }}[TOOL_CALLS]", MISTRAL), ("{{ messages }}", HERMES), (None, None)],
)
def test_the_template_tells_how_a_model_calls(template: str | None, wanted: ToolFormat | None) -> None:
    assert tool_format("auto", template) is wanted
    assert tool_format("none", template) is None
    if template is not None:
        assert tool_format("mistral", template) is MISTRAL
        assert reads_tools(template) == ("tools" in template)


def test_the_template_tells_whether_a_model_thinks() -> None:
    assert thinks("auto", "{% if '</think>' in content %}")
    assert not thinks("auto", "plain")
    assert not thinks("auto", None)
    assert thinks("think", "plain")
    assert not thinks("none", "</think>")
