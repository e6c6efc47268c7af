"""What comes back of a step on a device: host memory that its draws are copied to, and what they say."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampling.triton_logprobs import NO_ID
from shared.contracts.logprobs import TokenLogprob
from shared.engine.device_compute import MAX_TOP, DeviceCompute
from shared.engine.device_stream import DeviceStream
from shared.engine.step_plan import IN_FLIGHT, ScheduledSequence, StepPlan


@dataclass(frozen=True, slots=True)
class StepDraws:
    """By the plan's sequences; the last two by index."""

    sampled: tuple[tuple[int, ...], ...]
    bad: frozenset[int]
    logprobs: dict[int, tuple[TokenLogprob, ...]]


class DeviceResults:
    """Host memory of one step's draws.

    Args:
        rows: most rows of logits.
    """

    def __init__(self, stream: DeviceStream, rows: int) -> None:
        self._drawn = stream.host_buffer(2 * rows).view(2, rows)
        words = stream.host_buffer((1 + 2 * MAX_TOP) * rows)
        ids, values = words[rows:].view(2, rows, MAX_TOP)
        self._own, self._ids, self._values = words[:rows].view(torch.float32), ids, values.view(torch.float32)
        self._told = False

    def fetch(self, compute: DeviceCompute, plan: StepPlan, told: bool) -> None:
        """Launch the copies of the step just launched.

        Args:
            told: log-probabilities too.
        """
        self._drawn.copy_(compute.results, non_blocking=True)
        self._told = told
        if told:
            rows = sum(sequence.num_logits for sequence in plan.sequences)
            _copy(self._own[:rows], compute.drawn.logprobs)
            _copy(self._ids[:rows], compute.top.ids)
            _copy(self._values[:rows], compute.top.logprobs)

    def tokens(self, first: int, count: int) -> tuple[int, ...] | None:
        """What some rows drew, once the step has ended; None where one was not finite."""
        tokens, finite = self._drawn[:, first : first + count].tolist()
        return tuple(tokens) if all(finite) else None

    def read(self, plan: StepPlan, before: Collection[str], stuck: Collection[int]) -> StepDraws:
        """What the step drew, once it has ended.

        Args:
            before: sequences of the step before whose tokens are none.
            stuck: by index, sequences that cannot go on: they draw nothing, and are not bad for that.
        """
        tokens, finite = self._drawn[:, : sum(sequence.num_logits for sequence in plan.sequences)].tolist()
        sampled: list[tuple[int, ...]] = []
        bad: set[int] = set()
        logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
        row = 0
        for i, sequence in enumerate(plan.sequences):
            first, row = row, row + sequence.num_logits
            lost = sequence.token_ids[-1] == IN_FLIGHT and sequence.seq_id in before
            if lost or not all(finite[first:row]):
                bad.add(i)
            if i in bad or i in stuck:
                sampled.append(())
                continue
            sampled.append(tuple(tokens[row - sequence.num_sampled : row]))
            if self._told and (found := self._logprobs(sequence, first)):
                logprobs[i] = found
        return StepDraws(tuple(sampled), frozenset(bad), logprobs)

    def _logprobs(self, sequence: ScheduledSequence, row: int) -> tuple[TokenLogprob, ...]:
        """Those it asked for: of its scored tokens, then of those sampled. `row` is its first one."""
        wanted = [sequence.score_top] * len(sequence.scored)
        top = -1 if sequence.sampling is None else sequence.sampling.logprobs
        wanted += [top] * sequence.num_sampled if top >= 0 else []
        return tuple(self._entry(row + i, max(count, 0)) for i, count in enumerate(wanted))

    def _entry(self, row: int, top: int) -> TokenLogprob:
        ids, values = self._ids[row, :top].tolist(), self._values[row, :top].tolist()
        best = tuple((i, value) for i, value in zip(ids, values, strict=True) if i != NO_ID)
        return TokenLogprob(float(self._own[row]), best)


def _copy(to: Tensor, source: Tensor) -> None:
    """The leading rows."""
    to.copy_(source[: to.shape[0]], non_blocking=True)
