"""A service process as `run_service` makes it: ready file, exit codes, signals, and a stop that hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.lifecycle.ready import read_ready
from shared.settings.load import ROOT
from tests.servers import NatsServer

PLAIN = "runtime.ready(port=7); await runtime.stop.wait()"


class Service:
    def __init__(self, folder: Path, url: str) -> None:
        self.ready = folder / "ready"
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
        self.env |= {"NATS_URL": url, "BATON_READY_FILE": str(self.ready), "BATON_LOG_FORMAT": "json"}
        self.started: list[subprocess.Popen[str]] = []

    def start(self, body: str, **env: str) -> subprocess.Popen[str]:
        code = f"""
import asyncio, time
from shared.lifecycle.runtime import run_service
async def main(runtime):
    {body}
run_service("policy", main)
"""
        process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, env={**self.env, **env}, stderr=subprocess.PIPE, text=True
        )
        self.started.append(process)
        return process

    def wait_ready(self) -> dict[str, object]:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if found := read_ready(self.ready):
                return found
            time.sleep(0.02)
        raise AssertionError("not ready")


@pytest.fixture
def service(tmp_path: Path, nats_server: NatsServer) -> Iterator[Service]:
    found = Service(tmp_path, nats_server.url)
    yield found
    for process in found.started:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=20)
    return process.returncode, errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_unwinds_the_stack_in_reverse(service: Service, number: signal.Signals) -> None:
    body = "runtime.stack.callback(print, 'one', file=__import__('sys').stderr); " + PLAIN
    process = service.start(body)
    assert {"pid": process.pid, "port": 7}.items() <= service.wait_ready().items()
    process.send_signal(number)
    code, errors = end(process)
    assert code == 0
    assert "one" in errors
    lines = [json.loads(line) for line in errors.splitlines() if line.startswith("{")]
    assert {"level": "info", "service": "policy", "message": "ready port=7"}.items() <= lines[0].items()


@pytest.mark.parametrize(
    ("body", "env", "code", "words"),
    [
        (PLAIN, {"BATON_GATEWAY_PORT": "x"}, 2, "policy: environment BATON_GATEWAY_PORT"),
        (PLAIN, {"NATS_URL": ""}, 2, "policy: NATS_URL is not set"),
        (PLAIN, {"BATON_NATS_PASSWORD_FILE": "/none"}, 2, "policy: /none: secret file cannot be read"),
        ("raise RuntimeError('odd')", {}, 1, "RuntimeError: odd"),
        ("runtime.secret('BATON_X_FILE')", {}, 2, "policy: BATON_X_FILE is not set"),
    ],
)
def test_a_failure_is_one_line_and_an_exit_code(
    service: Service, body: str, env: dict[str, str], code: int, words: str
) -> None:
    found, errors = end(service.start(body, **env))
    assert found == code
    assert words in errors
    assert code == 1 or "Traceback" not in errors


def test_a_stop_that_hangs_ends_and_a_second_signal_ends_it_at_once(service: Service) -> None:
    hang = "runtime.stack.push_async_callback(asyncio.sleep, 60); " + PLAIN
    process = service.start(hang)
    service.wait_ready()
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == -signal.SIGTERM
    service.ready.unlink()
    limited = service.start(hang)
    service.wait_ready()
    limited.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    # What the limit of the stop does when it is reached: nothing inside the process could hold it up.
    limited.send_signal(signal.SIGALRM)
    assert end(limited)[0] == -signal.SIGALRM
