"""`./baton up`: servers, services and workers as supervised children, ready when a real token went the whole way."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from services.cli import control, cores, restart, servers
from services.cli.child import ChildFailed, ChildSpec
from services.cli.credentials import ensure_credentials
from services.cli.detach import become_daemon_child, finish_handover, launch_detached
from services.cli.logs import fresh_logs, keep_logs_bounded
from services.cli.native_kernels import prepare_kernels
from services.cli.options import up_flags, up_parser
from services.cli.probe import first_token
from services.cli.screen import Progress, ready_screen
from services.cli.stack_models import with_models, with_resources
from services.cli.state import StackRecord, StateFolder, state_path
from services.cli.supervisor import Supervisor
from services.cli.topology import (
    StackPlan,
    instance_names,
    metrics_ports,
    pool_workers,
    service_spec,
    stop_limit_s,
    stop_order,
)
from services.gateway.edge import make_edge
from shared.contracts.errors import BatonError, SettingsError
from shared.kv.transfer_options import transfer_options
from shared.lifecycle.stop import stop_on_signals
from shared.settings.load import load_settings, settings_file
from shared.settings.models import num_workers, served_models
from shared.settings.sections import Settings

FIRST_TOKEN_TIMEOUT_S = 120.0
HANG_SLACK_S = 5.0
EXIT_FAILED, EXIT_SETTINGS, EXIT_INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit code."""
    options = up_parser().parse_args(argv)
    env = dict(os.environ)
    try:
        settings = load_settings(up_flags(options), env, settings_file(env, options.config)).settings
        if options.detach and not become_daemon_child(env):
            return launch_detached(argv, StateFolder(state_path(env)).log("up"))
        return asyncio.run(_run(settings, options, env))
    except SettingsError as exc:
        return _fail(exc.message, EXIT_SETTINGS)
    except ChildFailed as exc:
        tail = f"\n\n{exc.tail}" if exc.tail else ""
        return _fail(f"{exc.name} {exc.reason}.{tail}", EXIT_FAILED)
    except BatonError as exc:
        return _fail(exc.message, EXIT_FAILED)


def _fail(message: str, code: int) -> int:
    for line in message.splitlines() if code == EXIT_SETTINGS else [message]:
        print(f"baton: {line}", file=sys.stderr, flush=True)
    return code


async def _run(settings: Settings, options: argparse.Namespace, env: Mapping[str, str]) -> int:
    state = StateFolder(state_path(env))
    lock = state.lock()
    progress = Progress()
    # a little later than a hanging process ends itself, which leaves its stacks in its log
    hang_s = settings.lifecycle.hang_s
    supervisor = Supervisor(progress.say, hang_s + HANG_SLACK_S if hang_s else 0.0)
    # A second Ctrl-C ends the children at once; what they left behind is still cleared away.
    stop = stop_on_signals(stop_limit_s(settings), hurry=supervisor.kill)
    try:
        # What a killed stack left behind goes first; the lock says nobody uses it.
        state.clear_run()
        state = StateFolder(state.path)
        state.write_stop_limit(stop_limit_s(settings))
        served = await _serve(settings, options, env, state, stop, supervisor, progress)
    finally:
        state.clear_run()
        lock.release()
    return 0 if served else EXIT_INTERRUPTED


async def _serve(
    settings: Settings,
    options: argparse.Namespace,
    env: Mapping[str, str],
    state: StateFolder,
    stop: asyncio.Event,
    supervisor: Supervisor,
    progress: Progress,
) -> bool:
    """Start, serve, stop. False when told to stop before the stack was ready."""
    _check_port(settings.gateway.host, settings.gateway.port, "gateway.port", "with --port")
    if settings.metrics.enabled and settings.metrics.port:
        for port in metrics_ports(settings).values():
            _check_port(settings.metrics.host, port, "metrics.port", "with [metrics] port")
    starting = asyncio.create_task(_start(settings, env, state, supervisor, progress))
    try:
        if not await _unless_stopped(starting, stop):
            return False
        ready = starting.result()
        async with control.serve_control(state.run, ready.orders):
            state.write_record(ready.record)
            print(json.dumps(asdict(ready.record)) if options.json else ready.screen, flush=True)
            finish_handover(env, state.log("up"))
            progress.dated = become_daemon_child(env)
            watching = asyncio.create_task(_watch(supervisor, state.logs))
            if await _unless_stopped(watching, stop):
                watching.result()
        return True
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        progress.say("stopping")
        await supervisor.stop(stop_order(settings))
        progress.say("stopped")


async def _watch(supervisor: Supervisor, logs: Path) -> None:
    bounding = asyncio.create_task(keep_logs_bounded(logs))
    try:
        await supervisor.watch()
    finally:
        bounding.cancel()


async def _unless_stopped(task: asyncio.Task[object], stop: asyncio.Event) -> bool:
    """Wait for `task`, at most until `stop`. True when the task ended; cancelled otherwise."""
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return False
    finally:
        stopping.cancel()


@dataclass(frozen=True, slots=True)
class _Ready:
    record: StackRecord
    screen: str
    orders: control.Handler


