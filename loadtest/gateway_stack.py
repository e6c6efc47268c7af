"""nats-server, gateways and the backend of `loadtest/gateway_backend.py` as children of a measurement."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TypeVar

from loadtest.gateway_notes import TIMES_VARIABLE
from services.cli.servers import NATS_CORES, free_port, nats_binary, nats_cores
from shared.contracts.errors import Unavailable
from shared.lifecycle.ready import READY_VARIABLE, read_ready
from shared.settings.load import ROOT

START_S, STOP_S = 60.0, 20.0
NATS_CONFIG = "jetstream { max_memory_store: 16MB, max_file_store: 2GB }\nmax_payload: 8MB\n"

Found = TypeVar("Found")


class GatewayStack:
    """Running gateways that share `port`."""

    def __init__(self, folder: Path, nats_url: str, port: int, gateways: list[int]) -> None:
        self.port = port
        self.gateways = gateways  # process ids
        self.notes: dict[str, dict[str, float]] = {}
        """What a timed gateway noted of each request, once it has ended; see `loadtest/gateway_timed.py`."""
        self._folder = folder
        self._nats_url = nats_url

    @contextmanager
    def backend(self, step_s: float) -> Iterator[dict[str, list[float]]]:
        """A backend with steps of this length.

        Afterwards, by request id, when each finished request came to the scheduler and when each of its tokens left,
        monotonic seconds.
        """
        sent: dict[str, list[float]] = {}
        command = [sys.executable, "-m", "loadtest.gateway_backend", "--step-ms", str(step_s * 1e3)]
        env = {**os.environ, "NATS_URL": self._nats_url}
        with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                if process.stdout.readline().strip() != "ready":
                    raise Unavailable("the backend did not start")
                yield sent
            finally:
                process.terminate()
                told = process.stdout.read()
        sent.update(json.loads(told or "{}"))


@contextmanager
def gateway_stack(count: int, settings: Mapping[str, str], *, timed: bool = False) -> Iterator[GatewayStack]:
    """`count` gateways on one free port, behind them a nats-server; gone at the end.

    Args:
        settings: environment variables of the gateways.
        timed: they note what of a request's time is their own.

    Raises:
        Unavailable: one of them did not start; the message holds what it said.
    """
    folder = Path(tempfile.mkdtemp(prefix="baton-bench-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        config = folder / "nats.conf"
        config.write_text(NATS_CONFIG)
        command = [str(nats_binary()), "-c", str(config), "-a", "127.0.0.1", "-p", "-1", "-sd", str(folder / "nats")]
        nats = _start(stack, [*command, "--ports_file_dir", str(folder)], _nats_env(), folder / "nats.log")
        ports = folder / f"nats-server_{nats.pid}.ports"
        url = _until("nats-server", nats, folder / "nats.log", lambda: _nats_url(ports))
        port = free_port()
        times = folder / "times.json"
        module = "loadtest.gateway_timed" if timed else "services.gateway"
        env = {
            "NATS_URL": url,
            TIMES_VARIABLE: str(times),
            "BATON_GATEWAY_PORT": str(port),
            "BATON_LOG_LEVEL": "warning",
            "TOKENIZERS_PARALLELISM": "false",  # as `./baton up` has it
            **settings,
        }
        gateways, inner = [], stack.enter_context(ExitStack())
        for number in range(count):
            log, ready = folder / f"gateway-{number}.log", folder / f"gateway-{number}.ready"
            told = {**env, READY_VARIABLE: str(ready)}
            process = _start(inner, [sys.executable, "-m", module], told, log)
            _until("the gateway", process, log, lambda ready=ready: read_ready(ready))  # type: ignore[misc]
            gateways.append(process.pid)
        running = GatewayStack(folder, url, port, gateways)
        yield running
        if timed:
            inner.close()
            running.notes = json.loads(times.read_text(encoding="utf-8"))


def _nats_env() -> dict[str, str]:
    """As `./baton up` starts it."""
    return {NATS_CORES: os.environ.get(NATS_CORES) or str(nats_cores(len(os.sched_getaffinity(0))))}


def _start(stack: ExitStack, command: list[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    file: IO[bytes] = stack.enter_context(log.open("wb"))
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **env}, stdout=file, stderr=file)
    stack.callback(_stop, process)
    return process


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _until(what: str, process: subprocess.Popen[bytes], log: Path, look: Callable[[], Found | None]) -> Found:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        if (found := look()) is not None:
            return found
        time.sleep(0.02)
    raise Unavailable(f"{what} did not start: {log.read_text(errors='replace')[-800:]}")


def _nats_url(ports: Path) -> str | None:
    try:
        return str(json.loads(ports.read_text())["nats"][0])
    except (OSError, ValueError):
        return None
