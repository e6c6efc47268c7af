"""`./baton up` with fake workers: ready after a token, killed children come back, and nothing is left over."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from services.cli.state import StateFolder
from shared.settings.load import ROOT
from tests import answer_files
from tests.servers import NatsServer, RedisServer

COMMAND = (sys.executable, "-m", "services.cli")


class Stack:
    """Runs the command line on a state folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {
            name: value for name, value in os.environ.items() if not name.startswith(("BATON_", "NATS_", "REDIS_"))
        }
        self.env |= {"BATON_STATE": str(folder), **answer_files.environment()}
        self.env["PYTHONPATH"] = f"{ROOT}:{answer_files.TAP}"

    def run(self, *argv: str, timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
        command = [*COMMAND, *argv]
        return subprocess.run(command, cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=timeout_s)

    def processes(self) -> dict[int, str]:
        """Living processes of this stack, found by environment, arguments or working folder; their command lines."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                environment = (folder / "environ").read_bytes()
                traces = f"{line} {os.readlink(folder / 'cwd')}"
                if f"BATON_STATE={self.folder}".encode() in environment or str(self.folder) in traces:
                    found[int(folder.name)] = line
        found.pop(os.getpid(), None)
        return found


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    found = Stack(tmp_path / "state")
    yield found
    found.run("down")
    for pid in found.processes():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def up_arguments(*more: str) -> tuple[str, ...]:
    return ("up", "--fake", "--port", "0", *more)


def chat(url: str, key: str) -> tuple[int, dict[str, object]]:
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=30)
    model = "smollm2-135m-instruct"
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Authorization": f"Bearer {key}"})
    answer = connection.getresponse()
    found: dict[str, object] = json.loads(answer.read())
    connection.close()
    return answer.status, found


def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def nothing_left(stack: Stack) -> None:
    until(lambda: not stack.processes(), 30)
    state = StateFolder(stack.folder)
    assert not state.pool_folder().exists()
    assert not list(state.run.iterdir())
    assert not state.record.exists()
    assert state.holder() is None


@pytest.mark.model
def test_up_serve_kill_down(stack: Stack, default_model_dir: Path) -> None:
    started = stack.run(*up_arguments("--detach", "--json"))
    assert started.returncode == 0, started.stderr
    lines = started.stdout.splitlines()
    assert len(lines) == 1
    record = json.loads(lines[0])
    assert sorted(record) == ["admin_key", "api_key", "pid", "url"]
    assert chat(record["url"], record["api_key"])[0] == 200

    # No secret stands on a command line, where every user of the machine could read it.
    secrets = [path.read_bytes() for path in (stack.folder / "secrets").iterdir() if path.suffix != ".conf"]
    lines_shown = " ".join(stack.processes().values())
    assert not [secret for secret in secrets if secret.decode(errors="replace").strip() in lines_shown]

    second = stack.run(*up_arguments())
    assert second.returncode == 1
    assert "already runs" in second.stderr

    # A killed worker and a killed gateway come back, the gateway on its port.
    log = stack.folder / "logs" / "up.log"
    for service, name in (("decode", "decode-1"), ("gateway", "gateway")):
        victim = next(pid for pid, line in stack.processes().items() if line.strip().endswith(f"services.{service}"))
        os.kill(victim, signal.SIGKILL)
        until(partial(told, log, f"{name} is back"))
    until(lambda: answers(record))

    down = stack.run("down")
    assert down.returncode == 0, down.stderr
    nothing_left(stack)
    assert stack.run("down").returncode == 0


def told(log: Path, words: str) -> bool:
    return words in log.read_text()


def answers(record: dict[str, str]) -> bool:
    with suppress(OSError):
        return chat(record["url"], record["api_key"])[0] == 200
    return False


@pytest.mark.model
def test_ctrl_c_and_a_killed_supervisor_leave_nothing(
    stack: Stack, default_model_dir: Path, nats_server: NatsServer, redis_server: RedisServer
) -> None:
    """The first time on servers that are already there."""
    for number, servers in ((signal.SIGINT, (nats_server.url, redis_server.url)), (signal.SIGKILL, ("", ""))):
        stack.env |= dict(zip(("NATS_URL", "REDIS_URL"), servers, strict=True))
        command = [*COMMAND, *up_arguments("--json")]
        process = subprocess.Popen(command, cwd=ROOT, env=stack.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["pid"] == process.pid
        own = [line for line in stack.processes().values() if "nats-server" in line or "valkey-server" in line]
        assert len(own) == (0 if number == signal.SIGINT else 2)
        process.send_signal(number)
        if number == signal.SIGINT:
            process.send_signal(number)  # as `timeout` does: to the process and to its group
        code = process.wait(60)
        assert code == (0 if number == signal.SIGINT else -signal.SIGKILL)
        process.stdout.close()
        process.stderr.close()
        if number == signal.SIGKILL:
            until(lambda: not stack.processes(), 40)
            stack.run("down")
        nothing_left(stack)


@pytest.mark.model
def test_a_second_ctrl_c_does_not_wait_and_still_clears_away(stack: Stack, default_model_dir: Path) -> None:
    # Given: a gateway that cannot stop
    process = subprocess.Popen(
        [*COMMAND, *up_arguments("--json")],
        cwd=ROOT,
        env=stack.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    process.stdout.readline()
    gateway = next(pid for pid, line in stack.processes().items() if "services.gateway" in line)
    os.kill(gateway, signal.SIGSTOP)
    # When: Ctrl-C waits for it, and comes again
    process.send_signal(signal.SIGINT)
    time.sleep(1.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    # Then: it ends sooner than the gateway's 15 s, and leaves nothing
    assert process.wait(10) == 0
    process.stdout.close()
    nothing_left(stack)


@pytest.mark.model
def test_ctrl_c_before_it_is_ready_is_no_success(stack: Stack, default_model_dir: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, *up_arguments()], cwd=ROOT, env=stack.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    until(lambda: "NATS at" in (process.stderr.readline() if process.stderr else ""))
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, errors
    assert "Traceback" not in errors
    assert printed == ""
    nothing_left(stack)


def test_output_into_a_closed_pipe_is_no_fault() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*COMMAND, "--help"], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.returncode == 128 + signal.SIGPIPE
    assert done.stderr == ""


@pytest.mark.model
def test_a_failing_start_is_a_plain_error_and_takes_everything_down(stack: Stack, default_model_dir: Path) -> None:
    failed = stack.run(*up_arguments("--set", "engine.token_budget=1"))
    assert failed.returncode == 1
    assert "baton: decode-1 cannot start: engine.token_budget is 1" in failed.stderr
    assert "Traceback" not in failed.stderr
    nothing_left(stack)


def test_wrong_settings_are_told_before_anything_starts(stack: Stack, tmp_path: Path) -> None:
    config = tmp_path / "baton.toml"
    config.write_text("schema = 1\n[gateway]\nprot = 1\n")
    wrong = stack.run("up", "--config", str(config))
    assert wrong.returncode == 2
    assert wrong.stderr.startswith(f"baton: {config}:3: unknown field 'prot'")
    missing = stack.run(*up_arguments("--model", "/no/such/folder"))
    assert missing.returncode == 2
    assert "model folder /no/such/folder does not exist" in missing.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = stack.run("up", "--port", str(taken.getsockname()[1]))
    assert busy.returncode == 2
    assert "choose another with --port" in busy.stderr
    assert "no stack is running" in stack.run("status").stderr
