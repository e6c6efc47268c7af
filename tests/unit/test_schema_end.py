"""Schemas that need themselves without end are found, and no other is taken for one."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from shared.contracts.errors import InvalidInput
from shared.grammar.schema_end import has_end
from shared.grammar.source import own_grammar, schema_grammar
from tests.json_schemas import SCHEMAS, obj

N = {"$ref": "#/$defs/N"}
OR_NULL = {"anyOf": [N, {"type": "null"}]}


def of(definition: Any, **more: Any) -> dict[str, Any]:
    return {"$defs": {"N": definition, **more}, **N}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        of(N),
        of(obj(n=N)),
        of(obj(n={"$ref": "#/$defs/M"}), M=obj(n=N)),
        of({"anyOf": [N, obj(n=N)]}),
        of({"allOf": [{"type": "string"}, N]}),
        of({"type": "array", "items": N, "minItems": 1}),
        of({"type": "array", "prefixItems": [{"type": "null"}, N], "minItems": 2}),
        of({"type": ["object", "array"], "properties": {"n": N}, "required": ["n"], "items": N, "minItems": 1}),
        {"$defs": {"a/b c~": {"$ref": "#/$defs/a~1b%20c~0"}}, "$ref": "#/$defs/a~1b%20c~0"},
    ],
)
def test_what_never_ends_is_refused(schema: dict[str, Any]) -> None:
    assert not has_end(schema)
    with pytest.raises(InvalidInput, match="field: no output can match it"):
        schema_grammar(schema, "field")


@pytest.mark.parametrize(
    "schema",
    [
        *SCHEMAS.values(),
        True,
        of(obj(n=OR_NULL)),
        of({"type": "object", "properties": {"n": N}}),
        of({"properties": {"n": N}, "required": ["n"]}),
        of({"type": ["object", "null"], "properties": {"n": N}, "required": ["n"]}),
        of({"type": "array", "items": N}),
        of({"type": "array", "prefixItems": [{"type": "null"}, N], "minItems": 1}),
        of(obj(n={"$ref": "#/$defs/M"}), M={"enum": [1]}),
        {"$defs": {"unused": {"$ref": "#/$defs/unused"}}, "type": "string"},
        {"$ref": "#nowhere"},
        {"$ref": "https://example.com/s"},
        {"properties": {"$ref": {"type": "string"}}, "enum": [{"$ref": "#"}]},
    ],
)
def test_what_can_end_passes(schema: Any) -> None:
    assert has_end(schema)


def test_a_schema_within_a_grammar_is_looked_at_too() -> None:
    own_grammar('start: %json {"type": "array", "items": {"$ref": "#"}}', "field")
    with pytest.raises(InvalidInput, match="field: no output can match it"):
        own_grammar('start: "a" | %json {"type": "array", "items": {"$ref": "#"}, "minItems": 1}', "field")


def test_chains_in_any_order_are_followed() -> None:
    names = [f"d{i}" for i in range(300)]
    random.Random(1).shuffle(names)
    chain = {a: {"$ref": f"#/$defs/{b}"} for a, b in pairwise(names)}
    start = {"$ref": f"#/$defs/{names[0]}"}
    assert has_end({"$defs": {**chain, names[-1]: {"type": "null"}}, **start})
    assert not has_end({"$defs": {**chain, names[-1]: start}, **start})
