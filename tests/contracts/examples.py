"""One example of every message of the subjects table, with every field set away from its default.

The examples are made from the type annotations, so a new field or message can't be forgotten: it changes the bytes, and
the golden file has to be regenerated on purpose (`python -m tests.contracts.examples`).
"""

from __future__ import annotations

import json
import types
import typing
from pathlib import Path
from typing import Any

import msgspec

from shared.contracts.message import Message, encode
from shared.contracts.subjects import HOPS

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "contracts.json"

_SCALARS: dict[Any, Any] = {
    str: "text",
    bytes: b"\x01\x02",
    int: 7,
    float: 1.5,
    bool: True,
}


def message_types() -> list[type[msgspec.Struct]]:
    """Every message and reply type of the table, by name."""
    found: dict[str, type[msgspec.Struct]] = {}
    for hop in HOPS:
        for annotation in (hop.message, hop.reply):
            for cls in _members(annotation):
                found[cls.__name__] = cls
    return [found[name] for name in sorted(found)]


def example(annotation: Any) -> Any:
    """A value of the annotated type in which nothing stands at its default."""
    if hasattr(annotation, "__supertype__"):
        return example(annotation.__supertype__)
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    origin = typing.get_origin(annotation)
    args = typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        return example(next(a for a in args if a is not type(None)))
    if origin is tuple:
        return (example(args[0]),) if args[-1] is Ellipsis else tuple(example(a) for a in args)
    if origin is dict:
        return {"key": "value" if args[1] is str else example(args[1])}
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        hints = typing.get_type_hints(annotation)
        return annotation(**{name: example(hints[name]) for name in annotation.__struct_fields__})
    raise TypeError(f"no example for {annotation!r}")


def golden() -> dict[str, str]:
    """Message name → hex of its example's wire bytes."""
    return {cls.__name__: encode(example(cls)).hex() for cls in message_types()}


def _members(annotation: Any) -> list[type[Message]]:
    if annotation is None or annotation is bytes:
        return []
    return list(typing.get_args(annotation)) or [annotation]


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden(), indent=1, sort_keys=True) + "\n")
    print(f"wrote {GOLDEN}")