async def _start(
    settings: Settings, env: Mapping[str, str], state: StateFolder, supervisor: Supervisor, progress: Progress
) -> _Ready:
    credentials = ensure_credentials(state.secrets)
    fresh_logs(state.logs)
    settings = _with_transfer(_with_certificate(_with_tenants(settings)))
    settings = await asyncio.to_thread(with_models, settings, env, progress.say)
    models = served_models(settings)
    progress.done(", ".join(f"model {model.path}" for model in models))

    if said := await asyncio.to_thread(prepare_kernels, settings, env, progress.say):
        progress.done(said)

    plan = StackPlan(settings, state, credentials, not settings.bus.nats_url, not settings.store.redis_url)
    plan = replace(plan, settings=await _with_servers(plan, env, supervisor))
    progress.done(f"NATS at {_address(plan.settings.bus.nats_url)}, Redis at {_address(plan.settings.store.redis_url)}")

    usable, workers = cores.usable_cores(), num_workers(settings)
    threads = cores.threads_per_worker(usable, workers)
    plan = replace(plan, settings=with_resources(plan.settings, state.pool_folder()), threads=threads)
    state.hand_marks(Path(plan.settings.kv.dir))
    specs = [service_spec(plan, name, service, env) for name, service in instance_names(settings).items()]
    facts = await supervisor.start(specs)
    progress.done(f"{len(specs)} processes; {workers} worker(s) share {usable} core(s)")

    port = int(facts["gateway"].get("port", settings.gateway.port))
    supervisor.respecify(_same_port(next(spec for spec in specs if spec.name == "gateway"), port))
    scheme = "https" if settings.gateway.tls_cert else "http"
    url = f"{scheme}://{_reachable(settings.gateway.host)}:{port}"
    over = threading.Event()
    try:
        for model in reversed(models):  # the first one's time is shown
            token_s = await asyncio.to_thread(
                first_token, url, credentials.api_key, model.name, FIRST_TOKEN_TIMEOUT_S, over
            )
    finally:
        over.set()  # a thread cannot be cancelled, and the process would wait for it
    progress.done("a first token went through all services")
    record = StackRecord(url, credentials.api_key, credentials.admin_key, os.getpid())
    workers_of = pool_workers(settings)
    computes = {model.pool: facts[name].get("computes", "") for name, (_, model) in workers_of.items()}
    screen = ready_screen(plan.settings, record, state.logs, progress.elapsed_s, token_s, computes)
    own_servers = [name for name, own in (("nats", plan.own_nats), ("redis", plan.own_redis)) if own]
    return _Ready(record, screen, restart.handler(supervisor, instance_names(settings), own_servers))


def _with_tenants(settings: Settings) -> Settings:
    """Settings with the tenants' file as an absolute path: services run in a folder of their own."""
    if not settings.policy.tenants:
        return settings
    path = Path(settings.policy.tenants).expanduser().absolute()
    if not path.is_file():
        raise SettingsError(f"file of tenants {path} does not exist", param="policy.tenants")
    return _updated(settings, "policy", tenants=str(path))


def _with_certificate(settings: Settings) -> Settings:
    """Settings with the certificate's files as absolute paths. What is wrong with them is told before a start."""
    given = settings.gateway
    files = (given.tls_cert, given.tls_key)
    cert, key = (str(Path(path).expanduser().absolute()) if path else "" for path in files)
    make_edge(cert, key, given.trusted_proxies, given.cors_origins)
    return _updated(settings, "gateway", tls_cert=cert, tls_key=key)


def _with_transfer(settings: Settings) -> Settings:
    """The same for the files by which KV goes over TLS."""
    options = transfer_options(settings.kv)
    options.require()
    cert, key, ca = (str(Path(path).absolute()) if path else "" for path in (options.cert, options.key, options.ca))
    return _updated(settings, "kv", transfer_cert=cert, transfer_key=key, transfer_ca=ca)


async def _with_servers(plan: StackPlan, env: Mapping[str, str], supervisor: Supervisor) -> Settings:
    """Settings with the addresses of NATS and Redis; those not given are started."""
    settings = plan.settings
    specs: list[ChildSpec] = []
    port = servers.free_port()
    if plan.own_nats:
        specs.append(servers.nats_spec(plan.state, plan.credentials, env, settings.bus.port))
    if plan.own_redis:
        specs.append(servers.redis_spec(plan.state, plan.credentials, env, port))
    facts = await supervisor.start(specs) if specs else {}
    if plan.own_nats:
        supervisor.respecify(servers.on_port(specs[0], facts["nats"]["port"]))
        settings = _updated(settings, "bus", nats_url=facts["nats"]["url"])
    if plan.own_redis:
        settings = _updated(settings, "store", redis_url=servers.redis_url(port))
    return settings


def _updated(settings: Settings, section: str, **values: object) -> Settings:
    return settings.model_copy(update={section: getattr(settings, section).model_copy(update=values)})


def _same_port(spec: ChildSpec, port: int) -> ChildSpec:
    return replace(spec, env={**spec.env, "BATON_GATEWAY_PORT": str(port)})


def _check_port(host: str, port: int, param: str, setting: str) -> None:
    """Raise SettingsError when a process could not listen there: sooner and plainer than its own failure."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            raise SettingsError(
                f"cannot listen on {host} port {port}: {exc.strerror}; choose another {setting} (0 takes a free one)",
                param=param,
            ) from exc


def _reachable(host: str) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def _address(url: str) -> str:
    """A URL without the credentials it may hold."""
    return url.partition("://")[2].rpartition("@")[2]
