"""Patterns of clients as llguidance's regular expressions, of one meaning with Python's and ECMA-262's. Pure.

Digits and word characters are those of ASCII. So ECMA-262 has them, and the library in the patterns of a JSON schema;
elsewhere its own are all of Unicode, and so are Python's. What may be written is what both take, so that a client finds
a match whatever it looks with.

A class is a list of characters and ranges. The library knows more in it, classes in classes and what two of them share
or not (`[a&&b]`, `[a--b]`, `[a~~b]`), so every character that could begin such is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_ESCAPE = r"\\(?:[xuU]\{[0-9A-Fa-f]*\}|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[pP](?:\{[^\]}]*\}|[A-Za-z])|.)"
# a bracket right behind the one that opens a class is a character of it
_CLASS = rf"\[(?P<not>\^?+)(?P<items>\]?+(?:{_ESCAPE}|[^\]\\])*+)\]"
_TOKEN = re.compile(rf"{_ESCAPE}|{_CLASS}|(?P<verbose>\(\?[A-Za-z]*x)", re.DOTALL)
_RANGE = re.compile(rf"(?P<first>{_ESCAPE}|.)(?:-(?P<last>{_ESCAPE}|.))?", re.DOTALL)
_SETS = (r"\d", r"\D", r"\s", r"\S", r"\w", r"\W", r"\p", r"\P")
_MEANS_MORE = frozenset("-&~[]^")

_DIGITS, _WORD = "0-9", "0-9A-Za-z_"
_OUTSIDE = {r"\d": f"[{_DIGITS}]", r"\w": f"[{_WORD}]"}
_IN_CLASS = {r"\d": _DIGITS, r"\w": _WORD}
_IN_NEGATED = {r"\D": f"[^{_DIGITS}]", r"\W": f"[^{_WORD}]"}
"""What narrows a pattern: by itself, in a class, and in a class of what must not come, which may hold others."""


def in_ascii(pattern: str, *, sets_in_ranges: bool = False) -> str:
    r"""A pattern with `\d` and `\w` of ASCII, with `\D` and `\W` that hold no digit or letter of Unicode.

    Args:
        sets_in_ranges: whether `[\w-.]` holds word characters, a hyphen and a dot, as in ECMA-262 (annex B) and so in
            patterns of schemas; in Python it is an error.

    Raises:
        ValueError: a range that begins or ends with a set, unless `sets_in_ranges`; or the flag x, which leaves out
            white space in classes too, unlike Python's, and is not in ECMA-262.
    """
    return _TOKEN.sub(lambda token: _narrowed(token, sets_in_ranges), pattern)


def _narrowed(token: re.Match[str], sets_in_ranges: bool) -> str:
    if token["verbose"]:
        raise ValueError("the flag x is not supported")
    if token["items"] is None:
        return _OUTSIDE.get(token.group(), token.group())
    names = _IN_NEGATED if token["not"] else _IN_CLASS

    def narrowed(item: re.Match[str]) -> str:
        first, last = item["first"], item["last"]
        if last is None:
            return _item(first, names)
        if not (first.startswith(_SETS) or last.startswith(_SETS)):
            return f"{_item(first, names)}-{_item(last, names)}"
        if not sets_in_ranges:
            raise ValueError(f"{item.group()} in a class is no range of characters")
        return rf"{_item(first, names)}\-{_item(last, names)}"

    return f"[{token['not']}{_RANGE.sub(narrowed, token['items'])}]"


def _item(item: str, names: Mapping[str, str]) -> str:
    return f"\\{item}" if item in _MEANS_MORE else names.get(item, item)
