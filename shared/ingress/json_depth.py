"""How deep a JSON value is nested. Pure."""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 100
"""Deeper than any schema or message; what handles a value afterwards may recurse."""


def too_deep(value: Any, text: bytes, limit: int = MAX_DEPTH) -> bool:
    """True if arrays and objects are nested more than `limit` levels.

    Args:
        text: what the value was read from; one with few brackets needs no walk.
    """
    if text.count(b"[") + text.count(b"{") <= limit:
        return False
    level = [value]
    for _ in range(limit):
        level = [item for outer in level for item in _items(outer) if isinstance(item, list | dict)]
        if not level:
            return False
    return True


def _items(outer: Any) -> Any:
    return outer.values() if isinstance(outer, dict) else outer
