"""Runs planned steps on a device: one copy in, launches, one copy out. The host waits only to read a step's tokens.

A step is launched while the one before still runs: its tokens in flight are read on the device, where the step before
leaves them. Rows that were not finite are found when a step's tokens are read; whoever waited for their token is told.
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

from shared.contracts.errors import Internal
from shared.engine.decode_graphs import DecodeGraphs
from shared.engine.device_batch import BatchWriter, buffer_words
from shared.engine.device_compute import DeviceCompute
from shared.engine.device_stream import DeviceStream, Mark
from shared.engine.engine import PendingStep
from shared.engine.step_plan import IN_FLIGHT, StepOutput, StepPlan

RecordLogits = Callable[[str, int, Tensor], None]
"""Called as (seq_id, absolute position of the row, [vocab_size] logits): for proofs; the host then waits in a step."""


class DeviceLost(Internal):
    """The device failed: nothing more can be computed in this process."""


@dataclass(slots=True)
class _Slot:
    """Host memory of one step in flight."""

    inputs: Tensor  # [words] int32
    outputs: Tensor  # [2, most logits] int32: tokens, and 1 where their row was finite
    writer: BatchWriter
    free: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(1))


class DeviceRunner:
    """Steps of one model over one pool. `run` is for one thread, what it returns for one other, in the same order.

    Args:
        graphs: whether decode steps are captured and replayed; without, every kernel is launched by itself.
    """

    def __init__(
        self,
        compute: DeviceCompute,
        stream: DeviceStream,
        graphs: DecodeGraphs | None = None,
        record_logits: RecordLogits | None = None,
    ) -> None:
        self._compute = compute
        self._stream = stream
        self._graphs = graphs
        self._record_logits = record_logits
        self._slots = [self._slot(compute.inputs.numel()) for _ in range(compute.limits.depth + 2)]
        self._turns = 0  # of the slots
        self._samples: dict[str, tuple[int, int]] = {}  # of the last step launched
        self._bad: frozenset[str] = frozenset()  # sequences of the last step read

    def _slot(self, words: int) -> _Slot:
        inputs = self._stream.host_buffer(words)
        outputs = self._stream.host_buffer(self._compute.drawn.numel()).view(self._compute.drawn.shape)
        compute = self._compute
        num_blocks = [pool.values.shape[0] for pool in compute.pools]
        writer = BatchWriter(inputs.numpy(), compute.groups, num_blocks, compute.model.config.vocab_size)
        return _Slot(inputs, outputs, writer)

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
                mark = self._launch(plan, slot)
        except BaseException:
            slot.free.release()
            raise
        self._samples = _rows_drawn(plan)
        return partial(self._read, plan, slot, mark, start)

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
    def _launch(self, plan: StepPlan, slot: _Slot) -> Mark:
        try:
            if not plan.sequences:
                raise ValueError(f"step {plan.step} is empty")
            shape = self._compute.shape_of(plan)
            slot.writer.write(plan, shape, self._samples)
        except ValueError as exc:
            raise Internal(str(exc)) from exc
        words = buffer_words(shape)
        with self._stream.use():
            self._compute.inputs[:words].copy_(slot.inputs[:words], non_blocking=True)
            if not shape.max_blocks:
                self._record(plan, self._compute.mixed(plan, shape))
            else:
                self._compute.spread_tables(shape)
                if self._graphs is not None:
                    self._graphs.replay(shape.num_seqs)
                else:
                    self._record(plan, self._compute.decode(shape.num_seqs))
            slot.outputs.copy_(self._compute.drawn, non_blocking=True)
            return self._stream.mark()

    def _read(self, plan: StepPlan, slot: _Slot, mark: Mark, start: float) -> StepOutput:
        """Wait for a step and read its tokens."""
        before, self._bad = self._bad, frozenset(sequence.seq_id for sequence in plan.sequences)
        try:
            with _lost(f"in step {plan.step}"):
                mark.wait()
            num_logits = sum(sequence.num_logits for sequence in plan.sequences)
            tokens, finite = slot.outputs[:, :num_logits].tolist()
        finally:
            slot.free.release()
        sampled: list[tuple[int, ...]] = []
        bad: set[int] = set()
        row = 0
        for i, sequence in enumerate(plan.sequences):
            end = row + sequence.num_logits
            lost = sequence.token_ids[-1] == IN_FLIGHT and sequence.seq_id in before
            if lost or not all(finite[row:end]):
                bad.add(i)
            sampled.append(tuple(tokens[row:end]) if sequence.sampling is not None and i not in bad else ())
            row = end
        self._bad = frozenset(plan.sequences[i].seq_id for i in bad)
        return StepOutput(plan.step, tuple(sampled), frozenset(bad), time.perf_counter() - start)

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
    """Per sequence that samples its first row among the logits and how many it has."""
    rows: dict[str, tuple[int, int]] = {}
    row = 0
    for sequence in plan.sequences:
        if sequence.sampling is not None and sequence.num_logits:
            rows[sequence.seq_id] = (row, sequence.num_logits)
        row += sequence.num_logits
    return rows
