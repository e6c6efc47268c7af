"""Text of strangers on its way to a log or a terminal: nothing in it begins a line or is obeyed by a terminal. Pure."""

from __future__ import annotations

import re

_OBEYED = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
"""Controls, ESC among them, line ends, marks that turn the direction of writing, and halves of surrogate pairs."""
_ONE_LINE = re.compile(f"[{_OBEYED}]")
_LINES = re.compile(f"(?![\\n\\t])[{_OBEYED}]")


def one_line(text: str) -> str:
    """`text` with what a terminal would obey written as an escape such as `\\x1b`, line ends and tabs too."""
    return _ONE_LINE.sub(_escape, text)


def lines(text: str) -> str:
    """The same, but line feeds and tabs stay."""
    return _LINES.sub(_escape, text)


def json_text(text: str) -> str:
    """The same of JSON, which goes on meaning what it did: only in its strings may such characters stand."""
    return _LINES.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
