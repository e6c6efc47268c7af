"""Messages of idempotency records: `policy.idempotency` and the question whether an ingress still lives.

A record is one request of a tenant under an `Idempotency-Key`. It is *claimed* by the gateway that runs the request;
each claim is a new run, counted from 1, and ends the right of every earlier one to write. What clients were answered
is kept in parts, opaque bytes that policy seals.
"""

from __future__ import annotations

from shared.contracts.ids import Epoch, IngressId, RequestId, TenantId
from shared.contracts.message import Message

YOURS = "yours"
"""The asker has the record now, and must run the request."""
RUNNING = "running"
"""Another ingress, which lives, runs it."""
DONE = "done"
"""The answer is complete."""
OPEN = "open"
"""Nobody runs it, and it has no answer: the next claim gets it."""
REFUSED = "refused"
"""It was refused before anything was begun. A first run's record goes, as if the key had never been used, and so does
one that only its claimer had and never wrote to; a later run's is open."""
RECORD_GAP = "record_gap"
"""Code of the Conflict that tells a writer that parts before its own are missing: Redis lost them."""


class IdempotencyClaim(Message, frozen=True, kw_only=True):
    """gateway → policy, `policy.idempotency`: whose is the record of this key, and what was answered so far.

    Asked again while another ingress runs it, with what is known, until it is done or ours.
    """

    key_hash: bytes  # SHA-256 of the API key
    name: bytes  # SHA-256 of route and Idempotency-Key
    body: bytes  # SHA-256 of the request's body
    ingress_id: IngressId
    seed: int  # of the request, if this claim makes the record
    resume: bool = False  # only a record that is there: do not make one
    known_run: int = 0
    known_parts: int = 0  # of that run
    keyed: RequestId = RequestId(
        ""
    )  # of a stored response under an Idempotency-Key: the key's record, which goes with it


class IdempotencyState(Message, frozen=True, kw_only=True):
    """policy → gateway: the record as it is."""

    request_id: RequestId
    outcome: str  # yours | running | done
    run: int
    seed: int
    created_s: int
    committed: bytes = b""  # output token ids an earlier run committed, as `pack_tokens` has them
    parts: tuple[bytes, ...] = ()  # those after the known ones
    more: bool = False  # there are more of them: ask again


class IdempotencyWrite(Message, frozen=True, kw_only=True):
    """gateway → policy, `policy.idempotency`: more of a run. Repeating it changes nothing."""

    tenant: TenantId
    request_id: RequestId
    ingress_id: IngressId
    run: int
    state: str = RUNNING  # running | open | done | refused
    first_part: int = 0  # number of the first one of `parts`
    parts: tuple[bytes, ...] = ()
    committed: bytes = b""  # all of them, not the new ones
    epoch: Epoch = Epoch(0)
    prompt_tokens: int = 0
    completion_tokens: int = 0


class IdempotencyWritten(Message, frozen=True, kw_only=True):
    """policy → gateway. Not `held`: another run has the record, and this one may neither go on nor settle."""

    held: bool
    gone: bool = False  # not held, and nobody else has it: the record was deleted
    cancel: bool = False  # the run shall end; of stored responses


class IngressAsked(Message, frozen=True, kw_only=True):
    """policy → ingress, `gateway.<id>.ask`: are you there? That nobody listens is the answer of a dead process."""


class IngressHere(Message, frozen=True, kw_only=True):
    """ingress → policy."""
