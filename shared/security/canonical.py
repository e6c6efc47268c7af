"""Bytes for hashing: every field carries its type and length, so no two different lists of fields look alike."""

from __future__ import annotations

from collections.abc import Sequence

Field = bytes | str | int | tuple[str, ...]

MAX_INT = 2**63


def encode_fields(fields: Sequence[Field]) -> bytes:
    """The fields one after another, each as type byte, little-endian u64 length, content.

    Types: `b` bytes, `s` UTF-8 text, `i` signed 64-bit little-endian, `l` a list of texts, each encoded the same way.
    Raises ValueError for an integer outside 64 bits, TypeError for another type.
    """
    return b"".join(_encode(field) for field in fields)


def _encode(field: Field) -> bytes:
    if isinstance(field, bytes):
        return _typed(b"b", field)
    if isinstance(field, str):
        return _typed(b"s", field.encode())
    if isinstance(field, tuple):
        return _typed(b"l", encode_fields(field))
    if isinstance(field, bool) or not isinstance(field, int):
        raise TypeError(f"a field cannot be a {type(field).__name__}")
    if not -MAX_INT <= field < MAX_INT:
        raise ValueError(f"{field} does not fit 64 bits")
    return _typed(b"i", field.to_bytes(8, "little", signed=True))


def _typed(kind: bytes, content: bytes) -> bytes:
    return kind + len(content).to_bytes(8, "little") + content
