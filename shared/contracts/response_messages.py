"""Messages of stored responses, on `policy.responses`.

A stored response is a record as of an Idempotency-Key, in a place of its own: claimed, run and written by the same
messages (`IdempotencyClaim`, `IdempotencyWrite`). These say what it has beside: what it was made from, and that it is
looked at, cancelled and deleted by its id. Whose it is policy knows by the API key.
"""

from __future__ import annotations

from shared.contracts.ids import IngressId, RequestId, TenantId
from shared.contracts.message import Message


class ResponseInput(Message, frozen=True, kw_only=True):
    """gateway → policy: more of what a response is made from. Repeating it changes nothing."""

    tenant: TenantId
    request_id: RequestId
    ingress_id: IngressId
    run: int
    first_part: int  # number of the first one of `parts`
    parts: tuple[bytes, ...]
    key_hash: bytes = b""  # of one in the background: under whose key it is gone on with


class ResponseFind(Message, frozen=True, kw_only=True):
    """gateway → policy: what is there of a response."""

    key_hash: bytes  # SHA-256 of the API key
    request_id: RequestId
    known_run: int = 0
    known_parts: int = 0  # of that run's answer; -1: none are asked for
    last_parts: bool = False  # the answer's last parts instead of those after the known ones
    known_input: int = -1  # parts of its input; -1: none is asked for


class ResponseFound(Message, frozen=True, kw_only=True):
    """policy → gateway."""

    outcome: str  # running | open | done, as IdempotencyState has them; open: whoever ran it is gone
    run: int
    num_parts: int
    num_input: int
    parts: tuple[bytes, ...] = ()
    input: tuple[bytes, ...] = ()
    completion_tokens: int = 0  # so far
    cancelled: bool = False  # it is to end


class ResponseCancel(Message, frozen=True, kw_only=True):
    """gateway → policy: the response shall end. Whoever runs it hears of it at its next write."""

    key_hash: bytes
    request_id: RequestId


class ResponseDelete(Message, frozen=True, kw_only=True):
    """gateway → policy: forget it, its texts with it."""

    key_hash: bytes
    request_id: RequestId


class ResponseChanged(Message, frozen=True, kw_only=True):
    """policy → gateway: a change was made. Not `held`: of an input, that the record is another run's or gone."""

    held: bool = True


class ResponseAdopt(Message, frozen=True, kw_only=True):
    """policy → any gateway, `responses.adopt`: nobody runs this response in the background any more; go on with it."""

    key_hash: bytes
    request_id: RequestId
    revoked: bool = False  # the key it was asked for with was; `key_hash` is another of the tenant's: end it


class ResponseAdopted(Message, frozen=True, kw_only=True):
    """gateway → policy: it runs, or has ended."""
