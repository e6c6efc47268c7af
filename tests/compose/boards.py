"""The expressions of Grafana's boards, and what a Prometheus says to them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from shared.settings.load import ROOT

BOARDS = sorted((ROOT / "deploy" / "observe" / "grafana" / "dashboards").glob("*.json"))


def read_board(path: Path) -> dict[str, Any]:
    board: dict[str, Any] = json.loads(path.read_text())
    return board


def expressions(board: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(panel, expression) of every query."""
    for panel in board["panels"]:
        yield from ((panel["title"], target["expr"]) for target in panel.get("targets", []))


def series(url: str, expression: str) -> list[dict[str, Any]]:
    """What an expression gives now, with Grafana's variables filled in; AssertionError when it is not understood."""
    query = expression.replace("$__rate_interval", "1m").replace("$model", ".*")
    answer = httpx.get(f"{url}/api/v1/query", params={"query": query}, timeout=30).json()
    assert answer["status"] == "success", f"{query}: {answer.get('error')}"
    found: list[dict[str, Any]] = answer["data"]["result"]
    return found
