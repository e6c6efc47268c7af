"""What a worker process is built around: pool, engine and the facts its beats tell. Torch is imported only for a model.

Start-up of a real worker, in this order: sweep pool files nobody owns, load the model, prove that exact mode holds on
this machine, make the pool, run one step so that nothing is lazy later, time a few steps for the step-time model.
Workers that start together are timed one after the other, or each would measure the other's work.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from shared.contracts.errors import Internal, InvalidInput, SettingsError
from shared.contracts.ids import WorkerId
from shared.contracts.parts import ItlTarget, StepModel
from shared.contracts.sampling import SamplingParams
from shared.engine.batcher import Batcher, BatcherConfig
from shared.engine.batching_policy import Batching
from shared.engine.core_share import CoreShare, open_share
from shared.engine.engine import Engine, Runner
from shared.engine.model_steps import ModelSteps
from shared.engine.prompt_budget import NO_TARGET
from shared.engine.sequence import SequenceSpec, SequenceUpdate
from shared.engine.step_fit import StepTimeFit, fastest, fit_all
from shared.engine.step_time import DEFAULT_MODEL, StepObservation, StepTimeModel
from shared.grammar.compiler import LazyCompiler
from shared.kv.layout import PoolLayout
from shared.kv.transfer import SharedMemoryTransport, Transport

log = logging.getLogger("baton.worker")

DEFAULT_POOL_BYTES = 256 * 1024 * 1024
"""When nobody decided on a size: `./baton up` derives one from free memory."""
WARM_TIMEOUT_S = 120.0
_SMALL = ((1, 1), (1, 8), (16, 1), (32, 1), (1, 32), (128, 1))
CALIBRATION = (*_SMALL, (512, 1), *_SMALL, *_SMALL, (512, 1))
"""(tokens, sequences) of the timed steps, which sample where a sequence has one token; of repeats the fastest counts.
The small ones find the floor, the large one what context costs; what exceeds the budget or the pool is left out."""
CALIBRATION_S = 1.5
"""A step that would go beyond this is not timed; running steps refine the model anyway."""
LEAST_BANDWIDTH = 4e9
"""Bytes a second at which KV is read at least: bounds what a position of context can cost."""
CALIBRATION_WAIT_S = 4.0
"""How long a worker waits for its turn to be timed; then it is timed beside the others."""
REFINE_EVERY = 32
"""Decode steps between refinements of the step-time model, each of which costs as much as the bookkeeping of several.
Steps with prompt tokens are rarer, cost more and tell more: each one refines it."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How a worker's engine is set up. `kv_dir` is a private folder in memory that all workers of the machine share."""

    model_dir: Path
    kv_dir: Path
    dtype: str = "float32"  # or auto, as `shared.model.decoder.load_decoder`; of a running engine, what was chosen
    kv_dtype: str = "auto"  # as the model computes, or int8; of a running engine, what was chosen
    block_size: int = 32  # token slots
    pool_bytes: int = 512 * 1024 * 1024  # 0: on a GPU what is left, else DEFAULT_POOL_BYTES
    token_budget: int = 512  # most tokens in a step
    lone_token_budget: int = 0  # most tokens in a step in which nothing decodes, if larger; not on a GPU
    itl_target: ItlTarget = NO_TARGET  # how long a step may take while sequences decode
    chunk_size: int = 0  # most tokens of one sequence in a step; 0 = the token budget
    max_num_seqs: int = 32
    depth: int = 1
    batching: Batching = "continuous"
    batch_size: int = 8
    batch_window_s: float = 0.05
    threads: int = 0  # this worker's own; 0 = as torch decides
    most_threads: int = 0  # of native kernels, while no other worker computes; 0: `threads`, always
    cores: int = 0  # that the workers of the host share; 0: this one looks at no others
    device: str = "cpu"  # as settings name it: auto, cpu or cuda; of a running engine, what computes
    gpu_share: float = 0.9  # most of the GPU's memory one worker takes
    kernels: str = "auto"
    quant: str = "none"
    quick_head: bool = False
    samples: bool = True  # False: makes KV only, and loads no output head
    self_check: bool = True
    calibrate: bool = True
    fake: bool = False
    fake_speed: float = 1.0  # fake steps take the default step model's time divided by this


