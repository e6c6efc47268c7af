"""A step plan as one buffer of words: what a device reads in a single copy.

A pure function of the plan; the buffer's parts lie at places that follow from the step's shape alone, so that a graph
captured for a shape finds them again. Knows nothing about devices, weights or pools.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.engine.forward_batch import check_sequence
from shared.engine.sampling_lines import StepLines, asks_for_more
from shared.engine.step_plan import IN_FLIGHT, ScheduledSequence, StepPlan
from shared.kv.layout import LayerGroup

Words = npt.NDArray[np.int32]
ROW_MULTIPLE = 16
"""Rows of a step are padded to a multiple of this: one specialization of kernels, and matrix products like it."""
ALIGN_WORDS = 4
"""Parts begin at 16 bytes."""
SPECIAL: tuple[tuple[str, type[np.generic], float], ...] = (
    ("min_p", np.float64, 0),
    ("repetition", np.float32, 1),
    ("presence", np.float32, 0),
    ("frequency", np.float32, 0),
    ("penalty_line", np.int32, -1),
    ("bias_line", np.int32, -1),
    ("mask_line", np.int32, -1),
    ("scored", np.int32, -1),
    ("top", np.int32, 0),
)
"""Parts that most steps have nothing to say in, and what they hold then."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """How many of everything a step's buffer holds, padding included."""

    num_rows: int
    num_seqs: int
    num_logits: int
    num_groups: int
    max_blocks: int  # columns of the block tables sent; 0 = none are


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the buffer."""

    begin: int  # in words
    words: int
    dtype: type[np.generic]
    shape: tuple[int, ...]


def parts_of(shape: StepShape) -> dict[str, Part]:
    """The places of a buffer's parts. Those of draws are first, so that the number of logits tells where they are, and
    block tables are last: their size moves nothing else.

    token_ids      [num_rows]      0 where in flight or padding
    token_source   [num_rows]      row of the last step's samples a token in flight comes from; -1 = token_ids has it
    positions      [num_rows]      absolute
    cu_seqlens_q   [num_seqs + 1]  padding sequences have no rows
    seq_lens       [num_seqs]      tokens visible to each sequence's last row; 0 for padding
    logit_rows     [num_logits]    row 0 for padding
    temperature, top_k, top_p, seed, draw_position  [num_logits]; greedy for padding and for rows that are scored
    min_p, repetition, presence, frequency  [num_logits]
    penalty_line, bias_line, mask_line  [num_logits]  the row's line of the sampling state; -1 = none
    scored         [num_logits]    the token whose log-probability is told; -1 = the one drawn
    top            [num_logits]    how many of the most likely tokens are told
    slots.<g>      [num_rows]      of group g; -1 = do not store
    tables.<g>     [num_seqs, max_blocks]
    """
    rows, seqs, logits = shape.num_rows, shape.num_seqs, shape.num_logits
    wanted: list[tuple[str, type[np.generic], tuple[int, ...]]] = [
        ("seed", np.int64, (logits,)),
        ("draw_position", np.int64, (logits,)),
        ("temperature", np.float32, (logits,)),
        ("top_p", np.float64, (logits,)),
        ("top_k", np.int32, (logits,)),
        *((name, dtype, (logits,)) for name, dtype, _ in SPECIAL),
        ("logit_rows", np.int32, (logits,)),
        ("token_ids", np.int32, (rows,)),
        ("token_source", np.int32, (rows,)),
        ("positions", np.int32, (rows,)),
        ("cu_seqlens_q", np.int32, (seqs + 1,)),
        ("seq_lens", np.int32, (seqs,)),
    ]
    wanted += [(f"slots.{g}", np.int32, (rows,)) for g in range(shape.num_groups)]
    wanted += [(f"tables.{g}", np.int32, (seqs, shape.max_blocks)) for g in range(shape.num_groups)]
    parts, begin = {}, 0
    for name, dtype, size in wanted:
        words = int(np.prod(size)) * np.dtype(dtype).itemsize // 4
        parts[name] = Part(begin, words, dtype, size)
        begin += -(-words // ALIGN_WORDS) * ALIGN_WORDS
    return parts


def buffer_words(shape: StepShape) -> int:
    """Words of a buffer of that shape."""
    last = list(parts_of(shape).values())[-1]
    return last.begin + last.words


def views(buffer: Words, parts: Mapping[str, Part]) -> dict[str, npt.NDArray[np.generic]]:
    """The parts of `buffer`, to be written."""
    return {
        name: buffer[part.begin : part.begin + part.words].view(part.dtype).reshape(part.shape)
        for name, part in parts.items()
    }


def decode_shape(plan: StepPlan, groups: Sequence[LayerGroup], max_len: int, bucket: int) -> StepShape:
    """The shape of a decode step of `bucket` sequences, its block tables sent. No sequence is longer than `max_len`."""
    longest = max(sequence.start + 1 for sequence in plan.sequences)
    needed = max(group.blocks_for(longest) for group in groups)
    most = min(group.blocks_for(max_len) for group in groups)
    return StepShape(bucket, bucket, bucket, len(groups), min(1 << (needed - 1).bit_length(), most))


def mixed_shape(plan: StepPlan, num_groups: int) -> StepShape:
    """The shape of any other step. Block tables are not sent: attention is planned on the host, and brings them."""
    num_logits = sum(sequence.num_logits for sequence in plan.sequences)
    return StepShape(padded(plan.num_tokens), len(plan.sequences), padded(num_logits), num_groups, 0)


def padded(count: int) -> int:
    """Rows that `count` rows are padded to."""
    return -(-count // ROW_MULTIPLE) * ROW_MULTIPLE


def is_decode(plan: StepPlan) -> bool:
    """True for a step of one row and one draw a sequence: what graphs are captured for."""
    return all(len(s.token_ids) == 1 and s.num_logits == 1 and s.sampling is not None for s in plan.sequences)


def decode_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Sequence counts decode steps are padded to: 1, 2, 4, 8, every 8 to 32, every 16 to 128, every 32 beyond.

    Up to the first that holds `max_num_seqs`.
    """
    buckets = [1]
    while buckets[-1] < max_num_seqs:
        last = buckets[-1]
        buckets.append(2 * last if last < 8 else last + (8 if last < 32 else 16 if last < 128 else 32))
    return tuple(buckets)


