"""Runs planned steps on a device: one copy in, launches, one copy out. The host waits only to read a step's tokens.

A step is launched while the one before still runs: its tokens in flight are read on the device, where the step before
leaves them. Rows that were not finite are found when a step's tokens are read; whoever waited for their token is told.
A grammar's mask needs the tokens before it on the host: sequences that have one come without tokens in flight.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kernels.sampling.triton_logprobs import NO_ID
from kernels.sampling.triton_rows import MAX_BIASES
from shared.contracts.errors import Internal
from shared.contracts.logprobs import TokenLogprob
from shared.engine.decode_graphs import DecodeGraphs
from shared.engine.device_batch import BatchWriter, buffer_words
from shared.engine.device_compute import MAX_TOP, DeviceCompute
from shared.engine.device_stream import DeviceStream, Mark
from shared.engine.engine_parts import PendingStep
from shared.engine.sampler import constrained_rows
from shared.engine.sampling_lines import SamplingLines, StepLines, wants_logprobs
from shared.engine.step_plan import IN_FLIGHT, ScheduledSequence, StepOutput, StepPlan
from shared.grammar.row_masks import Bits, RowMasks

log = logging.getLogger("baton.worker")

RecordLogits = Callable[[str, int, Tensor], None]
"""Called as (seq_id, absolute position of the row, [vocab_size] logits): for proofs; the host then waits in a step."""


class DeviceLost(Internal):
    """The device failed: nothing more can be computed in this process."""


@dataclass(frozen=True, slots=True)
class _Told:
    """Host memory of a step's log-probabilities."""

    own: Tensor  # [most logits] float32
    ids: Tensor  # [most logits, MAX_TOP] int32
    values: Tensor  # [most logits, MAX_TOP] float32

    def of(self, row: int, top: int) -> TokenLogprob:
        ids, values = self.ids[row, :top].tolist(), self.values[row, :top].tolist()
        best = tuple((i, value) for i, value in zip(ids, values, strict=True) if i != NO_ID)
        return TokenLogprob(float(self.own[row]), best)


def _told_in(words: Tensor, rows: int) -> _Told:
    """Laid out in [(1 + 2 MAX_TOP) rows] int32."""
    ids, values = words[rows:].view(2, rows, MAX_TOP)
    return _Told(words[:rows].view(torch.float32), ids, values.view(torch.float32))


@dataclass(slots=True)
class _Slot:
    """Host memory of one step in flight."""

    inputs: Tensor  # [words] int32
    outputs: Tensor  # [2, most logits] int32: tokens, and 1 where their row was finite
    told: _Told
    writer: BatchWriter
    free: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(1))


