"""How much of a GPU a worker's KV pool may take: what is left once weights, graphs and the largest steps have theirs.

Nothing is estimated: steps are run over a small pool, and what is then gone from the device is what they need.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from msgspec.structs import replace

from shared.contracts.errors import Internal, SettingsError
from shared.contracts.sampling import SamplingParams
from shared.engine.decode_graphs import DecodeGraphs
from shared.engine.device_compute import MAX_TOP, DeviceCompute, StepLimits
from shared.engine.device_runner import DeviceRunner
from shared.engine.device_stream import DeviceStream
from shared.engine.step_composer import SCORED_CHUNK
from shared.engine.step_plan import ScheduledSequence, StepPlan
from shared.grammar.row_masks import RowMasks
from shared.kv.device_spans import KvView, device_views
from shared.kv.layout import LayerGroup, PoolLayout
from shared.model.device_decoder import ROW_CLASSES, DeviceDecoder

MARGIN_BYTES = 256 * 1024 * 1024
"""Left free beside the pool: what libraries take later, and the allocator's rounding."""
SHRINK = 0.95
"""A pool that turns out not to fit is made this much smaller."""
BURST_STEPS = 4
_DRAWN = SamplingParams(max_tokens=1, temperature=0.8, top_k=50, top_p=0.9, seed=1)


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Bytes of a device and who has them."""

    total: int
    weights: int
    steps: int  # graphs, buffers and the largest steps' intermediate results
    pool: int

    def __str__(self) -> str:
        parts = f"{_gib(self.weights)} of weights, {_gib(self.steps)} for steps and graphs, {_gib(self.pool)} of KV"
        return f"{parts}, of {_gib(self.total)}"


def free_bytes(device: torch.device) -> int:
    """Bytes of the device nobody has, this process's caching allocator included."""
    torch.cuda.synchronize(device)
    return int(torch.cuda.mem_get_info(device)[0])


def pool_budget(total: int, share: float, weights: int, steps: int, free: int, wanted: int) -> int:
    """Bytes for the pool. Pure.

    Args:
        total: bytes of the device.
        share: part of it that this worker may take in all.
        weights, steps: what it has taken and needs besides.
        free: bytes nobody has now.
        wanted: 0 = as many as there are.

    Raises:
        SettingsError: `wanted` does not fit, or nothing is left.
    """
    left = min(int(total * share) - weights - steps, free - steps) - MARGIN_BYTES
    if wanted > left or left <= 0:
        raise SettingsError(
            f"a GPU of {_gib(total)} of which this worker may take {share:.0%} has {_gib(max(left, 0))} left for KV "
            f"beside {_gib(weights)} of weights and {_gib(steps)} for steps"
            + (f", but kv.pool_bytes asks for {_gib(wanted)}" if wanted else ""),
            param="kv.pool_bytes",
        )
    return wanted or left


def measure_steps(model: DeviceDecoder, groups: tuple[LayerGroup, ...], limits: StepLimits) -> int:
    """Bytes that graphs and the largest steps take beside weights and pool."""
    device = model.device
    torch.cuda.empty_cache()
    before = free_bytes(device)
    num_blocks = tuple(_blocks_for_burst(group, limits) for group in groups)
    layout = PoolLayout(groups, num_blocks)
    data = torch.zeros(layout.total_bytes, dtype=torch.uint8, device=device)
    steps = Steps(model, groups, device_views(data, layout), limits)
    steps.burst()
    taken = before - free_bytes(device) - layout.total_bytes
    steps.close()
    del steps, data
    torch.cuda.empty_cache()
    return max(taken, 0)


