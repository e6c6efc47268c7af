"""`python -m services.gateway`: wiring only."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from services.gateway.app import Door, build_app
from services.gateway.prompt_codec import PromptCodec
from services.gateway.server import allow_many_files, bind, serve
from services.gateway.service import GatewayService
from services.gateway.settings import GatewayConfig, context_length
from shared.contracts.ids import IngressId, new_process_id
from shared.lifecycle.runtime import Runtime, run_service
from shared.model.fetch import cache_dir, default_model_dir
from shared.telemetry.setup import setup_telemetry
from shared.text.tokenizer import load_tokenizer

PROBE_KEY_VARIABLE = "BATON_PROBE_KEY_FILE"
PROBE_PAUSE_S = 0.5


async def main(runtime: Runtime) -> None:
    settings, stack = runtime.settings, runtime.stack
    folder = Path(settings.model.path) if settings.model.path else default_model_dir(cache_dir(runtime.env))
    config = GatewayConfig(
        ingress_id=IngressId(new_process_id("gateway")),
        model=settings.model.name,
        context=context_length(folder),
        pool=settings.model.pool,
        max_body_bytes=settings.gateway.max_body_bytes,
        drain_s=settings.gateway.shutdown_s,
        submit_s=settings.scheduler.lease_s + 3.0,
        worker_silence_s=settings.scheduler.worker_timeout_s,
        probe_key=runtime.secret_text(PROBE_KEY_VARIABLE),
    )
    allow_many_files()
    sock = bind(settings.gateway.host, settings.gateway.port)
    codec = PromptCodec(load_tokenizer(folder), config.context)
    stack.callback(codec.close)
    telemetry = await stack.enter_async_context(setup_telemetry(runtime.service, runtime.bus))
    service = await stack.enter_async_context(
        GatewayService(runtime.bus, config, telemetry, codec.tokenizer.token_bytes)
    )
    door = Door(service, codec)
    port = await stack.enter_async_context(serve(build_app(door), sock))
    # new requests are refused and streams finish while the door still answers
    stack.push_async_callback(service.drain)
    if config.probe_key:
        await _until_a_token_came(door, runtime.stop)
    runtime.ready(port=port)
    await runtime.stop.wait()


async def _until_a_token_came(door: Door, stop: asyncio.Event) -> None:
    while not await door.probe():
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), PROBE_PAUSE_S)
            return


if __name__ == "__main__":
    run_service("gateway", main)
