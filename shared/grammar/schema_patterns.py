"""The patterns in a JSON schema, rewritten wherever one stands. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_DATA = frozenset({"const", "default", "enum", "examples"})
"""Their values are no schemas, whatever they look like."""
_BY_NAME = frozenset({"$defs", "definitions", "dependentSchemas", "properties"})
"""Their keys are a client's names, not words of a schema."""


def map_patterns(schema: Any, change: Callable[[str], str]) -> Any:
    """A copy of a schema of bounded depth with every pattern changed. Raises what `change` raises."""
    if isinstance(schema, list):
        return [map_patterns(item, change) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {key: _mapped(key, value, change) for key, value in schema.items()}


def _mapped(key: str, value: Any, change: Callable[[str], str]) -> Any:
    if key == "pattern" and isinstance(value, str):
        return change(value)
    if key in _DATA:
        return value
    if key == "patternProperties" and isinstance(value, Mapping):
        changed: dict[str, list[Any]] = {}
        for pattern, item in value.items():
            changed.setdefault(change(pattern), []).append(map_patterns(item, change))
        # two ways of writing one pattern hold both
        return {pattern: _all_of(items) for pattern, items in changed.items()}
    if key in _BY_NAME and isinstance(value, Mapping):
        return {name: map_patterns(item, change) for name, item in value.items()}
    return map_patterns(value, change)


def _all_of(schemas: list[Any]) -> Any:
    return schemas[0] if len(schemas) == 1 else {"allOf": schemas}
