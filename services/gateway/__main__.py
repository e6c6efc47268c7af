"""`python -m services.gateway`: wiring only."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from services.gateway.app import Door, build_app
from services.gateway.edge import make_edge
from services.gateway.server import Listener, allow_many_files, bind, serve
from services.gateway.service import GatewayService
from services.gateway.settings import GatewayConfig
from shared.contracts.ids import IngressId, new_process_id
from shared.ingress.config import IngressConfig
from shared.ingress.served_models import load_models
from shared.lifecycle.runtime import Runtime, run_service

PROBE_KEY_VARIABLE = "BATON_PROBE_KEY_FILE"
PROBE_PAUSE_S = 0.5


async def main(runtime: Runtime) -> None:
    settings, stack = runtime.settings, runtime.stack
    config = GatewayConfig(
        ingress=IngressConfig(
            ingress_id=IngressId(new_process_id("gateway")),
            service=runtime.service,
            drain_s=settings.gateway.shutdown_s,
            submit_s=settings.scheduler.lease_s + 3.0,
            worker_silence_s=settings.scheduler.worker_timeout_s,
        ),
        max_body_bytes=settings.gateway.max_body_bytes,
        max_file_bytes=settings.batch.max_file_bytes,
        keep_alive_s=settings.gateway.keep_alive_s,
        keyed_linger_s=settings.gateway.keyed_linger_s,
        store_responses=settings.gateway.store_responses,
        edge=make_edge(
            settings.gateway.tls_cert,
            settings.gateway.tls_key,
            settings.gateway.trusted_proxies,
            settings.gateway.cors_origins,
        ),
        probe_key=runtime.secret_text(PROBE_KEY_VARIABLE),
    )
    allow_many_files()
    sock = bind(settings.gateway.host, settings.gateway.port)
    models = load_models(settings, runtime.env)
    stack.callback(models.close)
    service = await stack.enter_async_context(
        GatewayService(runtime.bus, config, runtime.telemetry, models, metrics=runtime.metrics)
    )
    door = Door(service)
    listener = await stack.enter_async_context(serve(build_app(door), sock, config.edge))
    stack.push_async_callback(_drain, runtime, listener, service)
    stack.push_async_callback((await door.stored.serve(runtime.bus)).stop)
    if config.probe_key:
        await _until_a_token_came(door, runtime.stop)
    runtime.ready(port=listener.port)
    await runtime.stop.wait()


async def _drain(runtime: Runtime, listener: Listener, service: GatewayService) -> None:
    """New requests go to a successor if there is one, else they are refused; what is being answered may finish."""
    if runtime.superseded:
        await listener.hand_over()
    await asyncio.gather(service.drain(), listener.answered(service.config.ingress.drain_s))


async def _until_a_token_came(door: Door, stop: asyncio.Event) -> None:
    while not await door.probe():
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), PROBE_PAUSE_S)
            return


if __name__ == "__main__":
    run_service("gateway", main, drain_s=lambda settings: settings.gateway.shutdown_s)
