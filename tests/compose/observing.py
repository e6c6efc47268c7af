"""What the profile `observe` must show of a stack that was just used."""

from __future__ import annotations

from typing import Any

import httpx

from services.cli.servers import free_port
from shared.contracts.subjects import SERVICES
from tests.compose.boards import BOARDS, expressions, read_board, series
from tests.compose.project import Project
from tests.stack.running import until

OBSERVERS = ("prometheus", "jaeger", "grafana")
SCRAPED_S, ARRIVED_S = 90, 60


def prepare(project: Project, observers: list[str]) -> None:
    """Before the stack starts: ports of its own, and traces sent to Jaeger if there is to be one."""
    project.variables |= {f"BATON_{name.upper()}_PORT": str(free_port()) for name in OBSERVERS}
    if "jaeger" in observers:
        project.variables["BATON_TELEMETRY_OTLP_ENDPOINT"] = "http://jaeger:4318"


def start(project: Project, observers: list[str]) -> None:
    project.compose("--profile", "observe", "up", "--detach", "--no-build", "--no-deps", *observers)


def prometheus_scrapes(project: Project, containers: int) -> str:
    """Every container of a service is scraped, and every expression of the boards is understood."""
    url = f"http://127.0.0.1:{project.variables['BATON_PROMETHEUS_PORT']}"

    def targets() -> list[dict[str, Any]]:
        answer = httpx.get(f"{url}/api/v1/targets", params={"state": "active"}, timeout=10)
        found: list[dict[str, Any]] = answer.json()["data"]["activeTargets"]
        return found

    def all_up() -> bool:
        try:
            found = targets()
        except httpx.HTTPError:
            return False
        return len(found) == containers and all(target["health"] == "up" for target in found)

    until(all_up, SCRAPED_S, lambda: [(t["labels"]["job"], t["health"], t["lastError"]) for t in targets()])
    jobs = {target["labels"]["job"] for target in targets()}
    assert jobs == {service.replace("-", "_") for service in SERVICES}, jobs
    lines = [f"{containers} targets up"]
    for path in BOARDS:
        board = read_board(path)
        asked = list(expressions(board))
        empty = [panel for panel, expression in asked if not series(url, expression)]
        lines.append(
            f"{board['title']}: {len(asked)} expressions understood, {len(asked) - len(empty)} with data"
            + (f"; none yet: {', '.join(dict.fromkeys(empty))}" if empty else "")
        )
    return "\n           ".join(lines)


def jaeger_shows(project: Project, trace_id: str) -> str:
    """A request's trace is in Jaeger with spans of all the services it went through."""
    url = f"http://127.0.0.1:{project.variables['BATON_JAEGER_PORT']}/api/traces/{trace_id}"

    def services() -> set[str]:
        try:
            traces = httpx.get(url, timeout=10).json()["data"]
        except (httpx.HTTPError, ValueError, KeyError):
            return set()
        return {process["serviceName"] for trace in traces for process in trace["processes"].values()}

    wanted = set(SERVICES) - {"batch"}
    until(lambda: wanted <= services(), ARRIVED_S, services)
    return f"trace {trace_id[:8]}… with spans of {len(wanted)} services"


def grafana_has(project: Project) -> str:
    """Both boards are provisioned, and anybody may look."""
    url = f"http://127.0.0.1:{project.variables['BATON_GRAFANA_PORT']}"

    def titles() -> set[str]:
        try:
            return {found["title"] for found in httpx.get(f"{url}/api/search?tag=baton", timeout=10).json()}
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return set()

    wanted = {read_board(path)["title"] for path in BOARDS}
    until(lambda: titles() == wanted, SCRAPED_S, titles)
    return f"boards {', '.join(sorted(wanted))}"
