"""What the attempts at one request have cost, as their workers tell it."""

from __future__ import annotations

from shared.contracts.attempt import Attempt
from shared.contracts.ids import WorkerId
from shared.contracts.parts import ComputeRow, Totals, sum_totals

ALL_CHOICES = -1


class StreamAccount:
    """Totals per attempt and worker; a later account of the same replaces the earlier one."""

    def __init__(self) -> None:
        self._parts: dict[tuple[Attempt, WorkerId], dict[int, Totals]] = {}  # by choice

    def add(self, attempt: Attempt, worker: WorkerId, totals: Totals, choice: int = ALL_CHOICES) -> None:
        """What a worker tells of one choice, or of all: that stands whatever comes for one of them."""
        parts = self._parts.setdefault((attempt, worker), {})
        if choice == ALL_CHOICES:
            parts.clear()
        elif ALL_CHOICES in parts:
            return
        parts[choice] = totals

    def rows(self) -> tuple[ComputeRow, ...]:
        """One row per attempt and worker, in the order they were first told of."""
        return tuple(
            ComputeRow(worker, attempt, sum_totals(parts.values())) for (attempt, worker), parts in self._parts.items()
        )
