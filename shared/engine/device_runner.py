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

from kernels.sampling.triton_rows import MAX_BIASES
from shared.contracts.errors import Internal
from shared.engine.decode_graphs import DecodeGraphs
from shared.engine.device_batch import BatchWriter, buffer_words
from shared.engine.device_compute import DeviceCompute
from shared.engine.device_results import DeviceResults
from shared.engine.device_stream import DeviceStream, Mark
from shared.engine.engine_parts import PendingStep
from shared.engine.sampler import constrained_rows
from shared.engine.sampling_lines import PlainRows, SamplingLines, StepLines, wants_logprobs
from shared.engine.step_plan import IN_FLIGHT, StepOutput, StepPlan
from shared.grammar.row_masks import Bits, RowMasks

log = logging.getLogger("baton.worker")

RecordLogits = Callable[[str, int, Tensor], None]
"""Called as (seq_id, absolute position of the row, [vocab_size] logits): for proofs; the host then waits in a step."""


class DeviceLost(Internal):
    """The device failed: nothing more can be computed in this process."""


@dataclass(slots=True)
class _Slot:
    """Host memory of one step in flight."""

    inputs: Tensor  # [words] int32
    results: DeviceResults
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
        self._plain = PlainRows()
        self._slots = [self._slot(compute.inputs.numel()) for _ in range(compute.limits.depth + 2)]
        self._turns = 0  # of the slots
        self._samples: dict[str, tuple[int, int]] = {}  # of the last step launched
        self._bad: frozenset[str] = frozenset()  # sequences of the last step read

    def _slot(self, words: int) -> _Slot:
        inputs = self._stream.host_buffer(words)
        compute = self._compute
        num_blocks = [pool.values.shape[0] for pool in compute.pools]
        writer = BatchWriter(inputs.numpy(), compute.groups, num_blocks, compute.model.config.vocab_size)
        return _Slot(inputs, DeviceResults(self._stream, compute.limits.max_logits), writer)

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
            for group, pool in enumerate(self._compute.pools):
                pool.zero([block_id for index, block_id in blocks if index == group])
            mark = self._stream.mark()
        return partial(_wait, mark)

    @torch.inference_mode()
    def _launch(self, plan: StepPlan, slot: _Slot) -> tuple[Mark, frozenset[int]]:
        """Also the sequences that cannot go on under their grammars: what they draw is nobody's."""
        lines: StepLines | None = None
        masks: list[Bits] = []
        stuck = frozenset[int]()
        try:
            if not plan.sequences:
                raise ValueError(f"step {plan.step} is empty")
            shape = self._compute.shape_of(plan)
            if not self._plain.all_of(plan.sequences):
                lines = self._lines.assign(plan)
                masks, stuck = self._mask(plan, lines)
            slot.writer.write(plan, shape, self._samples, lines)
        except ValueError as exc:
            raise Internal(str(exc)) from exc
        words = buffer_words(shape)
        with self._stream.use():
            for text in lines.texts if lines is not None else ():
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
            slot.results.fetch(self._compute, plan, lines is not None and wants_logprobs(plan.sequences))
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

    def _read(self, plan: StepPlan, slot: _Slot, mark: Mark, start: float, stuck: frozenset[int]) -> StepOutput:
        """Wait for a step and read its tokens."""
        before, self._bad = self._bad, frozenset(sequence.seq_id for sequence in plan.sequences)
        try:
            with _lost(f"in step {plan.step}"):
                mark.wait()
            found = slot.results.read(plan, before, stuck)
        finally:
            slot.free.release()
        bad = found.bad | stuck
        self._bad = frozenset(plan.sequences[i].seq_id for i in bad)
        duration_s = time.perf_counter() - start
        return StepOutput(plan.step, found.sampled, bad, duration_s, found.logprobs, stuck - found.bad)

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


def _rows_drawn(plan: StepPlan) -> dict[str, tuple[int, int]]:
    """Per sequence that samples its first row drawn from and how many it has."""
    rows: dict[str, tuple[int, int]] = {}
    row = 0
    for sequence in plan.sequences:
        row += sequence.num_logits
        if sequence.num_sampled:
            rows[sequence.seq_id] = (row - sequence.num_sampled, sequence.num_sampled)
    return rows
