"""One engine step as plain data: what the batcher decided, and what the runner produced.

The batcher knows nothing about tensors; the runner knows nothing about queues, blocks' owners or requests' ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from shared.contracts.logprobs import TokenLogprob
from shared.contracts.sampling import SamplingParams
from shared.engine.token_prefix import TokenPrefix

IN_FLIGHT = -1
"""Stands in `token_ids` for a token that a step still in flight will sample."""


class ScheduledSequence(msgspec.Struct, frozen=True):
    """One sequence's share of a step: positions [start, start + len(token_ids))."""

    seq_id: str
    start: int  # absolute position of the first token computed in this step
    token_ids: tuple[int, ...]  # IN_FLIGHT where the step before has not returned yet (only the last entries)
    block_tables: tuple[tuple[int, ...], ...]  # one per layer group; covers [0, start + len(token_ids)) at least
    num_logits: int  # trailing rows with logits: scored ones, then 1 for a sample and 1 for each drafted token
    sampling: SamplingParams | None  # None: rows of logits are computed but nothing is sampled
    stored_from: int = 0  # positions below this are already stored in shared blocks: their KV is not written again
    num_prompt_tokens: int = 0
    history: TokenPrefix | tuple[int, ...] = ()  # tokens [0, start), where penalties or a grammar look at them
    banned: tuple[int, ...] = ()  # token ids that may not be drawn in this step
    scored: tuple[int, ...] = ()  # tokens behind the leading rows of logits, whose log-probabilities are wanted
    score_top: int = -1  # the most likely tokens wanted beside each of them
    drafted: int = 0  # trailing tokens that are a guess: each counts if the row before it draws it

    @property
    def num_sampled(self) -> int:
        """Rows of logits that a token is drawn from."""
        return self.num_logits - len(self.scored) if self.sampling is not None else 0

    def that_count(self, drawn: tuple[int, ...]) -> tuple[int, ...]:
        """Of a token drawn from each row, those that count: up to the first that is not the drafted one, that included.

        The rows behind it were computed from a text that is not to be.
        """
        if not self.drafted:
            return drawn
        guesses = self.token_ids[-self.drafted :]
        right = next((i for i, guess in enumerate(guesses) if guess != drawn[i]), self.drafted)
        return drawn[: right + 1]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step, planned. Never empty. `step` counts from 1 without gaps.

    Of a stretch, `repeats` > 1, all rows are decodes: computed so many times over, each row going on with the token it
    drew. It may end before that, and does when a row draws one of `ending`.
    """

    step: int
    sequences: tuple[ScheduledSequence, ...]
    repeats: int = 1
    ending: frozenset[int] = frozenset()
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", sum([len(s.token_ids) for s in self.sequences]))


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step produced, in the plan's order."""

    step: int
    sampled: tuple[tuple[int, ...], ...]
    """Per sequence: one token id per row drawn from, of a stretch one a step; () where nothing was sampled. Behind a
    draft only those that count, at least one."""
    bad_rows: frozenset[int] = field(default_factory=frozenset)  # indices of sequences whose logits were not finite
    duration_s: float = 0.0  # shared out among the sequences by their tokens
    logprobs: Mapping[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    """Per index of a sequence that asked: of its scored tokens, then of those sampled."""
    stuck: frozenset[int] = frozenset()  # those of bad_rows whose logits were sound, and whose grammar ended them
    repeats: int = 1  # how many times over it was computed: at most as often as planned


def require_fit(plan: StepPlan, output: StepOutput) -> None:
    """Raises ValueError when a sequence that samples lacks its tokens; one with bad rows need not have any."""
    if len(output.sampled) != len(plan.sequences):
        raise ValueError(f"step {plan.step}: the output has {len(output.sampled)} of {len(plan.sequences)} sequences")
    if not 1 <= output.repeats <= plan.repeats:
        raise ValueError(f"step {plan.step}: computed {output.repeats} times, planned {plan.repeats} times")
    for i, (row, sampled) in enumerate(zip(plan.sequences, output.sampled, strict=True)):
        wanted = row.num_sampled * output.repeats
        if i in output.bad_rows or (row.drafted and 1 <= len(sampled) <= wanted):
            continue
        if len(sampled) != wanted:
            raise ValueError(f"step {plan.step}: {len(sampled)} tokens where {wanted} were to be sampled")
