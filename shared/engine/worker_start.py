"""What the entry points of both worker roles do alike: an engine and a shell on one exit stack."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from shared.contracts.grants import Grant, SignedGrant
from shared.contracts.ids import WorkerId, new_process_id
from shared.engine.worker_engine import open_worker_engine
from shared.engine.worker_fences import Fences
from shared.engine.worker_purges import lost_pools_told, own_pool_told
from shared.engine.worker_settings import worker_options
from shared.engine.worker_shell import WorkerShell
from shared.lifecycle.runtime import Runtime
from shared.security.grant_signature import GrantVerifier, load_public_keys
from shared.settings.models import for_model, only_model
from shared.store.secrets import secret_path

log = logging.getLogger("baton.worker")

GRANT_PUBLIC_KEY_VARIABLE = "BATON_GRANT_PUBLIC_KEY_FILE"
DRAIN_S = 5.0
"""How long running work may go on after the signal to stop; within what `./baton down` waits."""
ENGINE_STOP_S = 5.0


async def start_shell(runtime: Runtime, role: str) -> tuple[WorkerShell, Fences]:
    """Load and start the engine; both are stopped when the runtime's stack unwinds.

    Raises:
        SettingsError, Internal: the worker can't run here.
    """
    settings = for_model(runtime.settings, only_model(runtime.settings))
    worker = WorkerId(new_process_id(role))
    options = worker_options(settings, role, runtime.env)
    await runtime.stack.enter_async_context(lost_pools_told(runtime.bus, role, worker, options.kv_dir))
    core = await asyncio.to_thread(open_worker_engine, options, worker)
    await runtime.stack.enter_async_context(own_pool_told(runtime.bus, role, worker, core.pool.path))
    runtime.stack.push_async_callback(asyncio.to_thread, core.stop, ENGINE_STOP_S)
    await asyncio.to_thread(core.start)
    if options.fake:
        log.warning("%s is a FAKE worker: its tokens are made up", worker)
    else:
        blocks, model = core.facts.layout.num_blocks, core.step_model
        log.info(
            "%s: %s KV blocks; a step is taken to last %.1f ms, and %.2f ms more for each token",
            *(worker, "+".join(map(str, blocks)), model.base_s * 1000, model.token_s * 1000),
        )
    fences = Fences()
    tracer, metrics = runtime.telemetry.tracer, runtime.metrics
    pool, stall_s = settings.model.pool, settings.scheduler.worker_timeout_s
    shell = WorkerShell(runtime.bus, core, worker, pool, fences, tracer, metrics=metrics, stall_s=stall_s)
    runtime.watchdog.watch(shell.fault)
    return shell, fences


def grant_check(runtime: Runtime) -> Callable[[SignedGrant], Grant]:
    """Tells policy's grants from others by policy's public key. Raises SettingsError when the key is missing."""
    verifier = GrantVerifier(load_public_keys(secret_path(runtime.env, GRANT_PUBLIC_KEY_VARIABLE)))
    return lambda signed: verifier.verify(signed, time.time())
