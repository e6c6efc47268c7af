"""What a worker's engine tells in metrics, whichever role it has: its sequences, its blocks, its steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from shared.contracts.errors import BatonError, Cancelled, Forbidden, from_wire
from shared.contracts.messages import Refusal
from shared.engine.batcher_gauges import Gauges
from shared.engine.step_time import StepObservation
from shared.engine.worker_engine import WorkerEngine
from shared.kv.block_pool import BlockCounts
from shared.kv.layout import PoolLayout
from shared.telemetry import metric_names as names
from shared.telemetry.metrics import Metrics
from shared.telemetry.process_metrics import build_info

STEPS_TOGETHER = 32
_REASONS = {
    "context_length_exceeded": "never_fits",
    "NeverFits": "never_fits",  # of a prefill worker: its refusal ends no request
    "NoBlocks": "no_blocks",
    "NoSlot": "no_slot",
    "overloaded": "draining",
    "lower_term": "fenced",
    "older_attempt": "fenced",
    "already_starting": "fenced",
}


def expose_engine(
    metrics: Metrics, role: str, worker: str, core: WorkerEngine, gauges: Callable[[], Gauges | None]
) -> None:
    """Tell of `core` in every scrape from now on; `gauges` gives the newest snapshot of its batcher."""
    layout = core.facts.layout
    metrics.bind(engine=worker)
    build_info(metrics, role, numerics=core.facts.numerics, fake=core.facts.fake)
    group, num_blocks = layout.groups[0], layout.num_blocks[0]
    shape = {"block_size": str(group.block_size), "num_gpu_blocks": str(num_blocks), "cache_dtype": group.dtype}
    metrics.set(names.CACHE_CONFIG, 1, **shape)
    metrics.set(names.POOL_BYTES, layout.total_bytes)

    def read() -> None:
        if core.kernel_cpu_s is not None:
            metrics.total(names.KERNEL_CPU, core.kernel_cpu_s())
        if core.quick_rows is not None:
            for outcome, count in zip(("few", "many"), core.quick_rows(), strict=True):
                metrics.total(names.QUICK_HEAD_ROWS, count, outcome=outcome)
        now = gauges()
        if now is not None:
            metrics.set(names.RUNNING, now.running)
            metrics.set(names.WAITING, now.waiting)
            metrics.set(names.KV_USAGE, usage(now.blocks))
            metrics.set(names.HEADROOM, headroom_bytes(layout, now.blocks))
            if role == "decode":
                metrics.total(names.NUM_PREEMPTIONS, now.preemptions)
                metrics.total(names.SPEC_DRAFTS, now.drafts)
                metrics.total(names.SPEC_DRAFTED, now.drafted)
                metrics.total(names.SPEC_ACCEPTED, now.accepted)

    steps = _StepTally(metrics)
    core.on_step = steps.add
    metrics.before_scrape(steps.enter)
    metrics.before_scrape(read)


class _StepTally:
    """Steps wait here to be entered together: alone, between a step's kernels, each would find no cache warm."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._waiting: deque[StepObservation] = deque()

    def add(self, step: StepObservation) -> None:
        """On the planner thread."""
        self._waiting.append(step)
        if len(self._waiting) >= STEPS_TOGETHER:
            self.enter()

    def enter(self) -> None:
        """On any thread."""
        steps = list[StepObservation]()
        with suppress(IndexError):  # another thread may be at it too
            while self._waiting:
                steps.append(self._waiting.popleft())
        if steps:
            num_tokens = [step.num_tokens for step in steps]
            self._metrics.observe_all(names.ITERATION_TOKENS, num_tokens)
            self._metrics.observe_all(names.STEP_SECONDS, [step.duration_s for step in steps])
            self._metrics.inc(names.COMPUTED_TOKENS, sum(num_tokens))


def usage(blocks: Sequence[BlockCounts]) -> float:
    """Share of blocks that are referenced, of the group with the highest: that one refuses first."""
    return max((b.used / (b.used + b.available) for b in blocks if b.used + b.available), default=0.0)


def headroom_bytes(layout: PoolLayout, blocks: Sequence[BlockCounts]) -> int:
    """KV bytes that can be handed out now."""
    return sum(group.span_bytes * count.available for group, count in zip(layout.groups, blocks, strict=True))


def count_refusal(metrics: Metrics, refusal: Refusal) -> None:
    """A reservation or run was refused."""
    metrics.inc(names.RESERVATIONS_REFUSED, reason=refusal_reason(from_wire(refusal.error)))


def refusal_reason(error: BatonError) -> str:
    """Why a worker refused, as a value of the label `reason`."""
    if error.code in _REASONS:
        return _REASONS[error.code]
    if isinstance(error, Forbidden):
        return "grant"
    return "cancelled" if isinstance(error, Cancelled) else "invalid"
