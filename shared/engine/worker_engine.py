"""What a worker process is built around: pool, engine and the facts its beats tell. Torch is imported only for a model.

Start-up of a real worker, in this order, behind the sweep of pool files nobody owns: load the model, prove that exact
mode holds on this machine, make the pool, run one step so that nothing is lazy later, time a few steps for the
step-time model. Workers that start together are timed one after the other, or each would measure the other's work.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from shared.contracts.attempt import Attempt
from shared.contracts.errors import InvalidInput, SettingsError
from shared.contracts.ids import WorkerId
from shared.contracts.parts import ItlTarget, StepModel
from shared.engine.batcher import Batcher
from shared.engine.batcher_config import BatcherConfig
from shared.engine.batching_policy import Batching
from shared.engine.calibration import Calibration, timed_alone
from shared.engine.core_share import CoreShare, open_share
from shared.engine.engine import Engine
from shared.engine.engine_parts import Again, Runner
from shared.engine.model_steps import ModelSteps
from shared.engine.prompt_budget import NO_TARGET
from shared.engine.sequence_update import SequenceUpdate
from shared.engine.step_fit import StepTimeFit
from shared.engine.step_time import DEFAULT_MODEL, StepObservation, StepTimeModel
from shared.grammar.compiler import LazyCompiler
from shared.kv.eviction import Eviction
from shared.kv.finite import span_is_finite
from shared.kv.layout import PoolLayout
from shared.kv.transfer import SharedMemoryTransport, Transport, digest_blocks
from shared.kv.transfer_options import AS_DEFAULT, TransferOptions
from shared.lifecycle.memory import give_back

log = logging.getLogger("baton.worker")

DEFAULT_POOL_BYTES = 256 * 1024 * 1024
"""When nobody decided on a size: `./baton up` derives one from free memory."""
STRETCH_S = 0.5
"""How long decodes go on with nobody planning, while nobody comes: so much later are their blocks tagged."""
REFINE_EVERY = 32
"""Decode steps between refinements of the step-time model, each of which costs as much as the bookkeeping of several.
Steps with prompt tokens are rarer, cost more and tell more: each one refines it."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How a worker's engine is set up. `kv_dir` is a private folder in memory that all workers of the machine share."""

    model_dir: Path
    kv_dir: Path
    dtype: str = "float32"  # or auto, as `shared.model.decoder.load_decoder`; of a running engine, what was chosen
    kv_dtype: str = "auto"  # as the model computes, int8 or fp8; of a running engine, what was chosen
    block_size: int = 32  # token slots
    pool_bytes: int = 512 * 1024 * 1024  # 0: on a GPU what is left, else DEFAULT_POOL_BYTES
    eviction: Eviction = "reuse"  # which cached blocks are given up first
    token_budget: int = 512  # most tokens in a step
    lone_token_budget: int = 0  # most tokens in a step in which nothing decodes, if larger; not on a GPU
    itl_target: ItlTarget = NO_TARGET  # how long a step may take while sequences decode
    publish_interval_s: float = 0.0  # how far apart a stream's pieces may be made, by gathering tokens; 0: none waits
    chunk_size: int = 0  # most tokens of one sequence in a step; 0 = the token budget
    max_num_seqs: int = 32
    classes: tuple[str, ...] = ()  # that it takes requests of; (): of all
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
    exact: bool = False  # on a GPU: no bit of a row depends on what shares its step
    quick_head: bool = False
    most_drafted: int = 0  # most tokens guessed for a sequence in a step; 0: nothing speculates. Not on a GPU
    samples: bool = True  # False: makes KV only, and loads no output head
    self_check: bool = True
    calibrate: bool = True
    transfer: TransferOptions = AS_DEFAULT  # how KV is exchanged with other workers
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
    again: Again | None = None  # as of `Engine`
    on_stop: Callable[[], None] = lambda: None  # called between the engine's end and the pool's
    on_updates: Callable[[list[SequenceUpdate]], None] = lambda updates: None
    on_step: Callable[[StepObservation], None] = lambda step: None
    engine: Engine = field(init=False)
    _batcher: Batcher = field(init=False)
    _fit: StepTimeFit = field(init=False, default_factory=StepTimeFit)
    _calibration: Calibration | None = field(init=False, default=None)
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
            stretch_s=STRETCH_S if self.again is not None else 0.0,
            most_drafted=o.most_drafted,
            batching=o.batching,
            batch_size=o.batch_size,
            batch_window_s=o.batch_window_s,
            eviction=o.eviction,
        )
        self._batcher = Batcher(self.facts.layout, config)
        self.engine = Engine(
            self._batcher,
            self.runner,
            lambda updates: self.on_updates(updates),
            on_error=lambda error: log.error("engine: %s", error, exc_info=error),
            on_step=self._observe,
            again=self.again,
        )

    @property
    def step_model(self) -> StepModel:
        """The step-time model as beats carry it."""
        return self._fit.model.wire()

    @property
    def longest_step_s(self) -> float:
        """Seconds the step-time model says of the longest step there can be."""
        o = self.options
        tokens, positions = max(o.token_budget, o.lone_token_budget), self.facts.max_positions
        return self._fit.model.predict(tokens, o.max_num_seqs, tokens * positions)

    def require_grammar(self, grammar: str) -> None:
        """Compile a grammar before its first step. May block for as long as that takes.

        Raises:
            InvalidInput: it is not supported, here or at all (param `response_format`).
        """
        if self.grammars is None:
            message = "response_format: this model's workers do not constrain an output"
            raise InvalidInput(message, param="response_format")
        self.grammars.get().require(grammar)

    def digest_blocks(self, attempt: Attempt, blocks: Sequence[tuple[int, int, int, int]]) -> list[bytes]:
        """Digests of our own final blocks, as whoever pulls them takes them. Blocks; for one thread at a time.

        Args:
            blocks: (group, block id, generation, position) each.
        """
        if self.options.device == "cuda":
            from shared.engine.device_worker import digests_on_device

            return digests_on_device(self, attempt, blocks)
        return digest_blocks(self.pool.span, attempt, blocks)

    def are_finite(self, blocks: Sequence[tuple[int, int, int, int]]) -> bool:
        """Whether our own final blocks, named as for `digest_blocks`, hold numbers only. On a GPU nobody looks: there a
        bad one shows in the rows that read it."""
        if self.options.device == "cuda":
            return True
        groups = self.facts.layout.groups
        return all(span_is_finite(self.pool.span(group, block), groups[group]) for group, block, _, _ in blocks)

    def open_transport(self) -> Transport:
        """How this worker reads the blocks of peers whose memory it can map into its own pool."""
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
        o, layout = self.options, self.facts.layout
        self._calibration = calibration = Calibration(
            self.engine,
            self._listen,
            layout,
            max_tokens=min(max(o.token_budget, o.lone_token_budget), self.facts.max_positions - 1),
            max_num_seqs=o.max_num_seqs,
            samples=o.samples,
        )
        try:
            calibration.warm()
            if o.calibrate:
                with timed_alone(o.kv_dir):
                    calibration.run()
        finally:
            self._calibration = None
            self._listen(lambda updates: None)
        give_back()  # loading and packing leave the allocator with a tenth of a small model's size
        if calibration.observed:
            self._learn(calibration.fit())

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
        if self._calibration is not None:
            self._calibration.observed.append(observation)
            return
        self.on_step(observation)
        self._steps += 1
        if observation.num_tokens > observation.num_seqs or self._steps % REFINE_EVERY == 0:
            self._learn(self._fit.refine(observation))

    def _listen(self, on_updates: Callable[[list[SequenceUpdate]], None]) -> None:
        self.on_updates = on_updates

    def _learn(self, fit: StepTimeFit) -> None:
        self._fit = fit
        self._batcher.step_model = fit.model


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

        return open_fake(replace(options, device="cpu"), worker)  # its pool is a file, whatever is asked for
    device = _device(options)
    if device == "cuda":
        if options.most_drafted:
            message = "engine.speculation: prompt-lookup runs on CPUs only; set it to off, or engine.device to cpu"
            raise SettingsError(message, param="engine.speculation")
        from shared.engine.device_worker import open_device_engine
        from shared.engine.worker_quality import on_gpu, with_quality

        on_device = on_gpu(replace(options, device=device, lone_token_budget=0))
        return with_quality(open_device_engine(on_device, worker))
    return _open_real(replace(options, device=device, pool_bytes=options.pool_bytes or DEFAULT_POOL_BYTES), worker)


