"""Which processes make a stack, what each is told, and in which order they stop. Pure."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from services.cli.child import ChildSpec, Mark, ReadyProbe
from services.cli.credentials import Credentials
from services.cli.state import STOP_S, StateFolder
from shared.contracts.errors import SettingsError
from shared.lifecycle.ready import READY_VARIABLE, failure_path, read_ready
from shared.lifecycle.runtime import NATS_PASSWORD_VARIABLE
from shared.settings.load import ROOT, as_environment
from shared.settings.models import for_model, served_models
from shared.settings.request_classes import worker_classes
from shared.settings.sections import SECTIONS, ModelEntry, Settings

START_S = 180.0
WORKER_START_S = 900.0
"""The first start packs a model's weights, which takes minutes for a large one on a slow disk."""
CONTROL = ("policy", "prefix-cache-index")
SECRET_FILES: dict[str, dict[str, Callable[[Credentials], Path]]] = {
    "policy": {
        "BATON_GRANT_KEY_FILE": lambda c: c.grant_key,
        "BATON_GRANT_PUBLIC_KEY_FILE": lambda c: c.grant_public_key,
        "BATON_MASTER_KEY_FILE": lambda c: c.master_key,
        "BATON_REDIS_PASSWORD_FILE": lambda c: c.redis_password,
        "BATON_BOOTSTRAP_FILE": lambda c: c.bootstrap,
    },
    "prefix-cache-index": {
        "BATON_GRANT_PUBLIC_KEY_FILE": lambda c: c.grant_public_key,
        "BATON_MASTER_KEY_FILE": lambda c: c.master_key,
        "BATON_REDIS_PASSWORD_FILE": lambda c: c.redis_password,
    },
    "batch": {
        "BATON_MASTER_KEY_FILE": lambda c: c.master_key,
        "BATON_QUEUE_TENANTS_FILE": lambda c: c.queue_tenants,
        "BATON_REDIS_PASSWORD_FILE": lambda c: c.redis_password,
    },
    "prefill": {"BATON_GRANT_PUBLIC_KEY_FILE": lambda c: c.grant_public_key},
    "decode": {"BATON_GRANT_PUBLIC_KEY_FILE": lambda c: c.grant_public_key},
}
"""Each service is told where its own secrets are, and no other's."""


@dataclass(frozen=True, slots=True)
class StackPlan:
    """A stack as decided: settings with nothing left open, and where everything lies.

    `own_nats`, `own_redis`: started by us, with our passwords; else somebody else's servers.
    """

    settings: Settings
    state: StateFolder
    credentials: Credentials
    own_nats: bool
    own_redis: bool
    threads: int = 1  # of torch in a worker, where settings leave them open


def instance_names(settings: Settings) -> dict[str, str]:
    """Process name to service, of everything but the two servers."""
    schedulers, workers = pool_schedulers(settings), pool_workers(settings)
    names = {service: service for service in CONTROL}
    names |= dict.fromkeys(schedulers, "scheduler")
    names |= {service: service for service in ("batch", "gateway")}
    return names | {name: role for name, (role, _) in workers.items()}


def pool_schedulers(settings: Settings) -> dict[str, ModelEntry]:
    """Name of each scheduler process to the model whose pool it leads: `scheduler`, or `scheduler-<pool>`."""
    return {f"scheduler{_suffix(settings, model)}": model for model in served_models(settings)}


def pool_workers(settings: Settings) -> dict[str, tuple[str, ModelEntry]]:
    """Name of each worker process to its role and model: `decode-1`, or `decode-<pool>-1`."""
    return {
        f"{role}{_suffix(settings, model)}-{number}": (role, model)
        for model in served_models(settings)
        for role, count in (("prefill", model.prefill), ("decode", model.decode))
        for number in range(1, (count or 0) + 1)
    }


def _suffix(settings: Settings, model: ModelEntry) -> str:
    return f"-{model.pool}" if settings.models else ""


def process_settings(settings: Settings, name: str) -> Settings:
    """What one process is told: of models all, but schedulers and workers only their own."""
    if (leader := pool_schedulers(settings).get(name)) is not None:
        return for_model(settings, leader)
    role, model = pool_workers(settings).get(name, ("", None))
    if model is None:
        return settings
    told = for_model(settings, model)
    classes = worker_classes(model, role, int(name.rpartition("-")[2]))
    return told.model_copy(update={"engine": told.engine.model_copy(update={"classes": classes})}) if classes else told


