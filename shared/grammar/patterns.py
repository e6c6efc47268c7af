"""Patterns of clients as llguidance's regular expressions: digits and word characters are those of ASCII. Pure.

So ECMA-262 has them, and the library in the patterns of a JSON schema; elsewhere its own are all of Unicode, and so are
Python's. What may be written is what both take, so that a client finds a match whatever it looks with.
"""

from __future__ import annotations

import re

# a bracket right behind the one that opens a class is a character of it
_TOKEN = re.compile(r"\\.|\[\^?\]?|\]", re.DOTALL)
_INSIDE = {r"\d": "[0-9]", r"\w": "[0-9A-Za-z_]"}
_OUTSIDE = {r"\D": "[^0-9]", r"\W": "[^0-9A-Za-z_]"}
"""What narrows a pattern; the second where it stands in a class of what must not come. A class may hold others."""


def in_ascii(pattern: str) -> str:
    r"""A pattern with `\d` and `\w` of ASCII, and with `\D` and `\W` that hold no digit or letter of Unicode."""
    classes: list[bool] = []  # those that are open, and whether they tell what must not come

    def narrowed(match: re.Match[str]) -> str:
        token = match.group()
        if token.startswith("["):
            classes.append(token.startswith("[^"))
        elif token == "]":
            del classes[-1:]
        else:
            return (_OUTSIDE if sum(classes) % 2 else _INSIDE).get(token, token)
        return token

    return _TOKEN.sub(narrowed, pattern)
