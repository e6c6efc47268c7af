"""What a client notes with a request, within the limits that OpenAI has."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

MAX_PAIRS = 16
MAX_NAME_CHARS = 64
MAX_VALUE_CHARS = 512


def _few(value: Any) -> Any:
    # before the pairs are looked at one by one
    if isinstance(value, dict) and len(value) > MAX_PAIRS:
        raise ValueError(f"must hold at most {MAX_PAIRS} pairs")
    return value


def _short(value: dict[str, str] | None) -> dict[str, str] | None:
    if not all(0 < len(name) <= MAX_NAME_CHARS for name in value or ()):
        raise ValueError(f"names must have 1 to {MAX_NAME_CHARS} characters")
    if not all(len(text) <= MAX_VALUE_CHARS for text in (value or {}).values()):
        raise ValueError(f"values must have at most {MAX_VALUE_CHARS} characters")
    return value


_Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
_Value = Annotated[str, Field(max_length=MAX_VALUE_CHARS)]
_Form = Annotated[dict[_Name, _Value], Field(max_length=MAX_PAIRS)] | None
Metadata = Annotated[dict[str, str] | None, BeforeValidator(_few, json_schema_input_type=_Form), AfterValidator(_short)]
