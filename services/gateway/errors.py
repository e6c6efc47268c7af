"""What HTTP adds to an error's body: its headers, and the errors that routing itself finds."""

from __future__ import annotations

import math
from typing import Any

from shared.contracts.errors import BatonError
from shared.ingress.error_body import plain_body

DEFAULT_RETRY_S = 1.0
NEVER = ("request_too_large",)
"""Codes of refusals that no waiting changes."""


def error_headers(error: BatonError) -> dict[str, str]:
    """`Retry-After` in whole seconds where a retry can help, `WWW-Authenticate` where a key is missing."""
    headers: dict[str, str] = {}
    if error.status in (429, 503) and error.code not in NEVER:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s or DEFAULT_RETRY_S)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 413:
        headers["Connection"] = "close"
    return headers


def http_body(status: int, message: str) -> dict[str, Any]:
    """The body of an error that HTTP routing itself found, such as an unknown path."""
    return plain_body(message, status, "", {404: "unknown_url", 405: "method_not_allowed"}.get(status, "http_error"))
