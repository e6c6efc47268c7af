"""What every service's `__main__.py` needs: settings, logs, the bus, a stop event, one exit stack.

    async def main(runtime: Runtime) -> None:
        policy = await runtime.stack.enter_async_context(Policy(runtime.bus, runtime.settings.policy))
        await runtime.bus.serve(subjects.POLICY_ADMIT, Admit, policy.admit, queue="policy")
        runtime.ready()
        await runtime.stop.wait()

    if __name__ == "__main__":
        run_service("policy", main)

Leaving `main` unwinds the stack in reverse: what was entered last stops first, and the bus drains after all of it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from shared.bus.nats_bus import NatsBus
from shared.bus.nats_connection import connect_bus
from shared.contracts.errors import BatonError, SettingsError
from shared.lifecycle.logs import set_up_logs
from shared.lifecycle.ready import READY_VARIABLE, read_ready, report_failed, report_ready
from shared.lifecycle.stop import STOP_LIMIT_S, stop_on_signals
from shared.lifecycle.watchdog import Watchdog
from shared.settings.load import load_settings, settings_file
from shared.settings.sections import Settings
from shared.store.secrets import read_secret, read_secret_text, secret_path
from shared.telemetry.metrics import Metrics
from shared.telemetry.metrics_server import metrics_url, serve_metrics
from shared.telemetry.process_metrics import process_metrics
from shared.telemetry.setup import Telemetry, setup_telemetry

log = logging.getLogger("baton.lifecycle")

NATS_PASSWORD_VARIABLE = "BATON_NATS_PASSWORD_FILE"
EXIT_FAILED, EXIT_SETTINGS = 1, 2


@dataclass(slots=True)
class Runtime:
    """One service's surroundings while it runs.

    `service` is the name of the NATS user and of `service.name` (with hyphens). `stop` is set by SIGTERM, SIGINT, or
    when the bus gives up. What `main` enters into `stack` is left before the bus closes. `metrics` are served at
    `metrics_url` (empty: they are not). `watchdog` watches from `ready` on.
    """

    service: str
    settings: Settings
    bus: NatsBus
    stop: asyncio.Event
    stack: AsyncExitStack
    env: Mapping[str, str]
    telemetry: Telemetry
    metrics: Metrics
    metrics_url: str
    watchdog: Watchdog
    _reported: bool = False

    def ready(self, **facts: Any) -> None:
        """Tell whoever started this process that it is ready; `facts` such as `port=8080` go along.

        Nothing once it was told to stop: whoever it was to succeed goes on.
        """
        if self.stop.is_set():
            return
        # what was loaded to start with stays: looking through it for garbage, now and then, would stop the process for
        # some ten milliseconds
        gc.collect()
        gc.freeze()
        log.info("ready%s", "".join(f" {name}={value}" for name, value in facts.items()))
        report_ready(self.env, metrics_url=self.metrics_url, **facts)
        self._reported = True
        self.watchdog.start()

    @property
    def superseded(self) -> bool:
        """Another process has reported ready after this one did, and in its place: a rolling restart."""
        return self._reported and not _is_ours(_ready_path(self.env))

    def secret(self, variable: str) -> bytes:
        """The secret in the file an environment variable names. Raises SettingsError."""
        return read_secret(secret_path(self.env, variable))

    def secret_text(self, variable: str) -> str:
        """As `secret`, as one line of text; empty when the variable is not set."""
        return read_secret_text(secret_path(self.env, variable)) if self.env.get(variable) else ""


@asynccontextmanager
async def service_runtime(
    service: str, env: Mapping[str, str] | None = None, *, drain_s: Callable[[Settings], float] | None = None
) -> AsyncIterator[Runtime]:
    """Settings, logs, signals and the bus of one service. Raises SettingsError, Unavailable, Forbidden.

    `drain_s` is how long by its settings the service lets work finish; its stop may take so much longer.
    """
    env = dict(os.environ) if env is None else env
    settings = load_settings(env=env, file=settings_file(env)).settings
    set_up_logs(service, settings.log.format, settings.log.level)
    if not settings.bus.nats_url:
        raise SettingsError("NATS_URL is not set; a service needs the address of a NATS server", param="NATS_URL")
    stop = stop_on_signals(STOP_LIMIT_S + (math.ceil(drain_s(settings)) if drain_s is not None else 0))
    password = ""
    if env.get(NATS_PASSWORD_VARIABLE):
        password = read_secret_text(Path(env[NATS_PASSWORD_VARIABLE]))
    async with AsyncExitStack() as outer:
        bus = await outer.enter_async_context(connect_bus(settings.bus.nats_url, service, password=password, lost=stop))
        telemetry = await outer.enter_async_context(setup_telemetry(service, bus, settings.telemetry.otlp_endpoint))
        metrics, url = process_metrics(service, settings, bus, telemetry), ""
        ready = _ready_path(env)
        watchdog = Watchdog(ready, settings.lifecycle.hang_s, lambda: _is_ours(ready))
        outer.callback(watchdog.stop)
        if settings.metrics.enabled:
            listener = serve_metrics(metrics, settings.metrics.host, settings.metrics.port, watchdog.fault)
            url = metrics_url(settings.metrics.host, await outer.enter_async_context(listener))
        stack = await outer.enter_async_context(AsyncExitStack())
        yield Runtime(service, settings, bus, stop, stack, env, telemetry, metrics, url, watchdog)
        log.info("stopping")


def _ready_path(env: Mapping[str, str]) -> Path | None:
    path = env.get(READY_VARIABLE)
    return Path(path) if path else None


def _is_ours(ready: Path | None) -> bool:
    """False when another process has reported ready in this one's file."""
    facts = read_ready(ready) if ready is not None else None
    return facts is None or facts.get("pid") == os.getpid()


def run_service(
    service: str, main: Callable[[Runtime], Awaitable[None]], *, drain_s: Callable[[Settings], float] | None = None
) -> None:
    """Run `main` to its end on uvloop and exit: 0 after a stop, 2 for a wrong setting, 1 for another failure.

    `drain_s` as in `service_runtime`.
    """

    async def whole() -> None:
        async with service_runtime(service, drain_s=drain_s) as runtime:
            await main(runtime)

    try:
        uvloop.run(whole())
    except BatonError as exc:
        print(f"{service}: {exc.message}", file=sys.stderr, flush=True)
        report_failed(exc.message)
        sys.exit(EXIT_SETTINGS if isinstance(exc, SettingsError) else EXIT_FAILED)
    except Exception:
        logging.getLogger("baton.lifecycle").exception("%s failed", service)
        sys.exit(EXIT_FAILED)
