"""A worker's engine options out of Baton's settings. Pure but for the sizes of this machine."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from shared.contracts.errors import SettingsError
from shared.contracts.parts import ItlTarget
from shared.engine.cores import usable_cores
from shared.engine.prompt_budget import AUTO_TARGET, NO_TARGET
from shared.engine.worker_engine import WorkerOptions
from shared.kv.transfer_options import transfer_options
from shared.model.fetch import cache_dir, default_model_dir
from shared.settings.request_classes import classes_of
from shared.settings.sections import EngineSettings, Settings

GPU_SHARE = 0.9
"""Of a GPU's memory, for all workers together, when nobody decided."""


def worker_options(settings: Settings, role: str, env: Mapping[str, str]) -> WorkerOptions:
    """Options of a worker of `role`, prefill or decode.

    Raises:
        SettingsError: the token budget does not exceed the number of sequences.
    """
    engine, workers = settings.engine, settings.workers
    field = "prefill_token_budget" if role == "prefill" else "token_budget"
    budget = engine.prefill_token_budget if role == "prefill" else engine.token_budget
    if budget <= engine.max_sequences:
        raise SettingsError(
            f"engine.{field} is {budget}: it must exceed engine.max_sequences, {engine.max_sequences}",
            param=f"engine.{field}",
        )
    cores = usable_cores()
    given = env.get("OMP_NUM_THREADS", "")
    own = int(given) if given.isdecimal() else 0
    return WorkerOptions(
        samples=role == "decode",
        model_dir=Path(settings.model.path) if settings.model.path else default_model_dir(cache_dir(env)),
        kv_dir=Path(settings.kv.dir or f"/dev/shm/baton-{os.getuid()}"),
        dtype=settings.model.dtype,
        kv_dtype=settings.kv.dtype,
        block_size=settings.kv.block_size,
        pool_bytes=settings.kv.pool_bytes,
        eviction=settings.kv.eviction,
        token_budget=budget,
        lone_token_budget=engine.prefill_token_budget,
        itl_target=itl_target(engine.itl_target_ms) if role == "decode" else NO_TARGET,
        publish_interval_s=publish_interval_s(engine),
        chunk_size=engine.chunk_size,
        max_num_seqs=engine.max_sequences,
        classes=classes_of(engine.classes),
        depth=engine.depth,
        batching=engine.batching,
        batch_size=engine.batch_size,
        batch_window_s=engine.batch_window_s,
        most_drafted=engine.speculation_max_tokens if role == "decode" and engine.speculation != "off" else 0,
        threads=engine.threads or own or max(1, cores // max(1, workers.prefill + workers.decode)),
        most_threads=engine.threads or cores,
        cores=cores,
        device=engine.device,
        gpu_share=engine.gpu_share or GPU_SHARE / max(1, workers.prefill + workers.decode),
        kernels=engine.kernels,
        quant=engine.quant,
        exact=engine.exact,
        quick_head=engine.quick_head,
        transfer=transfer_options(settings.kv),
        fake=workers.fake,
    )


def itl_target(milliseconds: float | Literal["auto"]) -> ItlTarget:
    """What `engine.itl_target_ms` asks for."""
    return AUTO_TARGET if milliseconds == "auto" else ItlTarget(least_s=milliseconds / 1000)


def publish_interval_s(engine: EngineSettings) -> float:
    """How long a worker gathers tokens, seconds: no longer than somebody said that a step may take."""
    target = math.inf if engine.itl_target_ms == "auto" else engine.itl_target_ms / 1000
    return min(engine.publish_interval_ms / 1000, target or math.inf)