def _device(options: WorkerOptions) -> str:
    """What computes. Raises SettingsError for kernels that the device asked for does not have."""
    from kernels.dispatch import choose_device

    if options.kernels not in ("auto", "triton"):
        if options.device == "cuda":
            raise SettingsError(f"kernels {options.kernels!r} does not run on a GPU", param="engine.kernels")
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
    from shared.kv.layout import fingerprint, pool_layout
    from shared.kv.pool import create_pool
    from shared.model.config import layer_groups
    from shared.model.decoder import configuration_of, load_decoder
    from shared.model.digest import model_digest
    from shared.model.kv_dtype import kv_dtype_of
    from shared.model.native_decoder import NativeDecoder

    if options.threads:
        torch.set_num_threads(options.threads)
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
    layout = pool_layout(groups, options.pool_bytes)
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
        runner = ModelRunner(model, pool, masks=RowMasks(grammars, model.config.vocab_size))
        native = model if isinstance(model, NativeDecoder) else None
        use_threads = native.use_threads if native else None
        share = open_share(options.kv_dir / "cores", worker, options.cores) if options.cores else None
        steps = ModelSteps(runner.run, pool.zero_blocks, share, use_threads, runner.again if native else None)
        kernel_cpu_s = native.kernel_cpu_s if native else None
        quick_rows = native.quick_rows if native else None
        again = steps.run_again if native else None
        return WorkerEngine(options, facts, pool, steps, share, kernel_cpu_s, grammars, quick_rows, again)
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
