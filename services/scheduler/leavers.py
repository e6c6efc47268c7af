"""Requests cancelled while they ran: charged as guessed until their worker has said what they came to. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.costs import request_cost
from services.scheduler.shares import Charge
from shared.contracts.attempt import Attempt
from shared.contracts.ids import WorkerId
from shared.contracts.messages import WorkerBeat

MOST_BEATS = 2
"""So many beats of a worker that neither list a cancelled request nor say what it came to are all there will be."""


@dataclass(slots=True)
class Leaver:
    """One of them. Token counts as in its record; nothing of its content."""

    attempt: Attempt
    worker: WorkerId
    klass: str
    charge: Charge
    num_tokens: int
    num_cached: int
    num_output: int
    beats: int = 0

    @property
    def cost(self) -> float:
        return request_cost(self.num_tokens, self.num_cached, self.num_output)


class Leavers:
    """Those whose account is still open. Each is given back once, to be settled at its `cost`."""

    def __init__(self) -> None:
        self._open: dict[Attempt, Leaver] = {}

    def add(self, leaver: Leaver) -> None:
        self._open[leaver.attempt] = leaver

    def beat(self, beat: WorkerBeat) -> list[Leaver]:
        """Those of whom this decode worker has said the last."""
        if beat.role != "decode":
            return []
        told = {output.attempt: output for output in beat.outputs}
        listed = {held.attempt for held in beat.attempts}
        over = []
        for leaver in [one for one in self._open.values() if one.worker == beat.worker]:
            output = told.get(leaver.attempt)
            if output is not None:
                leaver.num_output = max(leaver.num_output, output.num_tokens)
            leaver.beats += output is None and leaver.attempt not in listed
            if leaver.beats >= MOST_BEATS or (output is not None and output.ended):
                over.append(self._open.pop(leaver.attempt))
        return over

    def lost(self, worker: WorkerId) -> list[Leaver]:
        """Those of a worker that says no more."""
        return [self._open.pop(one.attempt) for one in list(self._open.values()) if one.worker == worker]
