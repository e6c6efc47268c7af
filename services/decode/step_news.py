"""What an engine's threads tell of its steps, until the event loop takes it.

The loop is woken when something is to go out, not by every step: each wake-up costs as much as all else a token needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from services.decode.pace import Pace
from shared.engine.engine_parts import Steps
from shared.engine.sequence_update import SequenceUpdate
from shared.engine.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class Drawn:
    """What steps of a stretch drew: all else that they changed comes with the stretch's updates."""

    at: float  # the first of them
    plan: StepPlan
    steps: Steps


@dataclass(frozen=True, slots=True)
class Updated:
    """What a step or an order changed."""

    at: float
    updates: Sequence[SequenceUpdate]


class StepNews:
    """In the order told. `drawn` and `updated` may be called by any thread, the rest on the event loop only.

    Args:
        wake: has the event loop take what is here.
        has_begun: whether a sequence's first token was taken. Called by the engine's threads.
        clock: seconds, monotonic.
    """

    def __init__(
        self, pace: Pace, wake: Callable[[], None], has_begun: Callable[[str], bool], clock: Callable[[], float]
    ) -> None:
        self._pace = pace
        self._wake = wake
        self._has_begun = has_begun
        self._clock = clock
        self._told: deque[Drawn | Updated] = deque()
        self._plan: StepPlan | None = None  # the stretch last told of

    def drawn(self, plan: StepPlan, steps: Steps) -> None:
        """Steps of a stretch have ended."""
        self._told.append(Drawn(steps[0][0], plan, steps))
        due = any([self._pace.due(at) for at, _ in steps])  # noqa: C419 - each of them is told
        if plan is not self._plan:
            self._plan = plan
            due |= not all(self._has_begun(row.seq_id) for row in plan.sequences)
        if due:
            self._wake()

    def quiet_until(self, ended_at: float, step_s: float) -> float:
        """See `Engine.quiet_until`."""
        return self._pace.next_at(ended_at, step_s)

    def updated(self, updates: Sequence[SequenceUpdate]) -> None:
        """A step, a stretch or an order has ended. Only tokens behind a first one wait for more."""
        now = self._clock()
        self._told.append(Updated(now, updates))
        due = any(update.token_ids for update in updates) and self._pace.due(now)
        if due or not all(self._may_wait(update) for update in updates):
            self._wake()

    def take(self) -> Iterable[Drawn | Updated]:
        """What was told, oldest first; each is gone once it was taken."""
        while self._told:
            yield self._told.popleft()

    @property
    def is_late(self) -> bool:
        """True when something waits for a step that takes longer than expected."""
        return bool(self._told) and self._pace.is_late(self._told[0].at, self._clock())

    def _may_wait(self, update: SequenceUpdate) -> bool:
        says_more = update.finish or update.event or update.prompt_logprobs or not update.token_ids
        return not says_more and self._has_begun(update.seq_id)
