"""How many tokens a decode worker made for each request: what the scheduler corrects its charges by. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.contracts.attempt import Attempt
from shared.contracts.parts import AttemptOutput

TOLD_S = 3.5
"""How long an ended request is still told of: a beat may be lost."""


@dataclass(slots=True)
class EndedOutputs:
    """Requests that ended lately, with their tokens. Clock passed in (seconds, monotonic)."""

    _ended: dict[Attempt, tuple[int, float]] = field(default_factory=dict)

    def add(self, attempt: Attempt, num_tokens: int, now: float) -> None:
        """The request is over; the first word counts."""
        self._ended.setdefault(attempt, (num_tokens, now + TOLD_S))

    def told(self, running: Iterable[tuple[Attempt, int]], now: float) -> tuple[AttemptOutput, ...]:
        """Those that run, as given, and those that ended."""
        for attempt in [a for a, (_, until_s) in self._ended.items() if until_s <= now]:
            del self._ended[attempt]
        ended = (AttemptOutput(attempt, count, ended=True) for attempt, (count, _) in self._ended.items())
        return (*(AttemptOutput(a, count) for a, count in running if a not in self._ended), *ended)
