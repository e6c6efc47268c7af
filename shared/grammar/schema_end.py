"""Whether JSON of a schema can ever be complete: a schema that needs itself has none that ends. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

MAX_STEPS = 50_000
"""Schemas looked at, a tenth of a second; what takes more counts as one that ends."""
_PRIMITIVES = frozenset({"string", "number", "integer", "boolean", "null"})
_ELSEWHERE = object()


def has_end(schema: Any) -> bool:
    """True if some finite JSON may satisfy the schema, as far as its references go; other contradictions are not found.

    References that are not pointers into the schema count as satisfiable. Takes a schema of bounded depth.
    """
    references = sorted(_references(schema))
    if not references:
        return True
    targets = {reference: _target(schema, reference) for reference in references}
    judge = _Judge({reference for reference in references if targets[reference] is _ELSEWHERE})
    before = -1
    while len(judge.ending) > before:
        before = len(judge.ending)
        for reference in references:
            if reference not in judge.ending and judge.ends(targets[reference]):
                judge.ending.add(reference)
        # a chain of definitions may stand in either order
        references.reverse()
    return judge.ends(schema)


class _Judge:
    """Tells which schemas some finite JSON satisfies, when only the references in `ending` have any."""

    def __init__(self, ending: set[str]) -> None:
        self.ending = ending
        self._left = MAX_STEPS

    def ends(self, schema: Any) -> bool:
        self._left -= 1
        if self._left < 0 or not isinstance(schema, Mapping):
            return True
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in self.ending:
            return False
        if not all(self.ends(part) for part in _list(schema.get("allOf"))):
            return False
        for name in ("anyOf", "oneOf"):
            parts = _list(schema.get(name))
            if parts and not any(self.ends(part) for part in parts):
                return False
        return "enum" in schema or "const" in schema or self._of_types(schema)

    def _of_types(self, schema: Mapping[str, Any]) -> bool:
        kinds = schema.get("type")
        kinds = [kinds] if isinstance(kinds, str) else _list(kinds)
        if not kinds or any(isinstance(kind, str) and kind in _PRIMITIVES for kind in kinds):
            return True
        return ("object" in kinds and self._object(schema)) or ("array" in kinds and self._array(schema))

    def _object(self, schema: Mapping[str, Any]) -> bool:
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            return True
        needed = (name for name in _list(schema.get("required")) if isinstance(name, str))
        return all(self.ends(properties.get(name)) for name in needed)

    def _array(self, schema: Mapping[str, Any]) -> bool:
        least = schema.get("minItems", 0)
        if not isinstance(least, int) or least < 1:
            return True
        items = schema.get("items")
        first = _list(schema.get("prefixItems")) or _list(items)
        parts = [*first[:least], *([items] if least > len(first) else [])]
        return all(self.ends(part) for part in parts)


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _references(schema: Any) -> set[str]:
    found: set[str] = set()
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            if isinstance(reference := value.get("$ref"), str):
                found.add(reference)
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
    return found


def _target(schema: Any, reference: str) -> Any:
    """What a pointer such as `#/$defs/a` names; `_ELSEWHERE` for any other reference."""
    if reference != "#" and not reference.startswith("#/"):
        return _ELSEWHERE
    value = schema
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isdecimal() and int(name[:9]) < len(value):
            value = value[int(name[:9])]
        else:
            return _ELSEWHERE
    return value
