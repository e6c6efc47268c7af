"""A runner without a model, for `--fake` workers: made-up tokens in the time a model would take. No torch."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

from shared.engine.step_plan import ScheduledSequence, StepOutput, StepPlan
from shared.engine.step_time import DEFAULT_MODEL, StepTimeModel, context_of


def made_up_token(seed: int, position: int, vocabulary: range) -> int:
    """The token at an absolute position: a pure function, so that a resumed or handed-off request goes on alike."""
    digest = hashlib.blake2b(f"{seed}|{position}".encode(), digest_size=8).digest()
    return vocabulary[int.from_bytes(digest, "little") % len(vocabulary)]


class FakeRunner:
    """Samples `made_up_token` of (seed, position) for every row of logits, and sleeps as long as the model predicts.

    Args:
        vocabulary: the token ids to draw from; leave out what ends a sequence.
        step_time: how long a step takes.
        sleep: replaced in tests and simulations.
    """

    def __init__(
        self,
        vocabulary: range = range(1000, 9000),
        step_time: StepTimeModel = DEFAULT_MODEL,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._vocabulary = vocabulary
        self._step_time = step_time
        self._sleep = sleep

    def run(self, plan: StepPlan) -> StepOutput:
        """Takes and reports the predicted seconds."""
        duration_s = self._step_time.predict(plan.num_tokens, len(plan.sequences), context_of(plan))
        self._sleep(duration_s)
        return StepOutput(plan.step, tuple(self._sample(row) for row in plan.sequences), duration_s=duration_s)

    def zero_blocks(self, blocks: Sequence[tuple[int, int]]) -> None:
        """There is nothing to overwrite."""

    def _sample(self, row: ScheduledSequence) -> tuple[int, ...]:
        if row.sampling is None:
            return ()
        end = row.start + len(row.token_ids)
        first = end - row.num_logits + 1
        return tuple(made_up_token(row.sampling.seed, p, self._vocabulary) for p in range(first, end + 1))
