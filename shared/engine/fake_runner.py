"""A runner without a model, for `--fake` workers: made-up tokens in the time a model would take. No torch."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from shared.contracts.logprobs import TokenLogprob
from shared.engine.step_plan import ScheduledSequence, StepOutput, StepPlan
from shared.engine.step_time import DEFAULT_MODEL, StepTimeModel, context_of


class ConstrainedDraws(Protocol):
    """What draws for sequences with a grammar."""

    def replace(
        self, plan: StepPlan, sampled: tuple[tuple[int, ...], ...]
    ) -> tuple[tuple[tuple[int, ...], ...], frozenset[int]]:
        """`sampled` with theirs in it, and the indices of those that cannot go on."""
        ...


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
        constrained: draws for sequences with a grammar.
    """

    def __init__(
        self,
        vocabulary: range = range(1000, 9000),
        step_time: StepTimeModel = DEFAULT_MODEL,
        sleep: Callable[[float], None] = time.sleep,
        constrained: ConstrainedDraws | None = None,
    ) -> None:
        self._constrained = constrained
        self._vocabulary = vocabulary
        self._step_time = step_time
        self._sleep = sleep

    def run(self, plan: StepPlan) -> StepOutput:
        """Takes and reports the predicted seconds."""
        duration_s = self._step_time.predict(plan.num_tokens, len(plan.sequences), context_of(plan))
        self._sleep(duration_s)
        sampled = tuple(self._sample(row) for row in plan.sequences)
        bad: frozenset[int] = frozenset()
        if self._constrained is not None:
            sampled, bad = self._constrained.replace(plan, sampled)
        logprobs = {
            i: tuple(_made_up_logprob(token, top) for token, top in _wanted(row, tokens))
            for i, (row, tokens) in enumerate(zip(plan.sequences, sampled, strict=True))
        }
        return StepOutput(plan.step, sampled, bad, duration_s=duration_s, logprobs=logprobs, stuck=bad)

    def zero_blocks(self, blocks: Sequence[tuple[int, int]]) -> None:
        """There is nothing to overwrite."""

    def _sample(self, row: ScheduledSequence) -> tuple[int, ...]:
        if row.sampling is None:
            return ()
        end = row.start + len(row.token_ids)
        first = end - row.num_sampled + 1
        vocabulary = self._vocabulary
        tokens = [made_up_token(row.sampling.seed, p, vocabulary) for p in range(first, end + 1)]
        return row.that_count(
            tuple(next(t for t in range(token, token + len(row.banned) + 1) if t not in row.banned) for token in tokens)
        )


def _wanted(row: ScheduledSequence, sampled: tuple[int, ...]) -> list[tuple[int, int]]:
    """Tokens whose log-probabilities are asked for, and how many others beside each."""
    wanted = [(token, row.score_top) for token in row.scored]
    if row.sampling is not None and row.sampling.logprobs >= 0:
        wanted += [(token, row.sampling.logprobs) for token in sampled]
    return wanted


def _made_up_logprob(token: int, top: int) -> TokenLogprob:
    return TokenLogprob(-1.0, tuple((token + i, -1.0 - i) for i in range(top)))
