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

from shared.lifecycle.ready import failure_path, read_ready
from shared.lifecycle.stop import STOP_LIMIT_S
from shared.settings.load import ROOT
from tests.servers import NatsServer

PLAIN = "runtime.ready(port=7); await runtime.stop.wait()"


class Service:
    def __init__(self, folder: Path, url: str) -> None:
        self.ready = folder / "ready"
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
        self.env |= {"NATS_URL": url, "BATON_READY_FILE": str(self.ready), "BATON_LOG_FORMAT": "json"}
        self.started: list[subprocess.Popen[str]] = []

    def start(self, body: str, options: str = "", **env: str) -> subprocess.Popen[str]:
        code = f"""
import asyncio, time
from shared.lifecycle.runtime import run_service
async def main(runtime):
    {body}
run_service("policy", main{options})
"""
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
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
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


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


@pytest.mark.parametrize(
    "stuck", ["time.sleep(60)", "runtime.watchdog.watch(lambda: 'the engine stands still'); await runtime.stop.wait()"]
)
def test_what_stands_still_is_ended_and_leaves_its_stacks(service: Service, stuck: str) -> None:
    process = service.start(f"runtime.ready(); {stuck}", BATON_LIFECYCLE_HANG_S="1.5")
    code, errors = end(process)
    assert code == 1
    assert "Timeout (0:00:01.500000)!" in errors
    assert 'File "<string>", line' in errors or "run_service" in errors


def test_what_moves_is_left_alone(service: Service) -> None:
    process = service.start(PLAIN, BATON_LIFECYCLE_HANG_S="10")
    service.wait_ready()
    first = service.ready.stat().st_mtime
    deadline = time.monotonic() + 60
    while service.ready.stat().st_mtime < first + 10.5:  # longer than it may stand still
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 0


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


def test_the_limit_of_a_stop_grows_with_what_the_service_lets_finish(service: Service) -> None:
    tell = "print('left', signal.alarm(0), file=sys.stderr)"
    body = f"import signal, sys; {PLAIN}; {tell}"
    drain = ", drain_s=lambda settings: settings.gateway.shutdown_s"
    process = service.start(body, drain, BATON_GATEWAY_SHUTDOWN_S="100.5")
    service.wait_ready()
    process.send_signal(signal.SIGTERM)
    _, errors = end(process)
    left = int(errors.partition("left ")[2].split()[0])
    assert 100 < left <= STOP_LIMIT_S + 101


def test_only_who_was_ready_before_another_has_been_superseded(service: Service) -> None:
    tell = "print('superseded', runtime.superseded, file=__import__('sys').stderr)"
    other = json.dumps({"pid": 1})
    # Given one that was ready, and another that is ready since
    first = service.start(f"{PLAIN}; {tell}")
    service.wait_ready()
    service.ready.write_text(other)
    # And one that is told to stop before it is ready, in whose place its predecessor goes on
    second = service.start(f"print('waiting', flush=True); await runtime.stop.wait(); runtime.ready(); {tell}")
    assert second.stdout is not None
    assert second.stdout.readline() == "waiting\n"
    for process, told in ((first, "superseded True"), (second, "superseded False")):
        process.send_signal(signal.SIGTERM)
        code, errors = end(process)
        assert code == 0
        assert told in errors
    # Then the report in the file is still the other's
    assert service.ready.read_text() == other


def test_a_failure_is_told_beside_the_report_of_who_is_ready(service: Service) -> None:
    service.ready.write_text(json.dumps({"pid": 1}))
    process = service.start("runtime.secret('BATON_X_FILE')")
    assert end(process)[0] == 2
    assert read_ready(service.ready) == {"pid": 1}
    told = read_ready(failure_path(service.ready))
    assert told is not None
    assert told["pid"] == process.pid
    assert told["error"].startswith("BATON_X_FILE is not set")


def test_what_was_there_at_the_start_is_not_looked_through_for_garbage(service: Service) -> None:
    body = "import gc; runtime.ready(frozen=gc.get_freeze_count()); runtime.ready(frozen=gc.get_freeze_count())"
    process = service.start(f"{body}; await runtime.stop.wait()")
    deadline = time.monotonic() + 30
    while not (read_ready(service.ready) or {}).get("frozen"):  # the second call tells what the first one did
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 0
