"""A worker's engine on a GPU: weights, a pool sized by measurement, captured decode steps, and a burst before ready.

Workers that share a GPU are set up one after the other: each measures what the device has left.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from kernels.rotary.triton_kernel import BLOCK_SIZES
from shared.contracts.attempt import Attempt
from shared.contracts.errors import SettingsError
from shared.contracts.ids import WorkerId
from shared.engine.device_compute import StepLimits
from shared.engine.device_runner import DeviceLost
from shared.engine.device_sizing import SHRINK, DeviceUse, Steps, free_bytes, measure_steps, pool_budget
from shared.engine.engine_parts import PendingStep
from shared.engine.numerics import numerics_id
from shared.engine.step_plan import StepOutput, StepPlan
from shared.engine.worker_engine import WorkerEngine, WorkerFacts, WorkerOptions
from shared.grammar.compiler import LazyCompiler
from shared.grammar.row_masks import RowMasks
from shared.kv.device_memory import OutOfDeviceMemory
from shared.kv.device_pool import DevicePool, create_device_pool
from shared.kv.device_spans import warm
from shared.kv.device_transfer import DeviceTransport
from shared.kv.layout import LayerGroup, fingerprint, pool_layout
from shared.model.config import layer_groups
from shared.model.device_decoder import DeviceDecoder, load_device_decoder
from shared.model.digest import model_digest
from shared.model.kv_dtype import kv_dtype_on_gpu

T = TypeVar("T")

log = logging.getLogger("baton.worker")

_LOCK_NAME = "gpu.lock"
_TRIES = 5
_NO_ROOM = (torch.OutOfMemoryError, OutOfDeviceMemory)


def open_device_engine(options: WorkerOptions, worker: WorkerId) -> WorkerEngine:
    """Load everything onto the GPU; the engine's threads are not started yet.

    Raises:
        SettingsError: model, pool or folder can't be used, or the GPU has no room.
    """
    if options.block_size not in BLOCK_SIZES:
        sizes = ", ".join(map(str, BLOCK_SIZES))
        raise SettingsError(f"block_size {options.block_size} has no GPU kernels, only {sizes}", param="kv.block_size")
    device = torch.device("cuda", torch.cuda.current_device())
    kv_dtype = kv_dtype_on_gpu(options.kv_dtype, options.dtype, torch.cuda.get_device_capability(device))
    options = replace(options, kv_dtype=kv_dtype)
    options.kv_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _alone(options.kv_dir), torch.inference_mode():
        before = free_bytes(device)
        model = load_device_decoder(
            options.model_dir, options.dtype, device.type, options.samples, options.quant, options.exact
        )
        torch.cuda.empty_cache()  # what weights were made integers of
        weights = before - free_bytes(device)
        groups = layer_groups(model.config, options.block_size, options.kv_dtype)
        limits = StepLimits(options.token_budget, options.max_num_seqs, model.config.max_positions, options.depth)
        grammars = LazyCompiler(options.model_dir, frozenset(model.config.eos_token_ids)) if options.samples else None
        masks = RowMasks(grammars, model.config.vocab_size) if grammars else None
        try:
            needed = measure_steps(model, groups, limits)
            pool, steps = _fitted(options, worker, model, groups, limits, weights, needed, masks)
        except _NO_ROOM as exc:
            raise SettingsError(
                f"the GPU has no room for this model's steps: {exc}", param="engine.token_budget"
            ) from exc
    digest = model_digest(options.model_dir)
    numerics = numerics_id(options.dtype, model.kernels, model.quant, options.kv_dtype)
    facts = WorkerFacts(
        layout=pool.layout,
        fingerprint=fingerprint(groups, digest, numerics),
        numerics=numerics,
        model_digest=digest,
        eos_token_ids=frozenset(model.config.eos_token_ids),
        max_positions=model.config.max_positions,
        fake=False,
    )
    return WorkerEngine(options, facts, pool, DeviceSteps(steps), grammars=grammars, on_stop=steps.close)


class DeviceSteps:
    """The engine's runner. A device that failed ends the process: its peers see that at once and take its work over."""

    def __init__(self, steps: Steps, end: Callable[[int], object] = os._exit) -> None:
        self._steps = steps
        self._end = end

    def run(self, plan: StepPlan) -> StepOutput | PendingStep:
        pending = self._or_end(lambda: self._steps.runner.run(plan))
        return lambda: self._or_end(pending)

    def _or_end(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except DeviceLost as exc:
            log.critical("%s; the worker ends", exc)
            self._end(1)
            raise

    def zero_blocks(self, blocks: Sequence[tuple[int, int]]) -> Callable[[], object]:
        pending = self._or_end(lambda: self._steps.runner.zero_blocks(blocks))
        return lambda: self._or_end(pending)


def _fitted(
    options: WorkerOptions,
    worker: WorkerId,
    model: DeviceDecoder,
    groups: tuple[LayerGroup, ...],
    limits: StepLimits,
    weights: int,
    needed: int,
    masks: RowMasks | None,
) -> tuple[DevicePool, Steps]:
    """The pool and all that runs over it, after a burst has shown that everything fits."""
    device = model.device
    total = torch.cuda.get_device_properties(device).total_memory
    size = pool_budget(total, options.gpu_share, weights, needed, free_bytes(device), options.pool_bytes)
    for _ in range(_TRIES):
        layout = pool_layout(groups, size)
        pool, steps = None, None
        try:
            pool = create_device_pool(options.kv_dir, worker, layout, device)
            steps = Steps(model, groups, pool.views(), limits, masks)
            steps.burst()
            warm(pool.bytes, layout)
            torch.cuda.synchronize(device)  # streams that use the pool wait for no other
        except _NO_ROOM as exc:
            log.warning("a KV pool of %d bytes does not fit beside the steps: %s", size, exc)
            _give_back(steps, pool)
            size = int(size * SHRINK)
            continue
        except BaseException:
            _give_back(steps, pool)
            raise
        use = DeviceUse(total, weights, needed, layout.total_bytes)
        log.info("%s: %s", torch.cuda.get_device_name(device), use)
        return pool, steps
    raise SettingsError("the GPU has no room for a KV pool beside this model's steps", param="kv.pool_bytes")


def _give_back(steps: Steps | None, pool: DevicePool | None) -> None:
    if steps is not None:
        steps.close()
    if pool is not None:
        pool.close()
    torch.cuda.empty_cache()


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the machine's turn at measuring a GPU; ends with the process."""
    fd = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def digests_on_device(core: WorkerEngine, attempt: Attempt, blocks: Sequence[tuple[int, int, int, int]]) -> list[bytes]:
    """As `WorkerEngine.digest_blocks`; no byte of KV leaves the GPU for it."""
    assert isinstance(core.pool, DevicePool)
    with torch.inference_mode():
        return core.pool.digests(attempt, blocks)


def open_device_transport(core: WorkerEngine) -> DeviceTransport:
    """Pulls from peers on the same GPU into this engine's pool."""
    assert isinstance(core.pool, DevicePool)
    device = torch.device("cuda", torch.cuda.current_device())
    return DeviceTransport(core.options.kv_dir, core.facts.layout.groups, core.pool, device)
