"""What becomes of an item whose run failed, and what it is called. Pure: losses, tries and chance are passed in."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from shared.contracts.errors import (
    BatonError,
    Internal,
    Overloaded,
    ProtocolError,
    QuotaExceeded,
    Unavailable,
)
from shared.contracts.ids import BatchId, Epoch, RequestId, TenantId
from shared.security.canonical import encode_fields

SUSPECT_LOSSES = 2
"""A worker died so often while it ran the item: the next run is alone, so that no neighbour is taken for the cause."""
POISON_LOSSES = 3
"""And once more when it was alone: nobody runs it again."""
MAX_FAULTS = 3
"""Faults of ours in a row, after which the item gets them as its result."""
EPOCHS_A_CLAIM = 16
"""More than a session raises the epoch by itself, as it ends after three lost workers."""
MIN_PAUSE_S, MAX_PAUSE_S = 0.25, 30.0
UNLISTED = "unlisted"
"""Code of a request that the scheduler dropped because our beats were late."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Run it again, after a pause in seconds."""

    pause_s: float


@dataclass(frozen=True, slots=True)
class Fail:
    """The error is the item's result."""

    error: BatonError


@dataclass(frozen=True, slots=True)
class Poison:
    """Its result says that it kills workers, and it is noted among the dead letters."""

    reason: str


Verdict = Retry | Fail | Poison


def request_id_of(tenant: TenantId, batch_id: BatchId, number: int, custom_id: str) -> RequestId:
    """The id of an item's request, the same in every run: 128 bits of a BLAKE2b hash."""
    fields = encode_fields(("baton batch item v1", tenant, batch_id, number, custom_id))
    return RequestId(f"req-{hashlib.blake2b(fields, digest_size=16).hexdigest()}")


def first_epoch(claim: int) -> Epoch:
    """Where the epochs of a claim (counted from 1) begin: above every one of the claims before it."""
    return Epoch((claim - 1) * EPOCHS_A_CLAIM + 1)


def runs_alone(losses: int) -> bool:
    """True if no other item may run beside it."""
    return losses >= SUSPECT_LOSSES


def ends_the_run(losses: int, alone: bool) -> bool:
    """True if a run must not go on at another worker after the last loss."""
    return losses >= (POISON_LOSSES if alone else SUSPECT_LOSSES)


def is_fault(error: BatonError) -> bool:
    """True for a fault of ours, which may or may not come again."""
    return isinstance(error, Internal | ProtocolError)


def poison(losses: int) -> Poison:
    """Why an item is given up."""
    return Poison(f"the worker that ran this line died {losses} times, the last time while it ran nothing else of ours")


def judge(error: BatonError, *, losses: int, tries: int, faults: int, chance: float) -> Verdict:
    """What follows a failed run.

    Args:
        losses: how often a worker died while it ran the item, over all claims.
        tries: runs that failed before this one, in this process.
        faults: those of them that were faults of ours.
        chance: uniform in [0, 1), so that items refused together do not come back together.
    """
    if losses >= POISON_LOSSES:
        return poison(losses)
    passing = isinstance(error, Overloaded | Unavailable | QuotaExceeded) or error.code == UNLISTED
    if not passing and not (is_fault(error) and faults + 1 < MAX_FAULTS):
        return Fail(error)
    pause_s = error.retry_after_s or MIN_PAUSE_S * 2 ** min(tries, 8)
    return Retry(min(MAX_PAUSE_S, max(MIN_PAUSE_S, pause_s)) * (1.0 + 0.25 * chance))
