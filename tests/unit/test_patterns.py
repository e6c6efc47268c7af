"""Digits and word characters of patterns are those of ASCII, wherever a pattern and whatever stands around it."""

from __future__ import annotations

import re

import pytest

from shared.grammar.compiler import GrammarCompiler
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