class DeviceRunner:
    """Steps of one model over one pool. `run` is for one thread, what it returns for one other, in the same order.

    Args:
        graphs: whether decode steps are captured and replayed; without, every kernel is launched by itself.
        masks: tells what grammars allow; without it no sequence may have one.
    """

    def __init__(
        self,
        compute: DeviceCompute,
        stream: DeviceStream,
        graphs: DecodeGraphs | None = None,
        record_logits: RecordLogits | None = None,
        masks: RowMasks | None = None,
    ) -> None:
        self._compute = compute
        self._stream = stream
        self._graphs = graphs
        self._record_logits = record_logits
        self._masks = masks
        self._lines = SamplingLines(compute.limits.max_num_seqs, compute.model.config.vocab_size, MAX_BIASES)
        self._slots = [self._slot(compute.inputs.numel()) for _ in range(compute.limits.depth + 2)]
        self._turns = 0  # of the slots
        self._samples: dict[str, tuple[int, int]] = {}  # of the last step launched
        self._bad: frozenset[str] = frozenset()  # sequences of the last step read

    def _slot(self, words: int) -> _Slot:
        inputs = self._stream.host_buffer(words)
        compute = self._compute
        rows = compute.limits.max_logits
        outputs = self._stream.host_buffer(2 * rows).view(2, rows)
        told = _told_in(self._stream.host_buffer((1 + 2 * MAX_TOP) * rows), rows)
        num_blocks = [pool.values.shape[0] for pool in compute.pools]
        writer = BatchWriter(inputs.numpy(), compute.groups, num_blocks, compute.model.config.vocab_size)
        return _Slot(inputs, outputs, told, writer)

    def run(self, plan: StepPlan) -> PendingStep:
        """Launch one step.

        Raises:
            Internal: the plan breaks its contract, or is larger than the limits.
            DeviceLost: also by what is returned.
        """
        start = time.perf_counter()
        slot = self._slots[self._turns % len(self._slots)]
        self._turns += 1  # also where the launch fails half-way: the device may still read what was written
        slot.free.acquire()
        try:
            with _lost(f"before step {plan.step}"):
                mark, stuck = self._launch(plan, slot)
        except BaseException:
            self._lines.forget(plan)
            slot.free.release()
            raise
        self._samples = _rows_drawn(plan)
        return partial(self._read, plan, slot, mark, start, stuck)

    def zero_blocks(self, blocks: Sequence[tuple[int, int]]) -> Callable[[], None]:
        """Launch overwriting (group, block id) with zeros, before any step launched later; what is returned waits.

        Raises:
            DeviceLost: also by what is returned.
        """
        with _lost("zeroing blocks"), self._stream.use(), torch.inference_mode():
            for group, block_id in blocks:
                self._compute.pools[group].zero(block_id)
            mark = self._stream.mark()
        return partial(_wait, mark)

    @torch.inference_mode()
    def _launch(self, plan: StepPlan, slot: _Slot) -> tuple[Mark, frozenset[int]]:
        """Also the sequences that cannot go on under their grammars: what they draw is nobody's."""
        try:
            if not plan.sequences:
                raise ValueError(f"step {plan.step} is empty")
            shape = self._compute.shape_of(plan)
            lines = self._lines.assign(plan)
            masks, stuck = self._mask(plan, lines)
            slot.writer.write(plan, shape, self._samples, lines)
        except ValueError as exc:
            raise Internal(str(exc)) from exc
        words = buffer_words(shape)
        with self._stream.use():
            for text in lines.texts:
                self._compute.sampling.write(text, self._stream)
            if masks:
                self._compute.sampling.write_masks(np.concatenate(masks), self._stream)
            self._compute.inputs[:words].copy_(slot.inputs[:words], non_blocking=True)
            if not shape.max_blocks:
                self._record(plan, self._compute.mixed(plan, shape))
            else:
                self._compute.spread_tables(shape)
                if self._graphs is not None:
                    self._graphs.replay(shape.num_seqs)
                else:
                    self._record(plan, self._compute.decode(shape.num_seqs))
            self._copy_out(plan, slot)
            return self._stream.mark(), stuck

    def _mask(self, plan: StepPlan, lines: StepLines) -> tuple[list[Bits], frozenset[int]]:
        """The masks of the step, whose lines are put down, and the sequences that cannot go on."""
        rows = constrained_rows(plan.sequences, [row.token_ids for row in plan.sequences], frozenset())
        if not rows:
            return [], frozenset()
        for row in rows:
            if IN_FLIGHT in plan.sequences[row.index].token_ids:
                raise ValueError(f"step {plan.step}: {row.seq_id} has a grammar and a token in flight")
        if self._masks is None:
            raise ValueError(f"step {plan.step}: {rows[0].seq_id} has a grammar, and nothing here reads it")
        found = self._masks.now(rows)
        for reason in found.faults.values():
            log.warning("a constrained output ends: %s", reason)
        count = 0
        for index, bits in found.bits.items():
            lines.masks[index] = count
            count += len(bits)
        if count > self._compute.limits.max_num_seqs:
            raise ValueError(f"step {plan.step}: {count} masks, at most {self._compute.limits.max_num_seqs} have room")
        return list(found.bits.values()), frozenset(found.faults)

    def _copy_out(self, plan: StepPlan, slot: _Slot) -> None:
        compute, told = self._compute, slot.told
        slot.outputs.copy_(compute.results, non_blocking=True)
        if wants_logprobs(plan.sequences):
            num_logits = sum(sequence.num_logits for sequence in plan.sequences)
            pairs = (
                (told.own, compute.drawn.logprobs),
                (told.ids, compute.top.ids),
                (told.values, compute.top.logprobs),
            )
            for to, source in pairs:
                to[:num_logits].copy_(source[:num_logits], non_blocking=True)

    def _read(self, plan: StepPlan, slot: _Slot, mark: Mark, start: float, stuck: frozenset[int]) -> StepOutput:
        """Wait for a step and read its tokens."""
        before, self._bad = self._bad, frozenset(sequence.seq_id for sequence in plan.sequences)
        sampled: list[tuple[int, ...]] = []
        bad: set[int] = set()
        logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
        try:
            with _lost(f"in step {plan.step}"):
                mark.wait()
            num_logits = sum(sequence.num_logits for sequence in plan.sequences)
            tokens, finite = slot.outputs[:, :num_logits].tolist()
            row = 0
            for i, sequence in enumerate(plan.sequences):
                end = row + sequence.num_logits
                lost = sequence.token_ids[-1] == IN_FLIGHT and sequence.seq_id in before
                if lost or not all(finite[row:end]):
                    bad.add(i)
                is_sound = i not in bad and i not in stuck
                sampled.append(tuple(tokens[end - sequence.num_sampled : end]) if is_sound else ())
                if is_sound and (found := _logprobs_of(sequence, row, slot.told)):
                    logprobs[i] = found
                row = end
        finally:
            slot.free.release()
        stuck -= bad
        bad |= stuck
        self._bad = frozenset(plan.sequences[i].seq_id for i in bad)
        return StepOutput(plan.step, tuple(sampled), frozenset(bad), time.perf_counter() - start, logprobs, stuck)

    def _record(self, plan: StepPlan, logits: Tensor) -> None:
        if self._record_logits is None:
            return
        row = 0
        for sequence in plan.sequences:
            end = sequence.start + len(sequence.token_ids)
            for i in range(sequence.num_logits):
                self._record_logits(sequence.seq_id, end - sequence.num_logits + i, logits[row].float().cpu())
                row += 1


@contextlib.contextmanager
def _lost(when: str) -> Iterator[None]:
    try:
        yield
    except torch.AcceleratorError as exc:
        raise DeviceLost(f"the device failed {when}: {exc}") from exc


def _wait(mark: Mark) -> None:
    with _lost("zeroing blocks"):
        mark.wait()


def _logprobs_of(sequence: ScheduledSequence, row: int, told: _Told) -> tuple[TokenLogprob, ...]:
    """Those a sequence asked for: of its scored tokens, then of those sampled.

    Args:
        row: its first row of logits.
    """
    wanted = [sequence.score_top] * len(sequence.scored)
    top = -1 if sequence.sampling is None else sequence.sampling.logprobs
    wanted += [top] * sequence.num_sampled if top >= 0 else []
    return tuple(told.of(row + i, max(count, 0)) for i, count in enumerate(wanted))


def _rows_drawn(plan: StepPlan) -> dict[str, tuple[int, int]]:
    """Per sequence that samples its first row drawn from and how many it has."""
    rows: dict[str, tuple[int, int]] = {}
    row = 0
    for sequence in plan.sequences:
        row += sequence.num_logits
        if sequence.num_sampled:
            rows[sequence.seq_id] = (row - sequence.num_sampled, sequence.num_sampled)
    return rows
