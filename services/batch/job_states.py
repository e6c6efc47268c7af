"""The states of a batch, exactly OpenAI's, and what its runner does next. Pure.

validating ──▶ failed
    │ │ ╰────▶ expired
    │ ╰──────▶ cancelling
    ▼
in_progress ─▶ finalizing ──▶ completed
    │              │ ╰──────▶ expired     (`ending` is `expired`: time was up before all was done)
    ▼              ▼
cancelling ──▶ cancelled
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from services.batch.records import Job
from shared.contracts.errors import Conflict, Internal

VALIDATING, FAILED, IN_PROGRESS, FINALIZING = "validating", "failed", "in_progress", "finalizing"
COMPLETED, EXPIRED, CANCELLING, CANCELLED = "completed", "expired", "cancelling", "cancelled"

ENDED = frozenset({FAILED, COMPLETED, EXPIRED, CANCELLED})
_NEXT: dict[str, frozenset[str]] = {
    VALIDATING: frozenset({FAILED, IN_PROGRESS, EXPIRED, CANCELLING}),
    IN_PROGRESS: frozenset({FINALIZING, CANCELLING}),
    FINALIZING: frozenset({COMPLETED, EXPIRED, CANCELLING}),
    CANCELLING: frozenset({CANCELLED}),
}


class Step(Enum):
    """What a batch needs now."""

    VALIDATE = "validate its file"
    EXPIRE_EARLY = "expire it: time was up before it was validated"
    RUN = "put its items on the queue, and wait"
    FINALIZE = "begin its end: every item has a result, or time is up"
    END_ITEMS = "give items without a result one that says so"
    WRITE = "write its files, and end it"
    NOTHING = "it has ended"


def next_step(job: Job, now_s: float) -> Step:
    """The step of a batch as it stands at `now_s`, unix seconds."""
    late = now_s >= job.spec.expires_s
    if job.status in ENDED:
        return Step.NOTHING
    if job.status == VALIDATING:
        return Step.EXPIRE_EARLY if late else Step.VALIDATE
    missing = job.finished < job.total
    if job.status == IN_PROGRESS:
        return Step.RUN if missing and not late else Step.FINALIZE
    return Step.END_ITEMS if missing else Step.WRITE


def finalizing(job: Job, now_s: int) -> dict[str, Any]:
    """The changes that begin a batch's end."""
    expired = {"ending": EXPIRED} if job.finished < job.total else {}
    return change(job.status, FINALIZING, now_s) | expired


def cancelling(job: Job, now_s: int) -> dict[str, Any]:
    """The changes of a cancel; none when it is under way. Raises Conflict when the batch has ended."""
    if job.status in ENDED:
        raise Conflict(f"the batch has ended: it is {job.status}", param="batch_id")
    return {} if job.status == CANCELLING else change(job.status, CANCELLING, now_s)


def final_status(job: Job) -> str:
    """What a batch whose files are written becomes."""
    return CANCELLED if job.status == CANCELLING else job.ending or COMPLETED


def item_code(job: Job) -> str:
    """The error code of items that got no result of their own."""
    return "batch_cancelled" if job.status == CANCELLING else "batch_expired"


def change(old: str, new: str, now_s: int) -> dict[str, Any]:
    """The fields that change from one status to the next, with its time. Raises Internal for no step of the table."""
    if new not in _NEXT.get(old, frozenset()):
        raise Internal(f"a batch cannot go from {old} to {new}")
    return {"status": new, f"{new}_s": now_s}
