"""A model's runner as an engine calls it: on its share of the cores, with the zeroing of blocks that goes with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shared.engine.core_share import CoreShare
from shared.engine.engine_parts import Again, Limits, Steps
from shared.engine.step_plan import StepOutput, StepPlan


@dataclass(slots=True)
class ModelSteps:
    """`share` None shares cores with nobody.

    `use_threads` is told how many threads the next steps may use; None for a model that cannot change them: others
    still see when it computes.
    """

    step: Callable[[StepPlan], StepOutput]
    zero: Callable[[int, Iterable[int]], None]
    share: CoreShare | None = None
    use_threads: Callable[[int], None] | None = None
    again: Again | None = None  # None: each step is planned by itself
    _told: int = 0  # threads

    def run(self, plan: StepPlan) -> StepOutput:
        if self.share is None:
            return self.step(plan)
        with self.share.step() as threads:
            self._use(threads)
            return self.step(plan)

    def run_again(self, ready: Callable[[], object], limits: Limits) -> Steps | None:
        """As `again`, on this worker's share of the cores."""
        if self.again is None:
            return None
        if self.share is None:
            return self.again(ready, limits)
        with self.share.step() as threads:
            self._use(threads)
            return self.again(ready, limits)

    def _use(self, threads: int) -> None:
        if threads != self._told and self.use_threads is not None:
            self.use_threads(threads)
            self._told = threads

    def zero_blocks(self, blocks: Sequence[tuple[int, int]]) -> None:
        for group, block_id in blocks:
            self.zero(group, (block_id,))
