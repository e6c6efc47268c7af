"""Arguments of a call, as a model wrote them, read as an object. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from shared.ingress.json_depth import too_deep

MALFORMED = "malformed"
"""Arguments that are no JSON object are told as one with this field, whole."""
MAX_DEPTH = 25
"""Levels of them; `chat_template` takes 32 of a message, in whose fourth they stand."""
_decode = msgspec.json.decode


def read_arguments(text: str) -> dict[str, Any]:
    """The object, `{}` where nothing is written, and `{"malformed": TEXT}` where it is something else or too deep."""
    # strict, as it stands in our own JSON: a model may write NaN, or half of a surrogate pair
    data = text.encode("utf-8", "replace")
    try:
        found = _decode(data) if text.strip() else {}
        if too_deep(found, data, MAX_DEPTH):
            raise RecursionError
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {MALFORMED: text}
