"""Digits and word characters of patterns are those of ASCII, wherever a pattern and whatever stands around it."""

from __future__ import annotations

import json
import re
import warnings
from typing import Any

import pytest

from shared.contracts.errors import InvalidInput
from shared.grammar.compiler import GrammarCompiler
from shared.grammar.schema_patterns import map_patterns
from shared.grammar.source import regex_grammar, schema_grammar
from tests.tiny_tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
COMPILER = GrammarCompiler(TOKENIZER)


def lets(grammar: str, text: str) -> bool:
    place = COMPILER.constraint(grammar)
    ids = TOKENIZER.encode(text)
    return place._matcher.validate_tokens(ids) == len(ids) and (place.advance_to(ids), place.may_end)[1]


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        (r"\d{2}", "42", "4٢"),
        (r"\w+", "a_9", "é"),
        (r"[\d.]+", "3.1", "٣.1"),
        (r"[\w-]+", "a-b", "ß-b"),
        (r"[^\d]", "x", "٣"),
        (r"[^\D]", "3", "٣"),
        (r"[^]\d]", "x", "٣"),
        (r"\D", "x", "٣"),
        (r"[^\n]\d", "x1", "x٣"),
        (r"[^\[\]]\d", "x1", "x٣"),
        (r"\\d", r"\d", r"\3"),
        (r"[\\\d]+", "\\1", "d"),
        (r"é\d?", "é1", "é١"),
        (r"(?i:x\d)", "X1", "X١"),
    ],
)
def test_digits_and_words_are_those_of_ascii(pattern: str, yes: str, no: str) -> None:
    assert re.fullmatch(pattern, yes)
    assert lets(regex_grammar(pattern, "f"), yes)
    assert not lets(regex_grammar(pattern, "f"), no)


@pytest.mark.parametrize(("pattern", "no"), [(r"\d", "٢"), (r"\w", "é"), (r"[\w-]", "é")])
def test_the_library_has_them_so_in_schemas(pattern: str, no: str) -> None:
    grammar = schema_grammar({"type": "string", "pattern": f"^{pattern}$"}, "f")
    assert lets(grammar, '"1"')
    assert not lets(grammar, f'"{no}"')


PRINTABLE = [chr(code) for code in range(32, 127)]


@pytest.mark.parametrize(
    ("pattern", "apart"),
    [
        (r"[.-\d]", r"[.\d-]"),
        (r"[+-\d]", r"[+\d-]"),
        (r"[\s.-\d]", r"[\s.\d-]"),
        (r"[$-\w]", r"[$\w-]"),
        (r"[\w-z]", r"[\w-]"),
        (r"[\w-\.]", r"[\w.-]"),
        (r"[\d-x]", r"[\dx-]"),
        (r"[^\D-a]", r"[^\Da-]"),
        (r"[a-\W]", r"[a\W-]"),
        (r"[\pL-z]", r"[a-zA-Z-]"),
        (r"[\]-\d-[]", r"[\]\d\[-]"),
    ],
)
def test_a_set_is_no_end_of_a_range(pattern: str, apart: str) -> None:
    """Python refuses it, and so does a request; to ECMA-262, and so in a schema, the hyphen is a character."""
    with pytest.raises(InvalidInput, match="is no range") as refused:
        regex_grammar(pattern, "f")
    assert refused.value.param == "f"
    grammar = schema_grammar({"type": "string", "pattern": f"^{pattern}$"}, "f")
    found = [char for char in PRINTABLE if re.fullmatch(apart, char, re.ASCII)]
    assert [char for char in PRINTABLE if lets(grammar, json.dumps(char))] == found


@pytest.mark.parametrize(
    "pattern",
    [
        r"[\d-]", r"[-\d]", r"[a\-\d]", r"[\w.-]", r"[^\w-]", r"[^-\d]", r"[^\D-]", r"[^\W\d]", r"[\D]", r"[\W]",
        r"[a&&b]", r"[^a&&b]", r"[a~~b]", r"[a||b]", r"[!--]", r"[--a]", r"[a-c--]", r"[---]", r"[a-c-e]",
        r"[[]", r"[a[b]", r"[a[b-c]", r"[[a]", r"[^[]", r"[[:alpha:]", r"[[&&[^a]",
        r"[]a]", r"[^]a]", r"[]]", r"[]-a]", r"[^]-a]", r"[]-]", r"[\]-a]", r"[Z-\]]", r"[\[-\]]", r"[^^]", r"[a^]",
        r"[\\-a]", r"[\\\d]", r"[\x41-Z]", r"[\u0041-\x5A&]", r"[+-/]", r"[ -~]",
    ],
)  # fmt: skip
def test_a_class_holds_what_it_holds_in_python(pattern: str) -> None:
    with warnings.catch_warnings(action="ignore"):  # Python warns of what it might once mean
        found = [char for char in PRINTABLE if re.fullmatch(pattern, char, re.ASCII)]
    assert [char for char in PRINTABLE if lets(regex_grammar(pattern, "f"), char)] == found
    grammar = schema_grammar({"type": "string", "pattern": f"^{pattern}$"}, "f")
    assert [char for char in PRINTABLE if lets(grammar, json.dumps(char))] == found


def test_patterns_are_found_in_a_schema_and_nothing_else_is_touched() -> None:
    data = {"pattern": "[a&&b]"}
    schema: dict[str, Any] = {
        "properties": {"pattern": {"pattern": "x", "default": data}, "enum": {"anyOf": [data]}, "title": data},
        "$defs": {"const": data},
        "patternProperties": {"x": {"not": data}, "X": True},
        "enum": [data],
        "const": data,
        "pattern": {"pattern": "x"},
    }
    changed = {"pattern": "[A&&B]"}
    assert map_patterns(schema, str.upper) == {
        "properties": {"pattern": {"pattern": "X", "default": data}, "enum": {"anyOf": [changed]}, "title": changed},
        "$defs": {"const": changed},
        "patternProperties": {"X": {"allOf": [{"not": changed}, True]}},
        "enum": [data],
        "const": data,
        "pattern": {"pattern": "X"},
    }


@pytest.mark.parametrize("pattern", ["(?x)a b", "(?ix:[a b])", "a(?x) # [b"])
def test_a_pattern_with_white_space_that_does_not_count_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidInput, match="flag x"):
        regex_grammar(pattern, "f")
    assert lets(regex_grammar(r"(?i-x:[a ]+)\(\?x", "f"), "A (?x")
