"""The one step-time model: T = max(floor, base + token * n + sequence * B) + context * C, in seconds.

n is the tokens of a step, B its sequences, and C its attended positions: for each token the positions it sees, summed.
For a decode row that is its sequence's length; a chunk of n tokens from `start` on sees n * start + n (n + 1) / 2.
The floor is what reading all weights takes: below it, a few rows more cost nothing.

Everything that asks how long something takes asks this: token budget, admission, placement, fake workers, planner.
Pure, and without torch. `step_fit` finds the coefficients.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.contracts.parts import StepModel
from shared.engine.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Coefficients in seconds; none is negative. The defaults are a small CPU's guess, until a fit replaces them."""

    base_s: float = 2e-3
    token_s: float = 1e-3
    sequence_s: float = 1e-4
    context_s: float = 1e-7
    floor_s: float = 0.0

    def predict(self, num_tokens: int, num_seqs: int, context_tokens: int) -> float:
        """Seconds a step takes; an empty step takes none.

        Args:
            num_tokens: tokens computed in the step.
            num_seqs: sequences they belong to.
            context_tokens: positions attended to, summed over those tokens; see `context_of`.
        """
        if num_tokens == 0:
            return 0.0
        products_s = self.base_s + self.token_s * num_tokens + self.sequence_s * num_seqs
        return max(self.floor_s, products_s) + self.context_s * context_tokens

    def faster(self, times: float) -> StepTimeModel:
        """The model of a machine that is so many times as fast."""
        return StepTimeModel(
            self.base_s / times,
            self.token_s / times,
            self.sequence_s / times,
            self.context_s / times,
            self.floor_s / times,
        )

    def wire(self) -> StepModel:
        """As beats carry it."""
        return StepModel(
            base_s=self.base_s,
            token_s=self.token_s,
            sequence_s=self.sequence_s,
            context_s=self.context_s,
            floor_s=self.floor_s,
        )


DEFAULT_MODEL = StepTimeModel()


def from_wire(model: StepModel) -> StepTimeModel:
    """The model that a beat carries."""
    return StepTimeModel(model.base_s, model.token_s, model.sequence_s, model.context_s, model.floor_s)


@dataclass(frozen=True, slots=True)
class StepObservation:
    """One finished step."""

    num_tokens: int
    num_seqs: int
    context_tokens: int
    duration_s: float


def observed(plan: StepPlan, duration_s: float, repeats: int) -> list[StepObservation]:
    """What an ended plan tells: a step, or those of a stretch that together took so long."""
    count, context = len(plan.sequences), context_of(plan)
    return [StepObservation(plan.num_tokens, count, context + i * count, duration_s / repeats) for i in range(repeats)]


def context_of(plan: StepPlan) -> int:
    """Positions attended to by a step's tokens, summed: the `context_tokens` of `predict`."""
    total = 0
    for row in plan.sequences:
        num_tokens = len(row.token_ids)
        total += row.start + 1 if num_tokens == 1 else chunk_context(row.start, num_tokens)
    return total


def chunk_context(start: int, num_tokens: int) -> int:
    """Positions that `num_tokens` tokens from position `start` on attend to, summed."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2
