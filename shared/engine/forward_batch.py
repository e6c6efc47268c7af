"""A step plan as flat arrays: what the model reads.

A pure function of the plan. Knows slots and rows; knows nothing about weights, pools or earlier steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.linear import padded_rows
from kernels.sampling import GREEDY_BELOW
from shared.engine.step_plan import IN_FLIGHT, ScheduledSequence, StepPlan
from shared.kv.layout import LayerGroup


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """One layer group's addressing."""

    block_tables: tuple[tuple[int, ...], ...]  # per sequence
    slot_mapping: tuple[int, ...]  # [num_rows] slot of each row's KV; -1 = do not store


@dataclass(frozen=True, slots=True)
class InFlightToken:
    """A row whose token the previous step samples."""

    row: int
    seq_id: str
    back: int  # 1 = the last token sampled for the sequence, 2 = the one before, ...


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Rows [0, num_tokens) are tokens, sequence by sequence; rows up to num_rows pad the matrix products."""

    num_tokens: int
    token_ids: Tensor  # [num_rows] int64; 0 where in flight or padding
    positions: Tensor  # [num_rows] int64, absolute; 0 for padding
    cu_seqlens_q: tuple[int, ...]  # [num_seqs + 1]
    seq_lens: tuple[int, ...]  # [num_seqs] tokens visible to each sequence's last row
    groups: tuple[GroupBatch, ...]
    logit_rows: Tensor  # [num_logit_rows] int64, ascending
    logit_ranges: tuple[range, ...]  # per sequence, indices into logit_rows
    in_flight: tuple[InFlightToken, ...]
    top_only: bool = False  # only the largest logits of rows matter: others may be minus infinity
    passing: bool = False  # logits are looked at before the next step, and then no more

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]


def build_forward_batch(plan: StepPlan, groups: Sequence[LayerGroup], all_logits: bool = False) -> ForwardBatch:
    """Lay a plan out as flat rows.

    Args:
        all_logits: somebody beside the sampler looks at them.

    Raises:
        ValueError: the plan breaks its own contract: it is empty, a sequence has no tokens or asks for more logit
            rows than tokens, or its block tables do not cover it.
    """
    if not plan.sequences:
        raise ValueError(f"step {plan.step} is empty")
    for sequence in plan.sequences:
        check_sequence(sequence, groups)
    num_tokens = plan.num_tokens
    padding = padded_rows(num_tokens) - num_tokens
    cu_seqlens_q = [0]
    token_ids: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    logit_ranges: list[range] = []
    in_flight: list[InFlightToken] = []
    for sequence in plan.sequences:
        first = len(token_ids)
        token_ids.extend(sequence.token_ids)
        last = len(token_ids)
        positions.extend(range(sequence.start, sequence.start + last - first))
        cu_seqlens_q.append(last)
        logit_ranges.append(range(len(logit_rows), len(logit_rows) + sequence.num_logits))
        logit_rows.extend(range(last - sequence.num_logits, last))
        if sequence.token_ids[-1] == IN_FLIGHT:
            rows = [first + i for i, token_id in enumerate(sequence.token_ids) if token_id == IN_FLIGHT]
            in_flight.extend(InFlightToken(row, sequence.seq_id, last - row) for row in rows)
    for token in in_flight:
        token_ids[token.row] = 0
    return ForwardBatch(
        num_tokens=num_tokens,
        token_ids=_int64(token_ids + [0] * padding),
        positions=_int64(positions + [0] * padding),
        cu_seqlens_q=tuple(cu_seqlens_q),
        seq_lens=tuple(sequence.start + len(sequence.token_ids) for sequence in plan.sequences),
        groups=tuple(_group_batch(plan, i, group, padding) for i, group in enumerate(groups)),
        logit_rows=_int64(logit_rows),
        logit_ranges=tuple(logit_ranges),
        in_flight=tuple(in_flight),
        top_only=not all_logits and all(_wants_top(s) for s in plan.sequences if s.num_logits),
        passing=not all_logits,
    )


def _int64(values: list[int]) -> Tensor:
    # through numpy: several times as fast as a tensor from a list
    return torch.from_numpy(np.array(values, dtype=np.int64))


def _wants_top(sequence: ScheduledSequence) -> bool:
    """True when only the largest logit of its rows matters."""
    sampling = sequence.sampling
    if sampling is None or sequence.scored:
        return not sequence.scored
    plain = not (sampling.adjusts or sampling.grammar or sampling.logprobs >= 0)
    return plain and sampling.temperature < GREEDY_BELOW


def _group_batch(plan: StepPlan, index: int, group: LayerGroup, padding: int) -> GroupBatch:
    slots: list[int] = []
    size = group.block_size
    for sequence in plan.sequences:
        table, start, end = sequence.block_tables[index], sequence.start, sequence.start + len(sequence.token_ids)
        first = min(max(start, sequence.stored_from), end)
        slots.extend([-1] * (first - start))
        slots.extend([table[position // size] * size + position % size for position in range(first, end)])
    tables = tuple(sequence.block_tables[index] for sequence in plan.sequences)
    return GroupBatch(tables, tuple(slots) + (-1,) * padding)


def check_sequence(sequence: ScheduledSequence, groups: Sequence[LayerGroup]) -> None:
    """Raises ValueError when a sequence's share of a step breaks the plan's contract."""
    num_tokens = len(sequence.token_ids)
    if num_tokens == 0 or not 0 <= sequence.num_logits <= num_tokens:
        raise ValueError(f"{sequence.seq_id}: {num_tokens} tokens with {sequence.num_logits} logit rows")
    if len(sequence.block_tables) != len(groups):
        raise ValueError(f"{sequence.seq_id}: {len(sequence.block_tables)} block tables for {len(groups)} layer groups")
    if num_tokens > 1 and IN_FLIGHT in sequence.token_ids:
        known = sequence.token_ids.index(IN_FLIGHT)
        if any(token_id != IN_FLIGHT for token_id in sequence.token_ids[known:]):
            raise ValueError(f"{sequence.seq_id}: a known token follows one in flight")
    for table, group in zip(sequence.block_tables, groups, strict=True):
        if len(table) < group.blocks_for(sequence.start + num_tokens):
            raise ValueError(f"{sequence.seq_id}: {len(table)} blocks do not cover the sequence in group {group.name}")
