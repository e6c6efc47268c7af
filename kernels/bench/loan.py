"""What to run on a card that is lent for minutes: steps by their worth, each with a time limit, over and over again.

Knows steps, a clock and a journal; how a step is launched and what it measures is others' affair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kernels.bench.journal import Journal

DONE, FAILED, OUT_OF_TIME, LEFT_OUT = "done", "failed", "out of time", "left out"


@dataclass(frozen=True, slots=True)
class Step:
    """A command that goes on where an earlier run of it was stopped."""

    name: str
    command: tuple[str, ...]
    most_s: float  # in its turn; more if time is left when all had theirs
    least_s: float = 20.0  # with less there is no use in starting it


Launch = Callable[[Step, float], int | None]
"""Runs a step for at most some seconds; its exit status, None where the time was up."""


def run_steps(
    steps: Sequence[Step], journal: Journal, until: float, clock: Callable[[], float], launch: Launch
) -> None:
    """Run what the journal does not call done, most valuable first, until `clock` says `until`.

    A step whose time was up goes on when all others had their turn. One that failed is tried again by the next run of
    all, not by this one.
    """
    waiting = [step for step in steps if statuses(journal).get(step.name) != DONE]
    first = True
    while waiting:
        stopped = []
        for step in waiting:
            left = until - clock()
            limit = min(step.most_s, left) if first else left
            if _one(step, limit, journal, clock, launch) == OUT_OF_TIME:
                stopped.append(step)
        waiting, first = [step for step in stopped if until - clock() >= step.least_s], False


def statuses(journal: Journal) -> dict[str, str]:
    """How each step last ended."""
    return {entry["step"]: entry["status"] for entry in journal.read() if "step" in entry}


def _one(step: Step, limit: float, journal: Journal, clock: Callable[[], float], launch: Launch) -> str:
    if limit < step.least_s:
        if step.name not in statuses(journal):
            journal.append(step=step.name, status=LEFT_OUT, seconds=0.0)
        return LEFT_OUT
    begin = clock()
    ended = launch(step, limit)
    status = OUT_OF_TIME if ended is None else FAILED if ended else DONE
    journal.append(step=step.name, status=status, seconds=round(clock() - begin, 1), rc=ended)
    return status
