"""The states of a batch: every step of the table, and nothing beside it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.batch import job_states as states
from services.batch.job_states import Step, next_step
from services.batch.records import Job, JobSpec
from shared.contracts.errors import Conflict, Internal
from shared.contracts.ids import BatchId, TenantId

ALL = ("validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled")


def job(status: str, total: int = 2, completed: int = 0, **more: Any) -> Job:
    spec = JobSpec(endpoint="/v1/completions", created_s=100, expires_s=200)
    return Job(
        tenant=TenantId("t"), batch_id=BatchId("b"), spec=spec, status=status, total=total, completed=completed, **more
    )


@pytest.mark.parametrize(
    ("found", "now", "step"),
    [
        (job("validating", 0), 199, Step.VALIDATE),
        (job("validating", 0), 200, Step.EXPIRE_EARLY),
        (job("in_progress"), 199.9, Step.RUN),
        (job("in_progress", completed=1, failed=1), 150, Step.FINALIZE),
        (job("in_progress"), 200, Step.FINALIZE),
        (job("finalizing"), 201, Step.END_ITEMS),
        (job("finalizing", completed=2), 201, Step.WRITE),
        (job("cancelling"), 150, Step.END_ITEMS),
        (job("cancelling", completed=1, failed=1), 150, Step.WRITE),
        (job("cancelling", 0), 150, Step.WRITE),
        *((job(status), 300, Step.NOTHING) for status in states.ENDED),
    ],
)
def test_what_a_batch_needs(found: Job, now: float, step: Step) -> None:
    assert next_step(found, now) is step


def test_a_batch_whose_time_was_up_ends_as_expired_and_others_as_completed() -> None:
    late = states.finalizing(job("in_progress", completed=1), 200)
    assert late == {"status": "finalizing", "finalizing_s": 200, "ending": "expired"}
    assert states.final_status(msgspec.structs.replace(job("x"), **late)) == "expired"
    done = states.finalizing(job("in_progress", completed=2), 200)
    assert done == {"status": "finalizing", "finalizing_s": 200}
    assert states.final_status(job("finalizing", completed=2)) == "completed"


@pytest.mark.parametrize("status", ["validating", "in_progress", "finalizing"])
def test_a_batch_under_way_is_cancelled(status: str) -> None:
    found = job(status, ending="expired")
    assert states.cancelling(found, 7) == {"status": "cancelling", "cancelling_s": 7}
    cancelled = msgspec.structs.replace(found, status="cancelling")
    assert states.cancelling(cancelled, 9) == {}
    assert states.final_status(cancelled) == "cancelled"
    assert states.item_code(cancelled) == "batch_cancelled"
    assert states.item_code(job("finalizing")) == "batch_expired"


@pytest.mark.parametrize("status", sorted(states.ENDED))
def test_what_has_ended_cannot_be_cancelled(status: str) -> None:
    with pytest.raises(Conflict, match=status):
        states.cancelling(job(status), 7)


def test_only_the_steps_of_the_table_are_taken() -> None:
    taken = set()
    for old in ALL:
        for new in ALL:
            try:
                states.change(old, new, 1)
            except Internal:
                continue
            taken.add((old, new))
    assert taken == {
        ("validating", "failed"),
        ("validating", "in_progress"),
        ("validating", "expired"),
        ("validating", "cancelling"),
        ("in_progress", "finalizing"),
        ("in_progress", "cancelling"),
        ("finalizing", "completed"),
        ("finalizing", "expired"),
        ("finalizing", "cancelling"),
        ("cancelling", "cancelled"),
    }
