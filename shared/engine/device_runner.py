"""Runs planned steps on a device: one copy in, launches, one copy out. The host waits only to read a step's tokens.

A step is launched while the one before still runs: its tokens in flight are read on the device, where the step before
leaves them. Rows that were not finite are found when a step's tokens are read; whoever waited for their token is told.
A step with grammars is launched up to its logits, and draws once its masks are there.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from triton.errors import TritonError

from kernels.arguments import KernelArgumentError
from kernels.sampling.triton_rows import MAX_BIASES
from shared.contracts.errors import Internal
from shared.engine.decode_graphs import DecodeGraphs
from shared.engine.device_batch import BatchWriter, StepShape, buffer_words
from shared.engine.device_compute import DeviceCompute
from shared.engine.device_masks import DeviceMasks, FoundMasks, StepBefore
from shared.engine.device_results import DeviceResults
from shared.engine.device_stream import DeviceStream, Mark
from shared.engine.engine_parts import PendingStep
from shared.engine.sampling_lines import PlainRows, SamplingLines, StepLines, wants_logprobs
from shared.engine.step_plan import StepOutput, StepPlan
from shared.grammar.row_masks import RowMasks
from shared.kv.device_memory import OutOfDeviceMemory

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
        self._masks = DeviceMasks(masks, compute.limits.max_num_seqs, compute.model.config.vocab_size)
        self._lines = SamplingLines(compute.limits.max_num_seqs, compute.model.config.vocab_size, MAX_BIASES)
        self._plain = PlainRows()
        self._slots = [self._slot(compute.inputs.numel()) for _ in range(compute.limits.depth + 2)]
        self._turns = 0  # of the slots
        self._before: StepBefore | None = None
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
            Internal: the plan breaks its contract, is larger than the limits, or could not be launched.
            DeviceLost: also by what is returned.
        """
        start = time.perf_counter()
        slot = self._slots[self._turns % len(self._slots)]
        self._turns += 1  # also where the launch fails half-way: the device may still read what was written
        slot.free.acquire()
        try:
            with failures(self._stream, f"before step {plan.step}"):
                mark, masks = self._launch(plan, slot)
        except BaseException:
            self._lines.forget(plan)
            slot.free.release()
            raise
        gone = masks.gone if masks is not None else frozenset[str]()
        self._before = StepBefore(_rows_drawn(plan), slot.results, mark.wait, gone)
        return partial(self._read, plan, slot, mark, start, masks.stuck if masks is not None else frozenset())

    def zero_blocks(self, blocks: Sequence[tuple[int, int]]) -> Callable[[], None]:
        """Launch overwriting (group, block id) with zeros, before any step launched later; what is returned waits.

        Raises:
            DeviceLost: also by what is returned.
        """
        with failures(self._stream, "zeroing blocks"), self._stream.use(), torch.inference_mode():
            for group, pool in enumerate(self._compute.pools):
                pool.zero([block_id for index, block_id in blocks if index == group])
            mark = self._stream.mark()
        return partial(self._wait, mark)

    @torch.inference_mode()
    def _launch(self, plan: StepPlan, slot: _Slot) -> tuple[Mark, FoundMasks | None]:
        lines: StepLines | None = None
        try:
            if not plan.sequences:
                raise ValueError(f"step {plan.step} is empty")
            shape = self._compute.shape_of(plan)
            if not self._plain.all_of(plan.sequences):
                lines = self._lines.assign(plan)
                self._masks.place(plan, lines)
            slot.writer.write(plan, shape, self._before.rows if self._before is not None else {}, lines)
        except ValueError as exc:
            raise Internal(str(exc)) from exc
        masks: FoundMasks | None = None
        with self._stream.use():
            self._send(slot.inputs[: buffer_words(shape)], lines)
            draw = self._compute_logits(plan, shape)
            if lines is not None and lines.masks:
                masks = self._masks.find(plan, lines, self._before)
                self._compute.sampling.write_masks(masks.bits, self._stream)
            draw()
            slot.results.fetch(self._compute, plan, lines is not None and wants_logprobs(plan.sequences))
            return self._stream.mark(), masks

    def _send(self, inputs: Tensor, lines: StepLines | None) -> None:
        for text in lines.texts if lines is not None else ():
            self._compute.sampling.write(text, self._stream)
        self._compute.inputs[: inputs.shape[0]].copy_(inputs, non_blocking=True)

    def _compute_logits(self, plan: StepPlan, shape: StepShape) -> Callable[[], None]:
        """Launch a step up to its logits; what is returned launches the draws from them."""
        compute, graphs = self._compute, self._graphs
        if shape.max_blocks:
            compute.spread_tables(shape)
            if graphs is not None:
                graphs.compute(shape.num_seqs)
                return partial(graphs.draw, shape.num_seqs)
        logits = compute.decode(shape.num_seqs) if shape.max_blocks else compute.mixed(plan, shape)
        self._record(plan, logits)
        return partial(compute.draw, logits, sum(row.num_logits for row in plan.sequences))

    def _read(self, plan: StepPlan, slot: _Slot, mark: Mark, start: float, stuck: frozenset[int]) -> StepOutput:
        """Wait for a step and read its tokens."""
        before, self._bad = self._bad, frozenset(sequence.seq_id for sequence in plan.sequences)
        try:
            with failures(self._stream, f"in step {plan.step}"):
                mark.wait()
            found = slot.results.read(plan, before, stuck)
        finally:
            slot.free.release()
        bad = found.bad | stuck
        self._bad = frozenset(plan.sequences[i].seq_id for i in bad)
        duration_s = time.perf_counter() - start
        return StepOutput(plan.step, found.sampled, bad, duration_s, found.logprobs, stuck - found.bad)

    def _wait(self, mark: Mark) -> None:
        with failures(self._stream, "zeroing blocks"):
            mark.wait()

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
def failures(stream: DeviceStream, when: str) -> Iterator[None]:
    """Map what libraries raise. A device that still answers is not lost: what failed ends alone.

    Raises:
        DeviceLost: the device has failed.
        OutOfDeviceMemory: it has no memory for what was to be launched.
        Internal: a launch was refused.
    """
    try:
        yield
    except torch.OutOfMemoryError as exc:
        raise OutOfDeviceMemory(f"the GPU has no memory {when}: {exc}") from exc
    except (RuntimeError, TritonError, KernelArgumentError) as exc:
        if isinstance(exc, torch.AcceleratorError) or not stream.answers():
            raise DeviceLost(f"the device failed {when}: {exc}") from exc
        raise Internal(f"{type(exc).__name__} {when}: {exc}") from exc


def _rows_drawn(plan: StepPlan) -> dict[str, tuple[int, int]]:
    """Per sequence that samples its first row drawn from and how many it has."""
    rows: dict[str, tuple[int, int]] = {}
    row = 0
    for sequence in plan.sequences:
        row += sequence.num_logits
        if sequence.num_sampled:
            rows[sequence.seq_id] = (row - sequence.num_sampled, sequence.num_sampled)
    return rows
