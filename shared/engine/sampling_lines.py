"""Which line of a device's sampling state each sequence has, and what must be written there before a step. Pure.

A line holds what earlier tokens and a request's biases do to a sequence's draws. The device counts the tokens it draws
itself, so that steps can be planned ahead; a line is written anew for a sequence that had none, or lost it to another.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from shared.contracts.sampling import SamplingParams
from shared.engine.step_plan import IN_FLIGHT, ScheduledSequence, StepPlan

Biases = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class LineText:
    """What a line must hold before a step."""

    line: int
    said: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # tokens of prompt and output; None: as it is
    biases: Biases | None = None  # by ascending token id; None: as they are


@dataclass(frozen=True, slots=True)
class StepLines:
    """Lines that sequences of a step draw by, by index in the plan; one that needs none is not named.

    A mask's is that of the sequence's first row drawn from: its rows follow one another.
    """

    penalties: dict[int, int] = field(default_factory=dict)
    biases: dict[int, int] = field(default_factory=dict)
    masks: dict[int, int] = field(default_factory=dict)
    texts: list[LineText] = field(default_factory=list)  # what to write before


@dataclass(slots=True)
class _Line:
    number: int
    sampling: SamplingParams | None = None  # the object itself: a sequence of the same name has another
    next_draw: int = -1  # absolute position up to which tokens are in the line; -1 = none are
    banned: tuple[int, ...] | None = None  # of the biases in the line; None = none are


class SamplingLines:
    """The lines of one device's state.

    Args:
        num_lines: at least the sequences of a step.
        max_biases: of a line.
    """

    def __init__(self, num_lines: int, vocab_size: int, max_biases: int) -> None:
        self._vocab_size = vocab_size
        self._max_biases = max_biases
        self._free = list(reversed(range(num_lines)))
        self._lines: OrderedDict[str, _Line] = OrderedDict()  # the one used longest ago first

    def assign(self, plan: StepPlan) -> StepLines:
        """The lines of a step, in order of the steps. Where it raises, or the step is not launched, `forget` it.

        Raises:
            ValueError: a sequence draws several tokens under penalties, its tokens are not known, or there are more
                biases than a line has room for.
        """
        wanted = [(i, row, row.sampling) for i, row in enumerate(plan.sequences) if row.num_sampled and _needs(row)]
        # what the step needs is not given away
        for _, row, _ in wanted:
            if row.seq_id in self._lines:
                self._lines.move_to_end(row.seq_id)
        found = StepLines()
        for i, row, params in wanted:
            assert params is not None
            line = self._line(row.seq_id, params)
            said = self._tell_tokens(line, row) if params.penalizes else None
            biases = self._tell_biases(line, row, params)
            if params.penalizes:
                found.penalties[i] = line.number
            if params.logit_bias or row.banned:
                found.biases[i] = line.number
            if said is not None or biases is not None:
                found.texts.append(LineText(line.number, said, biases))
        return found

    def forget(self, plan: StepPlan) -> None:
        """Nothing is known of the plan's lines any more."""
        for row in plan.sequences:
            line = self._lines.pop(row.seq_id, None)
            if line is not None:
                self._free.append(line.number)

    def _line(self, seq_id: str, params: SamplingParams) -> _Line:
        line = self._lines.get(seq_id)
        if line is None:
            number = self._free.pop() if self._free else self._lines.popitem(last=False)[1].number
            line = self._lines[seq_id] = _Line(number)
        if line.sampling is not params:
            line.sampling, line.next_draw, line.banned = params, -1, None
        return line

    def _tell_tokens(self, line: _Line, row: ScheduledSequence) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        if row.num_sampled > 1:
            raise ValueError(f"{row.seq_id} draws {row.num_sampled} tokens at once under penalties")
        position = row.start + len(row.token_ids)
        known, line.next_draw = line.next_draw, position + 1
        if known == position:
            return None
        tokens = (*row.history, *row.token_ids)
        if IN_FLIGHT in tokens or len(tokens) != position:
            raise ValueError(f"{row.seq_id} has penalties, and a token before {position} that nobody knows")
        self._require_tokens(row.seq_id, tokens)
        return tokens[: row.num_prompt_tokens], tokens[row.num_prompt_tokens :]

    def _tell_biases(self, line: _Line, row: ScheduledSequence, params: SamplingParams) -> Biases | None:
        if line.banned == row.banned or not (params.logit_bias or row.banned):
            return None
        line.banned = row.banned
        biases = tuple(sorted((*params.logit_bias, *((token_id, -math.inf) for token_id in row.banned))))
        if len(biases) > self._max_biases:
            raise ValueError(f"{row.seq_id} has {len(biases)} biases, at most {self._max_biases} have room")
        return biases

    def _require_tokens(self, seq_id: str, tokens: Collection[int]) -> None:
        if min(tokens) < 0 or max(tokens) >= self._vocab_size:
            raise ValueError(f"{seq_id} has a token id outside [0, {self._vocab_size})")


class PlainRows:
    """Tells steps whose rows ask for temperature, top_k and top_p alone; remembers by place who did."""

    def __init__(self) -> None:
        self._plain: list[SamplingParams | None] = []

    def all_of(self, rows: Sequence[ScheduledSequence]) -> bool:
        """True when no row of the step asks for more."""
        plain = self._plain
        if len(plain) < len(rows):
            plain += [None] * (len(rows) - len(plain))
        for i, row in enumerate(rows):
            params = row.sampling
            if row.scored or (params is not plain[i] and asks_for_more(row)):
                return False
            plain[i] = params
        return True


def asks_for_more(row: ScheduledSequence) -> bool:
    """Whether its draws look at more than temperature, top_k and top_p, or more than a token is told of them."""
    params = row.sampling
    asked = params is not None and (params.adjusts or params.min_p > 0 or params.logprobs >= 0)
    return asked or bool(row.scored or row.banned)


def _needs(row: ScheduledSequence) -> bool:
    params = row.sampling
    return params is not None and bool(params.penalizes or params.logit_bias or row.banned)


def wants_logprobs(sequences: Sequence[ScheduledSequence]) -> bool:
    """True when log-probabilities are told of a step."""
    return any(row.scored or (row.sampling is not None and row.sampling.logprobs >= 0) for row in sequences)
