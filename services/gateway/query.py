"""Query parameters of lists: checked, with defaults; what is unknown or wrong is named."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from shared.contracts.errors import InvalidInput

MAX_CHARS = 100


def query(request: Request, **known: tuple[int, int | None] | tuple[str, ...] | None) -> dict[str, Any]:
    """The values of `known` parameters.

    Args:
        known: per name (most, default) of a number from 1, or from 0 where nothing is the default; the words allowed
            with the default first; or None for text.

    Raises InvalidInput naming the parameter.
    """
    for name in request.query_params:
        if name not in known:
            name = name[:MAX_CHARS]
            raise InvalidInput(f"{name}: unknown parameter", param=name, code="unknown_parameter")
    return {name: _value(name, request.query_params.get(name), kind) for name, kind in known.items()}


def _value(name: str, text: str | None, kind: tuple[int, int | None] | tuple[str, ...] | None) -> Any:
    if kind is None:
        if text is not None and len(text) > MAX_CHARS:
            raise InvalidInput(f"{name} has over {MAX_CHARS} characters", param=name)
        return text or ""
    first = kind[0]
    if isinstance(first, int):
        most, default = first, kind[1]
        if text is None:
            return default
        least = 0 if default is None else 1
        if not (text.isascii() and text.isdigit() and len(text) < 9 and least <= int(text) <= most):
            raise InvalidInput(f"{name} must be {least} to {most}", param=name)
        return int(text)
    if text is not None and text not in kind:
        raise InvalidInput(f"{name} must be one of {', '.join(map(str, kind))}", param=name)
    return first if text is None else text
