"""`python -m services.batch`: wiring only."""

from __future__ import annotations

from pathlib import Path

from services.batch.runner_config import RunnerConfig
from services.batch.service import BatchConfig, BatchService
from services.batch.store import BatchStore
from services.batch.store_limits import StoreLimits
from shared.contracts.errors import SettingsError
from shared.contracts.ids import IngressId, new_process_id
from shared.ingress.config import IngressConfig
from shared.ingress.served_models import load_models
from shared.lifecycle.runtime import Runtime, run_service
from shared.store.redis_store import connect_redis
from shared.store.sealed import Sealer

MASTER_KEY_VARIABLE = "BATON_MASTER_KEY_FILE"
QUEUE_TENANTS_VARIABLE = "BATON_QUEUE_TENANTS_FILE"
REDIS_PASSWORD_VARIABLE = "BATON_REDIS_PASSWORD_FILE"


async def main(runtime: Runtime) -> None:
    settings, stack = runtime.settings, runtime.stack
    if not settings.store.redis_url:
        raise SettingsError("REDIS_URL is not set; batches are kept there", param="REDIS_URL")
    batch = settings.batch
    config = BatchConfig(
        ingress=IngressConfig(
            ingress_id=IngressId(new_process_id("batch")),
            service=runtime.service,
            drain_s=0.0,
            submit_s=settings.scheduler.lease_s + 3.0,
            worker_silence_s=settings.scheduler.worker_timeout_s,
        ),
        runner=RunnerConfig(
            max_lines=batch.max_lines,
            max_file_bytes=batch.max_file_bytes,
            max_line_bytes=settings.gateway.max_body_bytes,
            window_s=batch.window_s,
        ),
        max_running=batch.max_running,
        max_queued_lines=batch.max_queued_lines,
        queue_tenants=Path(path) if (path := runtime.env.get(QUEUE_TENANTS_VARIABLE)) else None,
    )
    sealer = Sealer(runtime.secret(MASTER_KEY_VARIABLE))
    password = runtime.secret_text(REDIS_PASSWORD_VARIABLE)
    redis = await stack.enter_async_context(connect_redis(settings.store.redis_url, password=password))
    models = load_models(settings, runtime.env)
    stack.callback(models.close)
    store = BatchStore(redis, sealer, limits=StoreLimits(max_stored_bytes=batch.max_stored_bytes))
    await stack.enter_async_context(
        BatchService(runtime.bus, store, models, config, runtime.telemetry, runtime.metrics)
    )
    runtime.ready()
    await runtime.stop.wait()


if __name__ == "__main__":
    run_service("batch", main)
