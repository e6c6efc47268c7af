"""What surrounds a message on the bus: headers in, headers out, errors both ways. Knows no server.

Both buses pass every message through here, so a pipeline test meets the same bytes, budgets and errors as production.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from opentelemetry import context as otel_context
from opentelemetry.context import Context

from shared.bus import trace_context
from shared.bus.bus import BUDGET_HEADER, ERROR_HEADER, NO_RESPONDERS, Delivery, RequestHandler, Sent
from shared.contracts.errors import (
    BatonError,
    ErrorInfo,
    Internal,
    MessageTooLarge,
    ProtocolError,
    Unavailable,
    from_wire,
    to_wire,
)
from shared.contracts.message import decode, encode

log = logging.getLogger("baton.bus")

MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
"""The largest message NATS is configured to take: a submit with a very long prompt."""

ROOM_BYTES = 1024
"""More than a message's own headers take: so far below the limit nobody need count them."""
MAX_BUDGET_DIGITS = 12
INBOX_PREFIX = "_INBOX_"
"""Every service's reply inbox is `_INBOX_<service>.…`; the bus answers nowhere else."""
CROSSING_PREFIX = "_R_."
"""Where NATS maps the reply subject of a request from another account to. No client can name one itself."""

Headers = dict[str, str]

_EMPTY = Context()
_error_encoder = msgspec.json.Encoder()
_error_decoder = msgspec.json.Decoder(ErrorInfo)


def inbox_prefix(service: str) -> str:
    """The reply inbox of one service's user."""
    return f"{INBOX_PREFIX}{service}"


def may_answer(reply_subject: str, raw: bool = False) -> bool:
    """True for a service's inbox: a request that names any other reply subject would make us publish for its sender.

    `raw`: of a hop of tenants, whose requests come from other accounts.
    """
    return reply_subject.startswith(INBOX_PREFIX) or (raw and reply_subject.startswith(CROSSING_PREFIX))


def payload_of(subject: str, message: Sent, limit: int) -> bytes:
    """What of a message travels without its headers. Raises MessageTooLarge when it is larger than `limit` bytes."""
    payload = encode(message)
    if len(payload) > limit:
        raise MessageTooLarge(_too_large(f"{len(payload)} bytes", limit, subject, message))
    return payload


def _too_large(size: str, limit: int, subject: str, message: Sent) -> str:
    """Clients are told what stands before the colon."""
    return f"it makes a message of {size}; the limit is {limit}: {type(message).__name__} for {subject}"


def outgoing(subject: str, message: Sent, budget_s: float | None, limit: int) -> tuple[bytes, Headers | None]:
    """Payload and headers of a message about to be sent: trace context and remaining budget included, unless it is raw
    bytes, whose reader is a tenant.

    Raises MessageTooLarge when both together are larger than `limit` bytes: that is what a server counts, and it ends
    the connection of who sends more.
    """
    payload = payload_of(subject, message, limit)
    if isinstance(message, bytes):
        return payload, None
    headers: Headers = {}
    trace_context.inject(headers)
    if budget_s is not None:
        headers[BUDGET_HEADER] = str(max(0, int(budget_s * 1000)))
    if len(payload) > limit - ROOM_BYTES and len(payload) + headers_size(headers) > limit:
        size = f"{len(payload) + headers_size(headers)} bytes with its headers"
        raise MessageTooLarge(_too_large(size, limit, subject, message))
    return payload, headers or None


def headers_size(headers: Mapping[str, str]) -> int:
    """Bytes that headers take on the wire; 0 for none."""
    lines = (f"{name}: {value}\r\n".encode() for name, value in headers.items())
    return len(b"NATS/1.0\r\n\r\n") + sum(map(len, lines)) if headers else 0


def incoming(
    subject: str,
    payload: bytes,
    headers: Mapping[str, str] | None,
    message_type: Any,
    *,
    now: float | None = None,
    stored_id: str = "",
) -> Delivery:
    """The delivery a received message stands for; its budget becomes a deadline on this process's monotonic clock.

    Headers of a raw message are a tenant's own and mean nothing here. Raises ProtocolError when payload or budget do
    not decode.
    """
    message = decode(payload, message_type)
    if not headers or message_type is bytes:
        return Delivery(subject, message, _EMPTY, stored_id=stored_id)
    deadline = None
    if budget := headers.get(BUDGET_HEADER):
        if not budget.isascii() or not budget.isdigit() or len(budget) > MAX_BUDGET_DIGITS:
            raise ProtocolError(f"budget header on {subject} is not a number of milliseconds")
        deadline = (time.monotonic() if now is None else now) + int(budget) / 1000
    return Delivery(subject, message, trace_context.extract(headers), deadline, stored_id)


async def answer(
    handler: RequestHandler, delivery: Delivery, limit: int, raw: bool = False
) -> tuple[bytes, Headers | None]:
    """Run a request handler under the asker's trace context; payload and headers of its answer.

    A BatonError becomes `error_answer`. Anything else is logged here with its traceback and answered as Internal
    without details: they may hold prompt text.
    """
    token = otel_context.attach(delivery.context)
    try:
        return payload_of(delivery.subject, await handler(delivery), limit), None  # who asked has the trace
    except BatonError as error:
        return error_answer(error, raw)
    except Exception:
        log.exception("handler of %s failed", delivery.subject)
        return error_answer(Internal(f"{delivery.subject} failed"), raw)
    finally:
        otel_context.detach(token)


def error_answer(error: BatonError, raw: bool) -> tuple[bytes, Headers | None]:
    """Payload and headers of an answer that is an error: in the error header, or for tenants (`raw`) a JSON payload."""
    if not raw:
        return b"", _error_headers(error)
    info = ErrorInfo(error.code, error.message, error.param, error.retry_after_s)
    return _error_encoder.encode({"error": info}), None


def _error_headers(error: BatonError) -> Headers:
    if isinstance(error, Unavailable) and error.code == NO_RESPONDERS:
        # of a hop of ours; the asker must not think that nobody listened to it
        error = Unavailable(error.message, param=error.param, retry_after_s=error.retry_after_s)
    return {ERROR_HEADER: _error_encoder.encode(to_wire(error)).decode()}


def read_reply(subject: str, payload: bytes, headers: Mapping[str, str] | None, reply_type: Any) -> Any:
    """The reply to a request. Raises the error in its header, or ProtocolError when it does not decode."""
    if headers and (wire := headers.get(ERROR_HEADER)):
        try:
            info = _error_decoder.decode(wire)
        except msgspec.MsgspecError as exc:
            raise ProtocolError(f"error header of {subject} does not decode: {exc}") from exc
        raise from_wire(info)
    try:
        return decode(payload, reply_type)
    except ProtocolError as exc:
        raise ProtocolError(f"reply of {subject}: {exc.message}") from exc
