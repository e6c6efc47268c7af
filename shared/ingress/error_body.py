"""The one place where Baton's errors become the body of OpenAI's, over HTTP and in the files of a batch alike. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared.bus.bus import NO_RESPONDERS
from shared.contracts.errors import BatonError, Internal, MessageTooLarge, ProtocolError, Unavailable, UnknownModel

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
    if isinstance(error, MessageTooLarge):
        # behind the colon it names a hop of ours
        message = f"the request is too large: {error.message.partition(':')[0]}"
    elif isinstance(error, ProtocolError):
        message = "an internal message was broken"
    if isinstance(error, Unavailable) and error.code in (Unavailable.default_code, NO_RESPONDERS):
        # the bus's words and param name hops of ours
        return plain_body("the service is not available now; try again", error.status, "", Unavailable.default_code)
    return plain_body(message, error.status, error.param, error.code)


def plain_body(message: str, status: int, param: str, code: str) -> dict[str, Any]:
    """The body of an error that is none of the tree, such as one of HTTP routing."""
    kind = _TYPES.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": param or None, "code": code or None}}


def unknown_model(known: Sequence[str]) -> UnknownModel:
    """404 with the models there are."""
    return UnknownModel(f"the model does not exist; models here: {', '.join(known)}", param="model")


def as_baton_error(exc: BaseException) -> BatonError:
    """Any exception as one of the tree; a foreign one becomes Internal without its words."""
    return exc if isinstance(exc, BatonError) else Internal("internal error")