class BatchWriter:
    """Fills one buffer again and again. Remembers which block tables stand in it, so that unchanged rows cost little.

    Not for two threads at once.

    Args:
        num_blocks: per group the pool's blocks; kernels do not look where they read and write, so it is done here.
    """

    def __init__(self, buffer: Words, groups: Sequence[LayerGroup], num_blocks: Sequence[int], vocab_size: int) -> None:
        self._buffer = buffer
        self._groups = tuple(groups)
        self._num_blocks = tuple(num_blocks)
        self._vocab_size = vocab_size
        self._shape: StepShape | None = None
        self._parts: dict[str, npt.NDArray[np.generic]] = {}
        self._tables: list[list[tuple[int, ...]]] = []
        self._nothing_special = False  # is what the parts of `SPECIAL` hold

    def write(
        self, plan: StepPlan, shape: StepShape, samples: Mapping[str, tuple[int, int]], lines: StepLines | None = None
    ) -> None:
        """Lay the plan out.

        Args:
            samples: per sequence the first row and the number of the tokens the last step drew for it.
            lines: of sequences with penalties, biases and grammars; None: no row asks for more than temperature,
                top_k and top_p.

        Raises:
            ValueError: the plan breaks its contract, waits for a token that the last step did not draw, or names a
                token outside the vocabulary, be it only to score it, or a block outside the pool.
        """
        if shape != self._shape:
            self._shape = shape
            self._parts = views(self._buffer, parts_of(shape))
            self._tables = [[()] * shape.num_seqs for _ in self._groups]
            self._nothing_special = False
        for sequence in plan.sequences:
            check_sequence(sequence, self._groups)
            if sequence.scored and not 0 <= min(sequence.scored) <= max(sequence.scored) < self._vocab_size:
                raise ValueError(f"{sequence.seq_id} scores a token id outside [0, {self._vocab_size})")
        self._write_rows(plan, samples)
        self._write_sampling(plan)
        self._write_special(plan, lines)
        for g, group in enumerate(self._groups):
            self._write_group(plan, g, group)

    def _write_rows(self, plan: StepPlan, samples: Mapping[str, tuple[int, int]]) -> None:
        token_ids: list[int] = []
        sources: list[int] = []
        ends = [0]
        for sequence in plan.sequences:
            count = len(sequence.token_ids)
            ends.append(ends[-1] + count)
            if sequence.token_ids[-1] != IN_FLIGHT:
                token_ids.extend(sequence.token_ids)
                sources.extend([-1] * count)
                continue
            first, drawn = samples.get(sequence.seq_id, (0, 0))
            for i, token_id in enumerate(sequence.token_ids):
                if token_id == IN_FLIGHT and count - i > drawn:
                    raise ValueError(f"step {plan.step}: {sequence.seq_id} waits for a token that no step samples")
                token_ids.append(0 if token_id == IN_FLIGHT else token_id)
                sources.append(first + drawn - (count - i) if token_id == IN_FLIGHT else -1)
        if max(token_ids) >= self._vocab_size or min(token_ids) < 0:
            raise ValueError(f"step {plan.step} has a token id outside [0, {self._vocab_size})")
        self._fill("token_ids", token_ids, 0)
        self._fill("token_source", sources, -1)
        starts = [sequence.start for sequence in plan.sequences]
        counts = np.diff(ends)
        rows = np.arange(ends[-1]) - np.repeat(ends[:-1], counts) + np.repeat(starts, counts)
        self._fill("positions", rows, 0)
        self._fill("cu_seqlens_q", ends, ends[-1])
        self._fill("seq_lens", starts + counts, 0)

    def _write_sampling(self, plan: StepPlan) -> None:
        logit_rows: list[int] = []
        draws: list[tuple[float, float, int, int, int]] = []
        end = 0
        for sequence in plan.sequences:
            count, num_logits, params = len(sequence.token_ids), sequence.num_logits, sequence.sampling
            end += count
            logit_rows.extend(range(end - num_logits, end))
            idle = num_logits if params is None else len(sequence.scored)
            if idle:
                draws.extend([_IDLE] * idle)
            if params is None:
                continue
            seed = params.seed & (2**64 - 1)
            seed -= (seed >> 63) << 64  # the same bits, signed
            last = sequence.start + count
            for position in range(last - num_logits + idle + 1, last + 1):
                draws.append((params.temperature, params.top_p, params.top_k, seed, position))
        columns = list(zip(*draws, strict=True)) if draws else [()] * 5
        self._fill("logit_rows", logit_rows, 0)
        names = ("temperature", "top_p", "top_k", "seed", "draw_position")
        for name, column, padding in zip(names, columns, _IDLE, strict=True):
            self._fill(name, column, padding)

    def _write_special(self, plan: StepPlan, lines: StepLines | None) -> None:
        if lines is None and self._nothing_special:
            return
        self._nothing_special = lines is None
        for name, _, nothing in SPECIAL:
            self._parts[name].fill(nothing)
        if lines is None:
            return
        rows: list[int] = []
        said: list[tuple[float, ...]] = []
        first = 0
        for i, sequence in enumerate(plan.sequences):
            if asks_for_more(sequence):
                own = list(_special_rows(sequence, i, lines))
                rows.extend(range(first, first + len(own)))
                said.extend(own)
            first += sequence.num_logits
        for (name, _, _), column in zip(SPECIAL, zip(*said, strict=True), strict=False):
            self._parts[name][rows] = column

    def _write_group(self, plan: StepPlan, g: int, group: LayerGroup) -> None:
        tables, known = self._parts[f"tables.{g}"], self._tables[g]
        columns = tables.shape[1]
        size = group.block_size
        slots: list[int] = []
        for i, sequence in enumerate(plan.sequences):
            table = sequence.block_tables[g]
            if known[i] != table:
                if not 0 <= min(table) <= max(table) < self._num_blocks[g]:
                    raise ValueError(f"{sequence.seq_id} names a block outside [0, {self._num_blocks[g]})")
                # a table may have blocks for tokens of later steps
                tables[i, : len(table)] = table[:columns]
                tables[i, len(table) :] = 0
                known[i] = table
            for position in range(sequence.start, sequence.start + len(sequence.token_ids)):
                stored = position >= sequence.stored_from
                slots.append(table[position // size] * size + position % size if stored else -1)
        self._fill(f"slots.{g}", slots, -1)

    def _fill(self, name: str, values: Sequence[float] | npt.NDArray[np.generic], padding: float) -> None:
        part = self._parts[name]
        part[: len(values)] = values
        part[len(values) :] = padding


_IDLE = (0.0, 1.0, 0, 0, 0)
"""Temperature, top_p, top_k, seed and position of a row that nothing is drawn from."""
_NOTHING = tuple(nothing for _, _, nothing in SPECIAL)


def _special_rows(sequence: ScheduledSequence, index: int, lines: StepLines) -> Iterator[tuple[float, ...]]:
    """What `SPECIAL` holds of a sequence's rows of logits."""
    for token_id in sequence.scored:
        yield (*_NOTHING[:-2], token_id, max(sequence.score_top, 0))
    params = sequence.sampling
    if params is None:
        yield from [_NOTHING] * (sequence.num_logits - len(sequence.scored))
        return
    penalty, bias, mask = (found.get(index, -1) for found in (lines.penalties, lines.biases, lines.masks))
    shared = (params.min_p, params.repetition_penalty, params.presence_penalty, params.frequency_penalty, penalty, bias)
    for row in range(sequence.num_sampled):
        yield (*shared, mask if mask < 0 else mask + row, -1, max(params.logprobs, 0))
