"""The steps that a worker times at its start, for its step-time model. Without torch.

Workers that start together are timed one after the other, or each would measure the other's work.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shared.contracts.errors import Internal
from shared.contracts.sampling import SamplingParams
from shared.engine.batcher import Batcher
from shared.engine.engine import Engine
from shared.engine.sequence_spec import SequenceSpec
from shared.engine.sequence_update import SequenceUpdate
from shared.engine.step_fit import StepTimeFit, fastest, fit_all
from shared.engine.step_time import StepObservation
from shared.kv.layout import PoolLayout

_SMALL = ((1, 1), (1, 8), (16, 1), (32, 1), (1, 32), (128, 1))
SHAPES = (*_SMALL, (512, 1), *_SMALL, *_SMALL, (512, 1))
"""(tokens, sequences) of the timed steps, which sample where a sequence has one token; of repeats the fastest counts.
The small ones find the floor, the large one what context costs; what exceeds the budget or the pool is left out."""
MOST_S = 1.5
"""A step that would go beyond this is not timed; running steps refine the model anyway."""
WAIT_S = 4.0
"""How long a worker waits for its turn to be timed; then it is timed beside the others."""
STEP_TIMEOUT_S = 120.0
LEAST_BANDWIDTH = 4e9
"""Bytes a second at which KV is read at least: bounds what a position of context can cost."""

Listen = Callable[[Callable[[list[SequenceUpdate]], None]], None]


@dataclass(slots=True)
class Calibration:
    """Runs steps through an engine nobody else uses yet; whoever sees its steps end adds them to `observed`.

    Args:
        listen: sets who is told of the engine's updates from now on.
        max_tokens: of a step, and of a sequence.
        samples: False: the model has no output head.
    """

    engine: Engine
    listen: Listen
    layout: PoolLayout
    max_tokens: int
    max_num_seqs: int
    samples: bool
    observed: list[StepObservation] = field(default_factory=list)
    _number: int = 0

    def warm(self) -> None:
        """Run one step that does not count: it pays for what is made lazily. Raises Internal: it failed or hangs."""
        self._step(1, 1)
        self.observed.clear()

    def run(self, shapes: Sequence[tuple[int, int]] = SHAPES) -> None:
        """Time steps, no longer than MOST_S. Raises Internal: one failed or did not end."""
        for each, num_seqs in shapes:
            spent_s = sum(o.duration_s for o in self.observed)
            if not self._fits(each, num_seqs) or (spent_s and spent_s + self._guess_s(each * num_seqs) > MOST_S):
                continue
            self._step(each, num_seqs)

    def fit(self) -> StepTimeFit:
        """What was observed."""
        bytes_a_token = sum(group.token_bytes for group in self.layout.groups)
        return fit_all(fastest(self.observed), most_context_s=bytes_a_token / LEAST_BANDWIDTH)

    def _fits(self, each: int, num_seqs: int) -> bool:
        """Whether so many sequences can be computed in one step, with room for each to grow."""
        blocks = num_seqs * (-(-each // self.layout.groups[0].block_size) + 1)
        enough = all(blocks <= total for total in self.layout.num_blocks)
        return enough and each * num_seqs <= self.max_tokens and num_seqs <= self.max_num_seqs

    def _guess_s(self, num_tokens: int) -> float:
        """Seconds a step of so many tokens takes, in proportion to the largest yet: the floor cannot be told yet."""
        largest = max(self.observed, key=lambda o: o.num_tokens)
        return largest.duration_s * max(1.0, num_tokens / largest.num_tokens)

    def _step(self, each: int, num_seqs: int) -> None:
        self._number += 1
        sampling, computes = SamplingParams(max_tokens=1), each > 1 or not self.samples
        self._run_to_end(
            [
                SequenceSpec(f"warm-{self._number}-{i}", (1,) * each, each, sampling, compute_only=computes)
                for i in range(num_seqs)
            ]
        )

    def _run_to_end(self, specs: list[SequenceSpec]) -> None:
        """Compute sequences in as few steps as possible and let go of them."""
        waiting, failed, ended = {spec.seq_id for spec in specs}, list[str](), threading.Event()

        def on_updates(updates: list[SequenceUpdate]) -> None:
            for update in updates:
                waiting.discard(update.seq_id)
                if update.finish == "error":
                    failed.append(update.detail)
            if not waiting:
                ended.set()

        def reserve(batcher: Batcher) -> None:
            for spec in specs:
                batcher.reserve(spec)

        def cancel(batcher: Batcher) -> None:
            for spec in specs:
                batcher.cancel(spec.seq_id)

        self.listen(on_updates)
        try:
            self.engine.call(reserve).result(STEP_TIMEOUT_S)
            if not ended.wait(STEP_TIMEOUT_S) or failed:
                raise Internal(f"the first steps failed: {', '.join(failed) or 'no answer'}")
            self.engine.call(cancel).result(STEP_TIMEOUT_S)
        finally:
            self.listen(lambda updates: None)


@contextlib.contextmanager
def timed_alone(folder: Path) -> Iterator[None]:
    """Hold the machine's turn at timing steps, or go on without it after `WAIT_S`.

    The turn is a lock on the pools' folder itself: it leaves no file, and ends with its process.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + WAIT_S
        while not _locked(fd) and time.monotonic() < deadline:
            time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