def metrics_ports(settings: Settings) -> dict[str, int]:
    """Process name to port of its metrics: counted on from the one that is set, all 0 when any will do.

    Raises SettingsError when there are not so many ports.
    """
    names, first = instance_names(settings), settings.metrics.port
    if first + len(names) > 65536:
        raise SettingsError(f"metrics.port = {first}: {len(names)} processes count on from it", param="metrics.port")
    return {name: first + number if first else 0 for number, name in enumerate(names)}


def stop_limit_s(settings: Settings) -> int:
    """Seconds the stop of a whole stack may take: what streams are given, and the rest."""
    return STOP_S + math.ceil(settings.gateway.shutdown_s)


def stop_order(settings: Settings) -> list[list[str]]:
    """Groups of process names; a group stops when the one before it has.

    1. gateway: takes no new request, lets streams finish within its limit, cancels the rest, settles them.
       batch likewise: its items go back to the queue.
    2. scheduler: nobody asks for places any more, and it must not place on workers that leave.
    3. prefill: what is computed has been pulled or is no longer wanted.
    4. decode: holds the KV to the last, since requests that ended early still free theirs.
    5. prefix-cache-index: has heard the workers' last announcements.
    6. policy: takes the settlements that are still in NATS.
    7. nats, which everybody above speaks through.
    8. redis last: policy writes there until it has stopped.
    """
    names = instance_names(settings)

    def of(service: str) -> list[str]:
        return [name for name, what in names.items() if what == service]

    services = ("scheduler", "prefill", "decode", "prefix-cache-index", "policy")
    return [of("gateway") + of("batch"), *(of(service) for service in services), ["nats"], ["redis"]]


def base_environment(env: Mapping[str, str]) -> dict[str, str]:
    """What a child keeps of our environment: all but Baton's own variables, which are given anew to each."""
    own = ("NATS_URL", "REDIS_URL")
    return {
        name: value
        for name, value in env.items()
        if not (name in own or name.startswith(tuple(f"BATON_{section.upper()}_" for section in SECTIONS)))
        and not (name.startswith("BATON_") and name.endswith("_FILE"))
    }


def service_spec(plan: StackPlan, name: str, service: str, env: Mapping[str, str]) -> ChildSpec:
    """One service process: its settings and secrets by environment, threads bounded by its share of the cores."""
    threads = str(plan.settings.engine.threads or plan.threads) if service in ("prefill", "decode") else "1"
    child_env = {
        **base_environment(env),
        **as_environment(process_settings(plan.settings, name)),
        READY_VARIABLE: str(plan.state.ready(name)),
        "BATON_METRICS_PORT": str(metrics_ports(plan.settings)[name]),
        # A worker's threads sleep while they wait: the other workers need the core.
        "OMP_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    child_env |= {variable: str(path(plan.credentials)) for variable, path in SECRET_FILES.get(service, {}).items()}
    if plan.own_nats:
        child_env[NATS_PASSWORD_VARIABLE] = str(plan.credentials.nats_password(service))
    elif password := env.get(NATS_PASSWORD_VARIABLE):
        child_env[NATS_PASSWORD_VARIABLE] = password
    if not plan.own_redis:
        child_env.pop("BATON_REDIS_PASSWORD_FILE", None)
        if "BATON_REDIS_PASSWORD_FILE" in SECRET_FILES.get(service, {}) and env.get("BATON_REDIS_PASSWORD_FILE"):
            child_env["BATON_REDIS_PASSWORD_FILE"] = env["BATON_REDIS_PASSWORD_FILE"]
    # beside what streams take to finish, requests are settled and connections flushed
    stop_s = 15.0 + (plan.settings.gateway.shutdown_s if service == "gateway" else 0.0)
    return ChildSpec(
        name=name,
        command=(sys.executable, "-m", f"services.{service.replace('-', '_')}"),
        env=child_env,
        folder=ROOT,
        log=plan.state.log(name),
        ready=ready_file(plan.state.ready(name)),
        mark=ready_time(plan.state.ready(name)),
        start_timeout_s=WORKER_START_S if service in ("prefill", "decode") else START_S,
        stop_timeout_s=stop_s,
    )


def ready_file(path: Path) -> ReadyProbe:
    """Ready, or failed, when there is a report of this very process, not of one before it."""

    def probe(pid: int) -> Mapping[str, object] | None:
        reports = (read_ready(path), read_ready(failure_path(path)))
        return next((facts for facts in reports if facts is not None and facts.get("pid") == pid), None)

    return probe


def ready_time(path: Path) -> Mark:
    """The time of the report of this very process, which it sets anew while it moves."""

    def mark(pid: int) -> float | None:
        with suppress(FileNotFoundError):
            changed = path.stat().st_mtime
            if (read_ready(path) or {}).get("pid") == pid:
                return changed
        return None

    return mark
