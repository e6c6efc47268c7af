"""The end of a root span whose request never became a session."""

from __future__ import annotations

from opentelemetry.trace import Span, Status, StatusCode

from shared.contracts.errors import BatonError
from shared.telemetry import attributes as a


def end_failed(span: Span, error: BatonError) -> None:
    """End it with the error's code and status."""
    span.set_attribute(a.STATUS, error.code)
    span.set_attribute(a.HTTP_STATUS, error.status)
    span.set_status(Status(StatusCode.ERROR))
    span.end()
