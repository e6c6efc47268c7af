"""Which runs a prefill worker takes, and what it says to the others."""

from __future__ import annotations

import logging

from shared.contracts import messages as m
from shared.contracts.errors import BatonError, ContextExceeded, Forbidden, Internal, Overloaded, ProtocolError
from shared.contracts.grants import Grant
from shared.engine.block_room import ReservationRefused

log = logging.getLogger("baton.prefill")


def require_sane(message: m.PrefillRun, grant: Grant, token_ids: tuple[int, ...], max_positions: int) -> None:
    """Refuse what no waiting can make right; in a step it would take its neighbours along.

    Raises:
        Forbidden: the grant is another request's.
        ProtocolError: there is nothing to compute.
        ContextExceeded: the prompt does not fit the model's context.
    """
    if grant.request_id != message.attempt.request_id:
        raise Forbidden("the grant is another request's", code="grant_invalid")
    if not 0 <= message.first_token < len(token_ids):
        raise ProtocolError(f"nothing to compute of {len(token_ids)} tokens from {message.first_token} on")
    if len(token_ids) >= max_positions:
        raise ContextExceeded(f"{len(token_ids)} tokens and one more exceed the context of {max_positions}")


def as_refusal(exc: Exception) -> BatonError:
    """What a scheduler is told when a reservation raised `exc`."""
    if isinstance(exc, BatonError):
        return exc
    if isinstance(exc, ReservationRefused):
        return Overloaded(str(exc), retry_after_s=0.5, code=type(exc).__name__)
    log.error("a run could not begin: %s", exc, exc_info=exc)
    return Internal("the run could not begin")
