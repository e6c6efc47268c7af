"""The one place where Baton's errors become OpenAI's: status, headers and body."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from shared.bus.bus import NO_RESPONDERS
from shared.contracts.errors import BatonError, Internal, ProtocolError, Unavailable, UnknownModel

DEFAULT_RETRY_S = 1.0
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    499: "cancelled_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


def error_body(error: BatonError) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`. Of a fault of ours it tells no details."""
    message = error.message
    if isinstance(error, ProtocolError):
        message = "an internal message was broken"
    if isinstance(error, Unavailable) and error.code in (Unavailable.default_code, NO_RESPONDERS):
        # the bus's words and param name hops of ours
        return _body("the service is not available now; try again", error.status, "", Unavailable.default_code)
    return _body(message, error.status, error.param, error.code)


def error_headers(error: BatonError) -> dict[str, str]:
    """`Retry-After` in whole seconds where a retry can help, `WWW-Authenticate` where a key is missing."""
    headers: dict[str, str] = {}
    if error.status in (429, 503):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s or DEFAULT_RETRY_S)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 413:
        headers["Connection"] = "close"
    return headers


def http_body(status: int, message: str) -> dict[str, Any]:
    """The body of an error that HTTP routing itself found, such as an unknown path."""
    return _body(message, status, "", {404: "unknown_url", 405: "method_not_allowed"}.get(status, "http_error"))


def unknown_model(known: Sequence[str]) -> UnknownModel:
    """404 with the models there are."""
    return UnknownModel(f"the model does not exist; models here: {', '.join(known)}", param="model")


def as_baton_error(exc: BaseException) -> BatonError:
    """Any exception as one of the tree; a foreign one becomes Internal without its words."""
    return exc if isinstance(exc, BatonError) else Internal("internal error")


def _body(message: str, status: int, param: str, code: str) -> dict[str, Any]:
    kind = _TYPES.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": param or None, "code": code or None}}
