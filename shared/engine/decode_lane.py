"""The short way for steps of decodes on native kernels: no tensors, and arrays that stay from step to step.

What it takes and what it computes are the same as the long way's, bit for bit; `ModelRunner` asks it first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from kernels.native.decode_step import DecodeStep
from kernels.native.model import NativeModel
from kernels.native.sampling import EVERY_LOGIT, logits_looked_at
from shared.contracts.errors import Internal
from shared.contracts.sampling import SamplingParams
from shared.engine.engine_parts import Limits, Steps
from shared.engine.sampler import row_sampling
from shared.engine.step_plan import IN_FLIGHT, ScheduledSequence, StepPlan

_LEAST_ROWS, _LEAST_BLOCKS = 8, 16
Tables = tuple[tuple[int, ...], ...]
Last = Mapping[str, tuple[int, ...]]
"""Per sequence what the step before sampled; () after a bad row."""


@dataclass(slots=True)
class _Seat:
    """What the arrays' row was written from. The objects themselves: what did not change is the same one."""

    tables: Tables
    sampling: SamplingParams
    looked_at: int  # logits, by its draw


@dataclass(frozen=True, slots=True)
class Drawn:
    """Per sequence the token it draws, or () for those of `bad`: their logits were not finite."""

    sampled: tuple[tuple[int, ...], ...]
    bad: frozenset[int]


class DecodeLane:
    """Runs steps over one native model and its pools. Used by one thread.

    Args:
        pools: per layer group, as `NativeModel.step`.
    """

    def __init__(self, model: NativeModel, pools: Sequence[Tensor]) -> None:
        self._model, self._pools = model, pools
        self._step: DecodeStep | None = None
        self._seats: list[_Seat | None] = []
        self._goes_on = False  # a step may follow the one last run

    def run(self, plan: StepPlan, last: Last, all_logits: bool = False) -> Drawn | None:
        """Compute a step; None, with nothing computed, when it is not one of decodes that draw by themselves.

        Args:
            all_logits: somebody looks at `logits` afterwards.

        Raises:
            Internal: the plan breaks its contract.
            ValueError, MemoryError: as `NativeModel.step`.
        """
        rows = plan.sequences
        self._goes_on = False
        if plan.num_tokens != len(rows):  # a chunk of a prompt among them
            return None
        step = self._step
        if step is None or len(rows) > step.rows:
            step = self._grown(len(rows), 1)
        looked_at, lost = EVERY_LOGIT if all_logits else 0, list[int]()
        for i, row in enumerate(rows):
            seat = self._seats[i]
            if seat is None or seat.sampling is not row.sampling or seat.tables is not row.block_tables:
                if max(map(len, row.block_tables), default=0) > step.blocks:
                    self._grown(len(rows), max(map(len, row.block_tables)))
                    return self.run(plan, last, all_logits)
                seat = self._sit(step, i, row)
            if seat is None or row.num_logits != 1 or row.start < row.stored_from:
                return None
            token = row.token_ids[0]
            if token == IN_FLIGHT:
                token = _resolved(plan, row, last)
                if token < 0:
                    lost.append(i)
                    token = 0
            try:
                step.place(i, token, row.start, row.block_tables)
            except IndexError as exc:
                raise Internal(f"step {plan.step}: {row.seq_id} has too few blocks for {row.start + 1} tokens") from exc
            looked_at += seat.looked_at
        drawn = step.run(len(rows), looked_at)
        self._goes_on = True
        if not lost and min(drawn) >= 0:
            return Drawn(tuple([(token,) for token in drawn]), frozenset())
        bad = frozenset(lost).union(i for i, token in enumerate(drawn) if token < 0)
        return Drawn(tuple(() if i in bad else (token,) for i, token in enumerate(drawn)), bad)

    def again(self, ready: Callable[[], object], limits: Limits) -> Steps | None:
        """Compute the step last run over and over, each row with the token it drew, within `limits`, at least once.

        None: it was not one of the lane's, or a row draws nothing.

        Args:
            ready: called when nothing is left to do but to compute.

        Raises:
            ValueError, MemoryError: as `NativeModel.step`; a row has too few blocks. Nothing was computed.
        """
        if not self._goes_on or self._step is None:
            return None
        ready()
        self._goes_on = False
        steps, self._goes_on = self._step.go_on(limits.most, limits.until, limits.ending, limits.halt)
        if min(steps[-1][1]) < 0:
            self._goes_on = False
            steps.pop()
        return steps or None

    @property
    def logits(self) -> Tensor:
        """[rows or more, vocab_size] of the last step; the next one overwrites them."""
        assert self._step is not None
        return self._step.logits

    def _grown(self, rows: int, blocks: int) -> DecodeStep:
        """New arrays, with room for so many sequences of so many blocks and for all there was room for."""
        most_rows, most_blocks = _LEAST_ROWS, _LEAST_BLOCKS
        if self._step is not None:
            most_rows, most_blocks = self._step.rows, self._step.blocks
        most_rows, most_blocks = max(most_rows, _power_of_two(rows)), max(most_blocks, _power_of_two(blocks))
        self._step = DecodeStep(self._model, self._pools, most_rows, most_blocks)
        self._seats = [None] * most_rows
        return self._step

    def _sit(self, step: DecodeStep, i: int, row: ScheduledSequence) -> _Seat | None:
        """Write a row's blocks and how it is sampled; None when that is not the lane's to do."""
        self._seats[i] = None
        params = row.sampling
        if params is None or params.adjusts or params.grammar or params.logprobs >= 0 or row.scored:
            return None
        if len(row.block_tables) != len(self._pools):
            raise Internal(f"{row.seq_id}: {len(row.block_tables)} block tables for {len(self._pools)} layer groups")
        sampling = row_sampling(params, row.start + 1)
        step.sit(i, row.block_tables, sampling)
        seat = self._seats[i] = _Seat(row.block_tables, params, logits_looked_at(sampling))
        return seat


def _resolved(plan: StepPlan, row: ScheduledSequence, last: Last) -> int:
    """The token a step in flight has sampled meanwhile; -1: its row was bad."""
    tokens = last.get(row.seq_id)
    if tokens is None:
        raise Internal(f"step {plan.step}: {row.seq_id} waits for a token that no step samples")
    return tokens[-1] if tokens else -1


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
