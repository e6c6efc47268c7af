"""Grammars as text: what a client asked for, in llguidance's form. Pure; whether one compiles, `compiler` says.

A grammar is JSON of the form `{"grammars": [{"lark_grammar": …}]}`. Equal requests give equal text, so that a digest of
it names what was compiled.

Whitespace between the tokens of JSON is a space, or a new line with its indent: enough for either way of writing, and
nothing that a model could repeat for ever.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from shared.contracts.errors import InvalidInput
from shared.grammar.patterns import in_ascii
from shared.grammar.schema_end import has_end
from shared.grammar.schema_patterns import map_patterns

MAX_BYTES = 64 * 1024
"""Of a grammar: it travels with the request, once a choice."""
MAX_DEPTH = 64
"""Of a schema; the library's own limit lies a little above, and depends on the parts of it."""
MAX_INTEGER = 2**53
"""The library's numbers are doubles: a larger constant would be written rounded."""
MAX_DIVISOR = 10_000
"""Of all `multipleOf` of a schema together, zeros at the end left out: the library's work grows with it, to minutes."""
MAX_CHOICES = 1000
OPTIONS: Mapping[str, Any] = {"whitespace_pattern": r"( |\n {0,24})?"}
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_OPTIONS_KEY = "x-guidance"
_SCHEMA_IN_LARK = re.compile(r"%json\s*(?=\{)")


def schema_grammar(schema: Mapping[str, Any], field: str) -> str:
    """JSON that a schema describes.

    Args:
        field: where it stands in the request, for errors.

    Raises:
        InvalidInput: too large, too deep, or with options of the library in it.
    """
    return lark_grammar(f"start: {schema_body(schema, field)}", field)


def schema_body(schema: Mapping[str, Any], field: str) -> str:
    """The same as an expression of Lark."""
    return f"%json {json.dumps(json_schema(schema, field), ensure_ascii=False)}"


def json_schema(schema: Mapping[str, Any], field: str) -> dict[str, Any]:
    """A client's schema with our options in it. Raises as `schema_grammar`."""
    _check(schema, field)
    _require_end(schema, field)
    return {
        **map_patterns(schema, lambda pattern: _in_ascii(pattern, field, sets_in_ranges=True)),
        _OPTIONS_KEY: dict(OPTIONS),
    }


def regex_grammar(pattern: str, field: str) -> str:
    """Text that a regular expression matches from end to end. Raises InvalidInput for one too large, and as `regex`."""
    return lark_grammar(f"start: {regex(pattern, field)}", field)


def choice_grammar(choices: Sequence[str], field: str) -> str:
    """One of the texts. Raises InvalidInput for none, too many or an empty one."""
    return lark_grammar(f"start: {choice_body(choices, field)}", field)


def choice_body(choices: Sequence[str], field: str) -> str:
    """The same as an expression of Lark."""
    if not choices or len(choices) > MAX_CHOICES:
        raise InvalidInput(f"{field}: must hold 1 to {MAX_CHOICES} choices", param=field)
    if not all(choices):
        raise InvalidInput(f"{field}: a choice must not be empty", param=field)
    return f"({' | '.join(map(literal, choices))})"


def own_grammar(text: str, field: str) -> str:
    """A client's own grammar in Lark; schemas in it are checked like others. Raises InvalidInput for one too large."""
    grammar = lark_grammar(text, field)
    try:
        schemas = [json.JSONDecoder().raw_decode(text, m.end())[0] for m in _SCHEMA_IN_LARK.finditer(text)]
    except (ValueError, RecursionError) as exc:
        raise InvalidInput(f"{field}: holds a schema that is not valid JSON", param=field) from exc
    _check(schemas, field)
    for schema in schemas:
        _require_end(schema, field)
    return grammar


def lark_grammar(text: str, field: str) -> str:
    """What a grammar of llguidance's Lark describes. Raises InvalidInput for one that is too large."""
    return _grammars([{"lark_grammar": text}], field)


def literal(text: str) -> str:
    """A text as a string of Lark."""
    return json.dumps(text, ensure_ascii=False)


def regex(pattern: str, field: str) -> str:
    """A pattern as a regular expression of Lark. Raises InvalidInput for what `in_ascii` refuses."""
    # a slash would end it, and a line break may stand in a client's pattern
    escaped = re.sub(r"\\.|/|\n|\r", _escape, _in_ascii(pattern, field), flags=re.DOTALL)
    return f"/{escaped}/"


def _in_ascii(pattern: str, field: str, *, sets_in_ranges: bool = False) -> str:
    try:
        return in_ascii(pattern, sets_in_ranges=sets_in_ranges)
    except ValueError as exc:
        raise InvalidInput(f"{field}: {exc}", param=field) from exc


def _escape(match: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n", "\r": r"\r"}.get(match.group(), match.group())


def _grammars(grammars: list[dict[str, Any]], field: str) -> str:
    text = json.dumps({"grammars": grammars}, ensure_ascii=False, separators=(",", ":"))
    if len(text.encode()) > MAX_BYTES:
        raise InvalidInput(f"{field}: a grammar has at most {MAX_BYTES} bytes", param=field)
    return text


def _require_end(schema: Any, field: str) -> None:
    if not has_end(schema):
        raise InvalidInput(f"{field}: no output can match it, as it needs itself without end", param=field)


def _check(value: Any, field: str) -> None:
    """No options in a schema, no number that gets lost or takes too much work, and no more than `MAX_DEPTH` levels.

    Without recursion, as the depth is a stranger's.
    """
    level, divisor = [value], 1
    for _ in range(MAX_DEPTH):
        following: list[Any] = []
        for item in level:
            if isinstance(item, Mapping):
                if _OPTIONS_KEY in item:
                    raise InvalidInput(f"{field}: {_OPTIONS_KEY} is not supported", param=field)
                divisor = math.lcm(divisor, _divisor(item.get("multipleOf")))
                if divisor > MAX_DIVISOR:
                    message = f"{field}: multipleOf, all of them together, is at most {MAX_DIVISOR}"
                    raise InvalidInput(message, param=field)
                following.extend(item.values())
            elif isinstance(item, list):
                following.extend(item)
            elif isinstance(item, int) and abs(item) > MAX_INTEGER:
                raise InvalidInput(f"{field}: an integer has at most 53 bits", param=field)
        if not following:
            return
        level = following
    raise InvalidInput(f"{field}: a schema has at most {MAX_DEPTH} levels", param=field)


def _divisor(multiple_of: Any) -> int:
    """The digits of a `multipleOf` without zeros at the end; 1 for what is no number, which others refuse."""
    if isinstance(multiple_of, bool) or not isinstance(multiple_of, int | float) or not math.isfinite(multiple_of):
        return 1
    return int("".join(map(str, Decimal(repr(multiple_of)).as_tuple().digits)).rstrip("0") or "1")