class Steps:
    """Everything that runs a model's steps over a pool: buffers, captured graphs, the runner."""

    def __init__(
        self,
        model: DeviceDecoder,
        groups: tuple[LayerGroup, ...],
        pools: tuple[KvView, ...],
        limits: StepLimits,
        masks: RowMasks | None = None,
    ) -> None:
        self._limits = limits
        self._groups = groups
        self._num_blocks = [pool.values.shape[0] for pool in pools]
        self._samples = model.weights.head is not None
        self._compiles_by_rows = model.compiles_by_rows
        stream = DeviceStream(model.device)
        compute = DeviceCompute(model, groups, pools, limits)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)  # buffers are zeroed on another stream than reads them
        captures = self._samples and model.device.type == "cuda"
        self._graphs = DecodeGraphs(stream, compute.decode, compute.draw) if captures else None
        if self._graphs is not None:
            self._graphs.capture(compute.buckets)
        self.runner = DeviceRunner(compute, stream, self._graphs, masks=masks)

    def burst(self) -> None:
        """Run the largest steps there can be, one behind the other; and those whose kernels no request should wait for.

        Raises:
            Internal: a step gave something that is not a number.
            OutOfDeviceMemory: there is no room for them.
        """
        kinds = [self._chunk(), self._chunks()] + ([self._decodes(), self._scored()] if self._samples else [])
        number = 0
        for turn in range(BURST_STEPS):
            pending = []
            for sequences in kinds + (self._compiled_apart() if turn == 0 else []):
                number += 1
                pending.append(self.runner.run(StepPlan(number, sequences)))
                if len(pending) > self._limits.depth:
                    self._read(pending.pop(0)())
            for wait in pending:
                self._read(wait())

    def close(self) -> None:
        """Let go of the graphs' memory; the runner cannot be used afterwards."""
        if self._graphs is not None:
            self._graphs.drop()

    @staticmethod
    def _read(output: object) -> None:
        if getattr(output, "bad_rows", None):
            raise Internal("the first steps on the GPU gave logits that are not finite")

    def _chunk(self) -> tuple[ScheduledSequence, ...]:
        """One prompt's chunk that fills a step."""
        return (self._sequence(0, min(self._limits.max_rows, self._limits.max_len)),)

    def _chunks(self) -> tuple[ScheduledSequence, ...]:
        """As many sequences as there can be, that fill a step together."""
        count = self._limits.max_num_seqs
        each = min(self._limits.max_rows // count, self._limits.max_len)
        return tuple(self._sequence(i, each) for i in range(count)) if each else self._chunk()

    def _compiled_apart(self) -> list[tuple[ScheduledSequence, ...]]:
        """Chunks of the sizes that have kernels of their own, where those are ours."""
        if not self._compiles_by_rows:
            return []
        most = min(self._limits.max_rows, self._limits.max_len)
        return [(self._sequence(0, rows),) for rows in ROW_CLASSES if rows < most]

    def _decodes(self) -> tuple[ScheduledSequence, ...]:
        return tuple(self._sequence(i, 1) for i in range(self._limits.max_num_seqs))

    def _scored(self) -> tuple[ScheduledSequence, ...]:
        """As many rows of logits as there can be: a prompt's, beside one of every other sequence."""
        others = self._decodes()[1:]
        count = min(SCORED_CHUNK, self._limits.max_rows - len(others), self._limits.max_len)
        row = self._sequence(len(others), count)
        scored = replace(row, num_logits=count, sampling=None, scored=row.token_ids, score_top=MAX_TOP)
        return (*others, scored)

    def _sequence(self, index: int, num_tokens: int) -> ScheduledSequence:
        """Computed from position 0: it reads what it has stored. Blocks may be shared: nobody reads the result."""
        tables = []
        for group, num_blocks in zip(self._groups, self._num_blocks, strict=True):
            count = group.blocks_for(num_tokens)
            tables.append(tuple((index * count + i) % num_blocks for i in range(count)))
        num_logits = 1 if self._samples else 0
        return ScheduledSequence(
            f"burst-{index}", 0, (1,) * num_tokens, tuple(tables), num_logits, _DRAWN if num_logits else None
        )


def _blocks_for_burst(group: LayerGroup, limits: StepLimits) -> int:
    return max(group.blocks_for(limits.max_rows) + limits.max_num_seqs, 2)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
