"""The one error tree.

BatonError
├── InvalidInput            400  what the client sent cannot be run; names the field
│   ├── ContextExceeded     400  prompt and output do not fit the model's context
│   ├── NotFound            404
│   └── UnknownModel        404
├── Unauthenticated         401
├── Forbidden               403
├── Conflict                409
├── BodyTooLarge            413
├── OtherBody               422  an Idempotency-Key that stands for another body
├── QuotaExceeded           429  the tenant's own limit; carries retry_after_s
├── Cancelled               499  the client or an operator ended the request
├── Internal                500  a fault of ours
├── Overloaded              503  no capacity; carries retry_after_s
├── Unavailable             503  a hop did not answer; names the hop
├── DeadlineExceeded        504
├── ProtocolError           500  a message that does not decode, or breaks the contract
│   └── MessageTooLarge     413  what the client sent makes a message that the bus does not take
└── SettingsError                a setting is missing or wrong; names file and line (start-up only)

Foreign exceptions are mapped to this tree once, at the boundary where they enter, with `raise ... from exc`.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

NO_WORKER = "no_worker"
"""Code of the error with which a scheduler answers that has had no decode worker for a while."""
WORKER_STOPPING = "worker_stopping"
"""Code of the error with which a worker that is stopped on purpose ends what it still runs."""
PURGED = "purged"
"""Code of the error with which a request of a purged tenant ends."""


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error on the wire. `code` is stable for programs; `message` is for people, without prompt text."""

    code: str
    message: str
    param: str = ""
    retry_after_s: float = 0.0


class BatonError(Exception):
    """Root of every error Baton raises on purpose.

    Args:
        message: for people; must hold no prompt text and no secret.
        param: the request field, setting or file at fault; empty when there is none.
        retry_after_s: seconds after which a retry is worthwhile; 0 when unknown.
        code: overrides the class's stable code.
    """

    status: ClassVar[int] = 500
    default_code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str = "", retry_after_s: float = 0.0, code: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.code = code or self.default_code


class InvalidInput(BatonError):
    status = 400
    default_code = "invalid_value"


class ContextExceeded(InvalidInput):
    default_code = "context_length_exceeded"


class NotFound(InvalidInput):
    status = 404
    default_code = "not_found"


class UnknownModel(InvalidInput):
    status = 404
    default_code = "model_not_found"


class Unauthenticated(BatonError):
    status = 401
    default_code = "invalid_api_key"


class Forbidden(BatonError):
    status = 403
    default_code = "forbidden"


class Conflict(BatonError):
    status = 409
    default_code = "conflict"


class BodyTooLarge(BatonError):
    status = 413
    default_code = "request_too_large"


class OtherBody(BatonError):
    status = 422
    default_code = "idempotency_key_reused"


class QuotaExceeded(BatonError):
    status = 429
    default_code = "rate_limit_exceeded"


class Cancelled(BatonError):
    status = 499
    default_code = "cancelled"


class Internal(BatonError):
    status = 500
    default_code = "internal_error"


class Overloaded(BatonError):
    status = 503
    default_code = "overloaded"


class Unavailable(BatonError):
    status = 503
    default_code = "unavailable"


class DeadlineExceeded(BatonError):
    status = 504
    default_code = "deadline_exceeded"


class ProtocolError(BatonError):
    status = 500
    default_code = "protocol_error"


class MessageTooLarge(ProtocolError):
    status = 413
    default_code = "message_too_large"


class SettingsError(BatonError):
    default_code = "settings_error"


_TREE: tuple[type[BatonError], ...] = (
    ContextExceeded,
    NotFound,
    UnknownModel,
    InvalidInput,
    Unauthenticated,
    Forbidden,
    Conflict,
    BodyTooLarge,
    OtherBody,
    QuotaExceeded,
    Cancelled,
    Internal,
    Overloaded,
    Unavailable,
    DeadlineExceeded,
    ProtocolError,
    MessageTooLarge,
    SettingsError,
)
_BY_NAME = {cls.__name__: cls for cls in _TREE}


def to_wire(error: BatonError) -> ErrorInfo:
    """The wire form of an error: `code` is `ClassName/code`, so that the class survives the hop."""
    return ErrorInfo(
        code=f"{type(error).__name__}/{error.code}",
        message=error.message,
        param=error.param,
        retry_after_s=error.retry_after_s,
    )


def from_wire(info: ErrorInfo) -> BatonError:
    """The error a wire form stands for; a class this build does not know becomes `Internal`."""
    name, _, code = info.code.partition("/")
    cls = _BY_NAME.get(name, Internal)
    return cls(info.message, param=info.param, retry_after_s=info.retry_after_s, code=code)
