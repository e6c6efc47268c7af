"""A stack of its own for a measurement: its state in a temporary folder, and nothing left of it afterwards."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from services.cli.state import StateFolder
from shared.contracts.errors import Unavailable
from shared.lifecycle.ready import read_ready
from shared.settings.load import ROOT
from shared.telemetry import attributes as a

UP_S, DOWN_S = 240.0, 90.0
TRACES_S = 10.0
_SPANS = ("scheduler.place", "decode.run")


@dataclass(frozen=True, slots=True)
class OwnStack:
    """A running stack."""

    url: str
    api_key: str
    admin_key: str
    pid: int  # of its supervisor
    start_s: float  # how long it took to be ready
    folder: Path  # of its state

    def metrics_urls(self) -> dict[str, str]:
        """Process name to the address of its metrics."""
        found = {path.stem: read_ready(path) or {} for path in sorted(StateFolder(self.folder).run.glob("*.ready"))}
        return {name: facts["metrics_url"] for name, facts in found.items() if facts.get("metrics_url")}

    def models(self) -> list[str]:
        """Names it serves."""
        return [model["id"] for model in self._get("/v1/models", self.api_key)["data"]]

    def queue_delays(self, ids: Mapping[int, str]) -> dict[int, float]:
        """Seconds each request waited, by its number: in the scheduler's queue, and in its worker until its first step.

        From the traces; one that does not come in time is left out.
        """
        found: dict[int, float] = {}
        deadline = time.monotonic() + TRACES_S
        while len(found) < len(ids) and time.monotonic() < deadline:
            for number, request_id in ids.items():
                if number not in found and (delay := self._queue_delay(request_id)) is not None:
                    found[number] = delay
            time.sleep(0.1)
        return found

    def _queue_delay(self, request_id: str) -> float | None:
        with suppress(httpx.HTTPError):
            spans = self._get(f"/baton/traces/{request_id}", self.admin_key)["spans"]
            by_name = {span["name"]: span["attributes"] for span in spans}
            if all(name in by_name for name in _SPANS):
                placed, ran = (by_name[name] for name in _SPANS)
                return float(placed.get(a.QUEUE_S, 0.0)) + float(ran.get(a.WORKER_QUEUE_S, 0.0))
        return None

    def _get(self, path: str, key: str) -> Any:
        response = httpx.get(self.url + path, headers={"Authorization": f"Bearer {key}"}, timeout=10)
        response.raise_for_status()
        return response.json()


@contextmanager
def own_stack(settings: Mapping[str, object]) -> Iterator[OwnStack]:
    """Start a stack with these settings on a free port; stop it and clear it away at the end.

    Raises:
        Unavailable: it did not start; the message holds what it said.
    """
    folder = Path(tempfile.mkdtemp(prefix="baton-bench-"))
    env = {**os.environ, "BATON_STATE": str(folder)}
    flags = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    started = time.monotonic()
    try:
        done = _baton(["up", "--port", "0", "--detach", "--json", *flags], env, UP_S)
        if done.returncode:
            raise Unavailable(f"the stack did not start: {done.stderr.strip()[-800:]}")
        record = json.loads(done.stdout.splitlines()[-1])
        keys = {name: record[name] for name in ("url", "api_key", "admin_key", "pid")}
        yield OwnStack(**keys, start_s=time.monotonic() - started, folder=folder)
    finally:
        _baton(["down"], env, DOWN_S)
        shutil.rmtree(folder, ignore_errors=True)


def _baton(argv: list[str], env: Mapping[str, str], limit_s: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", *argv]
    try:
        return subprocess.run(
            command, cwd=ROOT, env=dict(env), capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired as exc:
        raise Unavailable(f"baton {argv[0]} took longer than {limit_s:.0f} s") from exc
