"""Real servers for tests, on ports they choose themselves: nats-server and valkey-server as child processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest
import redis

from services.cli.servers import free_port, valkey_binary

BIN = Path(sys.executable).parent
START_TIMEOUT_S = 20.0
Found = TypeVar("Found")


@dataclass
class NatsServer:
    """A running nats-server with JetStream. `kill` and `start` keep the port and the store."""

    folder: Path
    config: Path
    port: int = -1
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> NatsServer:
        ports = self.folder / "ports"
        ports.mkdir(exist_ok=True)
        for old in ports.iterdir():
            old.unlink()
        command = [str(BIN / "nats-server"), "-c", str(self.config), "-a", "127.0.0.1", "-p", str(self.port)]
        command += ["-sd", str(self.folder / "store"), "--ports_file_dir", str(ports)]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        found = wait_for(lambda: _ports_file(ports), self.process, self.folder / "log")
        self.port = int(found["nats"][0].rpartition(":")[2])
        return self

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(10)
            self.process = None


def _ports_file(folder: Path) -> dict[str, list[str]] | None:
    for path in folder.glob("nats-server_*.ports"):
        with suppress(ValueError):
            found: dict[str, list[str]] = json.loads(path.read_text())
            return found
    return None


def wait_for(probe: Callable[[], Found | None], process: subprocess.Popen[bytes], log: Path) -> Found:
    """Poll `probe` until it gives something; fails with the log when the process ends or time runs out."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        if (found := probe()) is not None:
            return found
        time.sleep(0.01)
    raise AssertionError(f"server did not start: {log.read_text()[-2000:]}")


def start_nats(folder: Path, config: str = "") -> NatsServer:
    """A nats-server of its own; `config` defaults to JetStream with small limits and no users."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "nats.conf"
    path.write_text(config or "jetstream { max_mem: 64MB, max_file: 2GB }\nmax_payload: 8MB\n")
    return NatsServer(folder, path).start()


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One NATS for the whole run, without users. Tests keep apart by their subjects."""
    server = start_nats(tmp_path_factory.mktemp("nats"))
    yield server
    server.kill(signal.SIGTERM)


@pytest.fixture
def own_nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A NATS the test may kill."""
    server = start_nats(tmp_path / "nats")
    yield server
    server.kill(signal.SIGTERM)


@dataclass
class RedisServer:
    """A running valkey-server on a port of its own, append-only file on."""

    folder: Path
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> RedisServer:
        self.folder.mkdir(parents=True, exist_ok=True)
        # valkey-server cannot choose a port itself, so another process may win it: then try the next.
        for _ in range(5):
            port = self.port or free_port()
            command = [str(valkey_binary()), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
            command += ["--appendonly", "yes", "--save", "", "--daemonize", "no"]
            with (self.folder / "log").open("ab") as log:
                self.process = subprocess.Popen(command, stdout=log, stderr=log)
            with suppress(AssertionError):
                wait_for(lambda p=port: _answers(p), self.process, self.folder / "log")  # type: ignore[misc]
                self.port = port
                return self
            self.kill()
        raise AssertionError((self.folder / "log").read_text()[-2000:])

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)
            self.process.wait(10)
            self.process = None


def _answers(port: int) -> bool | None:
    try:
        with redis.Redis(port=port, socket_timeout=1) as client:
            return bool(client.ping()) or None
    except redis.RedisError:
        return None


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One Redis for the whole run. Tests keep apart by their key prefixes, or flush it."""
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.kill(signal.SIGTERM)


@pytest.fixture
def own_redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis the test may kill."""
    server = RedisServer(tmp_path / "redis").start()
    yield server
    server.kill(signal.SIGTERM)