class OwnPool(Protocol):
    """The part of a pool a worker's shell needs."""

    @property
    def path(self) -> Path: ...

    def span(self, group: int, block_id: int) -> memoryview: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What does not change while the worker lives."""

    layout: PoolLayout
    fingerprint: str
    numerics: str
    model_digest: str
    eos_token_ids: frozenset[int]
    max_positions: int
    fake: bool
    computes: str = ""  # number format and kernels, and what is known of their quality
    samples_plainly: bool = False  # by temperature, top_k and top_p alone, and without log-probabilities


@dataclass(slots=True)
class WorkerEngine:
    """A running engine with its pool. `on_updates` and `on_step` may be set any time; the planner thread calls them."""

    options: WorkerOptions
    facts: WorkerFacts
    pool: OwnPool
    runner: Runner
    share: CoreShare | None = None  # of the cores, closed with the engine
    kernel_cpu_s: Callable[[], float] | None = None  # processor seconds spent in native kernels so far
    grammars: LazyCompiler | None = None  # None: it samples under no grammar
    quick_rows: Callable[[], tuple[int, int]] | None = None  # as `NativeDecoder.quick_rows`
    on_stop: Callable[[], None] = lambda: None  # called between the engine's end and the pool's
    on_updates: Callable[[list[SequenceUpdate]], None] = lambda updates: None
    on_step: Callable[[StepObservation], None] = lambda step: None
    engine: Engine = field(init=False)
    _batcher: Batcher = field(init=False)
    _fit: StepTimeFit = field(init=False, default_factory=StepTimeFit)
    _observed: list[StepObservation] = field(init=False, default_factory=list)
    _calibrating: bool = field(init=False, default=False)
    _steps: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        o = self.options
        config = BatcherConfig(
            token_budget=o.token_budget,
            lone_token_budget=o.lone_token_budget,
            itl_target=o.itl_target,
            max_num_seqs=o.max_num_seqs,
            chunk_size=o.chunk_size,
            depth=o.depth,
            batching=o.batching,
            batch_size=o.batch_size,
            batch_window_s=o.batch_window_s,
        )
        self._batcher = Batcher(self.facts.layout, config)
        self.engine = Engine(
            self._batcher,
            self.runner,
            lambda updates: self.on_updates(updates),
            on_error=lambda error: log.error("engine: %s", error, exc_info=error),
            on_step=self._observe,
        )

    @property
    def step_model(self) -> StepModel:
        """The step-time model as beats carry it."""
        return self._fit.model.wire()

    def require_grammar(self, grammar: str) -> None:
        """Compile a grammar before its first step. May block for as long as that takes.

        Raises:
            InvalidInput: it is not supported, here or at all (param `response_format`).
        """
        if self.grammars is None:
            message = "response_format: workers on a GPU do not constrain an output"
            raise InvalidInput(message, param="response_format")
        self.grammars.get().require(grammar)

    def open_transport(self) -> Transport:
        """How this worker reads peers' blocks into its own pool."""
        if self.options.device == "cuda":
            from shared.engine.device_worker import open_device_transport

            return open_device_transport(self)
        return SharedMemoryTransport(self.options.kv_dir, self.facts.layout.groups, self.pool.span)

    def start(self) -> None:
        """Start the threads, run a first step, and time a few. Blocks for the time that takes.

        Raises:
            Internal: the first step failed or did not end.
        """
        self.engine.start()
        if self.facts.fake:
            self._learn(StepTimeFit(fake_step_time(self.options.fake_speed)))
            return
        self._calibrating = True
        self._run_steps([(1, 1)])
        # The first step paid for what is made lazily.
        self._observed.clear()
        if self.options.calibrate:
            with _timed_alone(self.options.kv_dir):
                self._run_steps(CALIBRATION)
        self._calibrating = False
        _give_memory_back()
        if self._observed:
            bytes_a_token = sum(group.token_bytes for group in self.facts.layout.groups)
            self._learn(fit_all(fastest(self._observed), most_context_s=bytes_a_token / LEAST_BANDWIDTH))

    def stop(self, timeout_s: float) -> None:
        """Stop the engine, then give the pool's memory back: in this order, because steps write the pool."""
        stopped = self.engine.stop(timeout_s)
        if stopped:
            self.on_stop()
        else:
            log.error("the engine did not stop within %.1f s", timeout_s)
        if self.share is not None:
            self.share.close()
        # a GPU's memory is freed behind the step that hangs: it goes with the process instead
        if stopped or self.options.device != "cuda":
            self.pool.close()

    def _observe(self, observation: StepObservation) -> None:
        if self._calibrating:
            self._observed.append(observation)
            return
        self.on_step(observation)
        self._steps += 1
        if observation.num_tokens > observation.num_seqs or self._steps % REFINE_EVERY == 0:
            self._learn(self._fit.refine(observation))

    def _learn(self, fit: StepTimeFit) -> None:
        self._fit = fit
        self._batcher.step_model = fit.model

    def _run_steps(self, shapes: Sequence[tuple[int, int]]) -> None:
        for number, (each, num_seqs) in enumerate(shapes):
            spent_s = sum(o.duration_s for o in self._observed)
            if not self._has_room(each, num_seqs):
                continue
            if spent_s and spent_s + self._guess_s(each * num_seqs) > CALIBRATION_S:
                continue
            samples = self.options.samples and each == 1
            sampling = SamplingParams(max_tokens=1)
            specs = [
                SequenceSpec(f"warm-{number}-{i}", (1,) * each, each, sampling, compute_only=not samples)
                for i in range(num_seqs)
            ]
            self._run_to_end(specs)

    def _has_room(self, each: int, num_seqs: int) -> bool:
        """Whether sequences of `each` tokens can be computed in one step, with a block for each to grow into."""
        o, facts = self.options, self.facts
        blocks = num_seqs * (-(-each // facts.layout.groups[0].block_size) + 1)
        return (
            each * num_seqs <= max(o.token_budget, o.lone_token_budget)
            and num_seqs <= o.max_num_seqs
            and each < facts.max_positions
            and all(blocks <= total for total in facts.layout.num_blocks)
        )

    def _guess_s(self, num_tokens: int) -> float:
        """Seconds a step of so many tokens takes, in proportion to the largest yet: the floor cannot be told yet."""
        largest = max(self._observed, key=lambda o: o.num_tokens)
        return largest.duration_s * max(1.0, num_tokens / largest.num_tokens)

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

        self.on_updates = on_updates
        try:
            self.engine.call(reserve).result(WARM_TIMEOUT_S)
            if not ended.wait(WARM_TIMEOUT_S) or failed:
                raise Internal(f"the first steps failed: {', '.join(failed) or 'no answer'}")
            self.engine.call(cancel).result(WARM_TIMEOUT_S)
        finally:
            self.on_updates = lambda updates: None


def _give_memory_back() -> None:
    """Loading and packing leave the allocator with free memory it would keep: a tenth of a small model's size."""
    with contextlib.suppress(AttributeError, OSError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def _timed_alone(folder: Path) -> Iterator[None]:
    """Hold the machine's turn at timing steps, or go on without it after `CALIBRATION_WAIT_S`.

    The turn is a lock on the pools' folder itself: it leaves no file, and ends with its process.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + CALIBRATION_WAIT_S
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


def fake_step_time(speed: float) -> StepTimeModel:
    """The step-time model of fake workers, `speed` times as fast as the default."""
    return DEFAULT_MODEL.faster(speed)


def open_worker_engine(options: WorkerOptions, worker: WorkerId) -> WorkerEngine:
    """Load everything; the engine's threads are not started yet. Blocks: seconds for a model.

    Raises:
        SettingsError: model, pool or folder can't be used, or exact mode can't be kept on this machine.
    """
    if options.fake:
        from shared.engine.worker_fake import open_fake

        return open_fake(options, worker)
    device = _device(options)
    if device == "cuda":
        from shared.engine.device_worker import open_device_engine
        from shared.engine.worker_quality import on_gpu, with_quality
        from shared.model.kv_dtype import require_kv_dtype_on_gpu

        on_device = on_gpu(replace(options, device=device, lone_token_budget=0))
        require_kv_dtype_on_gpu(on_device.kv_dtype, on_device.dtype)
        return with_quality(open_device_engine(on_device, worker))
    return _open_real(replace(options, device=device, pool_bytes=options.pool_bytes or DEFAULT_POOL_BYTES), worker)


def _device(options: WorkerOptions) -> str:
    """What computes. Raises SettingsError for kernels that the device asked for does not have."""
    from kernels.dispatch import choose_device

    for name, value, on_gpu in (("kernels", options.kernels, ("auto", "triton")), ("quant", options.quant, ("none",))):
        if value not in on_gpu:
            if options.device == "cuda":
                raise SettingsError(f"{name} {value!r} does not run on a GPU", param=f"engine.{name}")
            return "cpu"
    device, why = choose_device(options.device)
    if device == "cpu" and options.kernels == "triton":
        raise SettingsError(f"kernels 'triton' need a GPU: {why or 'device is cpu'}", param="engine.kernels")
    if why and options.device == "cuda":
        log.warning("no GPU to compute on, %s; the CPU computes instead", why)
    return device


def _open_real(options: WorkerOptions, worker: WorkerId) -> WorkerEngine:
    import torch

    from shared.engine.model_runner import ModelRunner
    from shared.engine.numerics import numerics_id
    from shared.engine.self_check import run_self_check
    from shared.engine.worker_quality import told_quality
    from shared.grammar.row_masks import RowMasks
    from shared.kv.layout import fingerprint
    from shared.kv.pool import create_pool, sweep
    from shared.model.config import layer_groups
    from shared.model.decoder import configuration_of, load_decoder
    from shared.model.digest import model_digest
    from shared.model.kv_dtype import kv_dtype_of
    from shared.model.native_decoder import NativeDecoder

    if options.threads:
        torch.set_num_threads(options.threads)
    if options.kv_dir.exists():
        for path in sweep(options.kv_dir):
            log.warning("removed a pool file without an owner: %s", path.name)
    model = load_decoder(
        options.model_dir,
        options.dtype,
        options.kernels,
        with_head=options.samples,
        threads=options.most_threads or options.threads,
        quant=options.quant,
        quick_head=options.quick_head,
    )
    if model.kernels.native is not None:
        # torch's own threads would spin on the cores of the native ones, for what little it is left to do
        torch.set_num_threads(1)
    kv_dtype = kv_dtype_of(options.kv_dtype, model)
    if options.self_check:
        run_self_check(model.config, model.dtype, model.kernels, model.quant, kv_dtype).require_exact()
    configuration = configuration_of(model, kv_dtype)
    options = replace(options, dtype=configuration.dtype, kv_dtype=kv_dtype)
    groups = layer_groups(model.config, options.block_size, kv_dtype, tile_layout=model.kernels.tile_layout)
    num_blocks = options.pool_bytes // sum(g.span_bytes for g in groups)
    if num_blocks < 2:
        raise SettingsError(f"a KV pool of {options.pool_bytes} bytes holds no two blocks", param="pool_bytes")
    layout = PoolLayout(groups, (num_blocks,) * len(groups))
    digest = model_digest(options.model_dir)
    numerics = numerics_id(options.dtype, model.kernels, model.quant, kv_dtype)
    facts = WorkerFacts(
        layout=layout,
        fingerprint=fingerprint(groups, digest, numerics),
        numerics=numerics,
        model_digest=digest,
        eos_token_ids=frozenset(model.config.eos_token_ids),
        max_positions=model.config.max_positions,
        fake=False,
        computes=told_quality(configuration, digest, numerics, warn=options.samples),
    )
    pool = create_pool(options.kv_dir, worker, layout)
    log.info("KV pool: %d of %d MiB in huge pages", pool.huge_bytes >> 20, layout.total_bytes >> 20)
    try:
        grammars = LazyCompiler(options.model_dir, facts.eos_token_ids)
        run = ModelRunner(model, pool, masks=RowMasks(grammars, model.config.vocab_size)).run
        native = model if isinstance(model, NativeDecoder) else None
        use_threads = native.use_threads if native else None
        share = open_share(options.kv_dir / "cores", worker, options.cores) if options.cores else None
        steps = ModelSteps(run, pool.zero_blocks, share, use_threads)
        kernel_cpu_s = native.kernel_cpu_s if native else None
        quick_rows = native.quick_rows if native else None
        return WorkerEngine(options, facts, pool, steps, share, kernel_cpu_s, grammars, quick_rows)
    except BaseException:
        pool.close()
        raise


def host_name() -> str:
    return socket.gethostname()


def boot_id() -> str:
    """This boot of the machine: two processes with different ones share no memory."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{host_name()}-{os.getsid(0)}"
