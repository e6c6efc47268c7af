"""The batcher's invariants under random use, while its sequences guess, rightly and wrongly, wherever they may."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

from hypothesis import HealthCheck, Phase, settings

from shared.engine.sequence import Sequence
from shared.engine.speculation import Drafts, Speculation
from shared.engine.step_time import StepTimeModel
from tests.unit.batcher_support import next_token
from tests.unit.test_batcher_machine import BatcherMachine


class Guesser(Speculation):
    """Up to three tokens for every sequence that may guess; how many, and how many of them are right, is chance."""

    def __init__(self) -> None:
        super().__init__(3)
        self._rng = random.Random(0)

    def holds_back(self, model: StepTimeModel, decodes: Seq[Sequence]) -> bool:
        return any(seq.most_drafts > 0 for seq in decodes)

    def most_steps(self, model: StepTimeModel, decodes: Seq[Sequence], most: int) -> int:
        return most if self._rng.random() < 0.3 else 1

    def drafts_for(self, model: StepTimeModel, decodes: Seq[Sequence], most: int) -> Drafts:
        drafts = Drafts()
        for seq in decodes:
            count = min(self._rng.randrange(4), seq.most_drafts, most)
            if count > 0:
                right = self._rng.randrange(count + 1)
                tokens = [next_token(seq.spec.seq_id, len(seq.tokens) + i) for i in range(count)]
                drafts[seq.spec.seq_id] = tuple(t if i < right else t + 1 for i, t in enumerate(tokens))
                most -= count
        return drafts


class GuessingBatcherMachine(BatcherMachine):
    STRETCH_S, NUM_BLOCKS = 1.0, 20

    def __init__(self) -> None:
        super().__init__()
        self.batcher._speculation = self.batcher._composer._speculation = Guesser()


# found faults are shown as they are: to shrink one takes minutes
GuessingBatcherMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
TestGuesses = GuessingBatcherMachine.TestCase
