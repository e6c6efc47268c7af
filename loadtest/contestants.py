"""Engines and servers that `./baton bench peers` measures: each is started once, and then runs loop after loop."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, Protocol

import httpx

from loadtest.closed_loop import Job, order_of
from loadtest.http_loop import run_http
from loadtest.own_stack import own_stack
from shared.contracts.errors import Unavailable
from shared.settings.load import ROOT

START_S, LOOP_S, STOP_S = 1200.0, 1200.0, 30.0
LAST_WORDS = 1500


class Contestant(Protocol):
    """Something that runs closed loops. Methods raise Unavailable when it does not start, fails, or takes too long."""

    @property
    def build(self) -> str:
        """What it is, with its version; known once it is started."""
        ...

    def start(self) -> None: ...

    def pids(self) -> Sequence[int]:
        """Roots of its process trees."""
        ...

    def run(self, jobs: Sequence[Job], concurrency: int) -> dict[str, Any]:
        """Run a loop; its `LoopResult` as a dictionary. Raises ValueError when the work was not done whole."""
        ...

    def stop(self) -> None:
        """End it; harmless where it does not run."""
        ...


class _Process:
    """A child with a log, ended with all that it started."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], pipes: bool) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop)
        pipe = subprocess.PIPE if pipes else None
        self.child = subprocess.Popen(
            list(command),
            cwd=ROOT,
            env={**os.environ, **env},
            stdin=pipe or subprocess.DEVNULL,
            stdout=pipe or self._log,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        self.name = " ".join(command[:3])

    def failed(self, what: str) -> Unavailable:
        """An error with the last words of the child."""
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip()[-LAST_WORDS:]
        return Unavailable(f"{self.name} {what}: {said}")

    def stop(self) -> None:
        if self.child.stdin:
            # a driver ends with its orders, and clears its pool away
            with suppress(OSError, ValueError):
                self.child.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self.child.wait(STOP_S)
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.child.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.child.wait(STOP_S)
                break
        with suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self._log.close()


class EngineProcess:
    """A driver of `closed_loop.serve`."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self._command, self._env = command, env or {}
        self._process: _Process | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.build = ""

    def start(self) -> None:
        self._process = _Process(self._command, self._env, pipes=True)
        threading.Thread(target=self._read, args=(self._process.child.stdout,), daemon=True).start()
        self.build = str(self._answer(START_S, "did not start")["build"])

    def pids(self) -> Sequence[int]:
        return [self._process.child.pid] if self._process else []

    def run(self, jobs: Sequence[Job], concurrency: int) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.child.stdin is not None
        try:
            self._process.child.stdin.write(order_of(jobs, concurrency))
            self._process.child.stdin.flush()
        except OSError as exc:
            raise self._process.failed("failed") from exc
        return self._answer(LOOP_S, "failed")

    def stop(self) -> None:
        if self._process:
            self._process.stop()
            self._process = None

    def _read(self, stdout: IO[str]) -> None:
        for line in stdout:
            self._lines.put(line)
        self._lines.put("")

    def _answer(self, limit_s: float, what: str) -> dict[str, Any]:
        assert self._process is not None
        try:
            line = self._lines.get(timeout=limit_s)
        except queue.Empty as exc:
            raise self._process.failed(f"said nothing for {limit_s:g} s") from exc
        if not line:
            self._process.child.wait(STOP_S)
            raise self._process.failed(what)
        answer: dict[str, Any] = json.loads(line)
        return answer


class HttpServer:
    """A peer's server: `{port}` in its command is a free port."""

    MODEL = "bench"
    IGNORE_EOS: Mapping[str, Any] = {"ignore_eos": True}

    def __init__(
        self,
        command: Sequence[str],
        build: str,
        env: Mapping[str, str] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        self._command, self._env, self._more = command, env or {}, {**self.IGNORE_EOS, **(more or {})}
        self.build = build
        self._process: _Process | None = None
        self._url = ""

    def start(self) -> None:
        port = _free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._process = _Process([part.format(port=port) for part in self._command], self._env, pipes=False)
        deadline = time.monotonic() + START_S
        while not _healthy(self._url):
            if self._process.child.poll() is not None:
                raise self._process.failed("did not start")
            if time.monotonic() > deadline:
                raise self._process.failed(f"was not ready within {START_S:g} s")
            time.sleep(0.5)

    def pids(self) -> Sequence[int]:
        return [self._process.child.pid] if self._process else []

    def run(self, jobs: Sequence[Job], concurrency: int) -> dict[str, Any]:
        assert self._process is not None
        try:
            return run_http(self._url, jobs, concurrency, self.MODEL, self._more).body()
        except Unavailable as exc:
            raise self._process.failed(f"failed: {exc.message}") from exc

    def stop(self) -> None:
        if self._process:
            self._process.stop()
            self._process = None


class BatonStack:
    """The whole stack, through its gateway."""

    TOLD: Mapping[str, Any] = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}

    def __init__(self, settings: Mapping[str, object], build: str) -> None:
        self._settings, self.build = settings, build
        self._stack = ExitStack()
        self._url = self._key = self._model = ""
        self._pid = 0

    def start(self) -> None:
        stack = self._stack.enter_context(own_stack(self._settings))
        self._url, self._key, self._pid = stack.url, stack.api_key, stack.pid
        self._model = stack.models()[0]

    def pids(self) -> Sequence[int]:
        return [self._pid] if self._pid else []

    def run(self, jobs: Sequence[Job], concurrency: int) -> dict[str, Any]:
        return run_http(self._url, jobs, concurrency, self._model, self.TOLD, self._key).body()

    def stop(self) -> None:
        self._stack.close()
        self._pid = 0


class BatchedBench:
    """llama.cpp's own bench of a static batch: loads its model every time, and does not time that."""

    def __init__(self, binary: Path, model: Path, threads: int, build: str) -> None:
        self._binary, self._model, self._threads, self.build = binary, model, threads, build

    def start(self) -> None:
        """Nothing to keep."""

    def pids(self) -> Sequence[int]:
        return []

    def run(self, jobs: Sequence[Job], concurrency: int) -> dict[str, Any]:
        prompt, output = len(jobs[0].prompt), jobs[0].max_tokens
        command = [self._binary, "-m", self._model, "-c", concurrency * (prompt + output + 32), "-b", 2048, "-ub", 512]
        command += ["-npp", prompt, "-ntg", output, "-npl", concurrency, "-t", self._threads, "-tb", self._threads]
        command += ["--output-format", "jsonl"]
        try:
            done = subprocess.run(
                [str(part) for part in command], capture_output=True, text=True, timeout=LOOP_S, check=False
            )
        except subprocess.TimeoutExpired as exc:
            raise Unavailable(f"{self._binary.name} did not end within {LOOP_S:g} s") from exc
        if done.returncode:
            raise Unavailable(f"{self._binary.name} failed: {done.stderr.strip()[-LAST_WORDS:]}")
        return batched_result(done.stdout, concurrency)

    def stop(self) -> None:
        """Nothing was kept."""


def batched_result(printed: str, concurrency: int) -> dict[str, Any]:
    """What llama-batched-bench printed, in the fields of a `LoopResult`. Raises Unavailable where there is nothing."""
    for line in printed.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            tokens = row["pl"] * row["tg"]
            return {
                "concurrency": concurrency,
                "prompt_tokens": row["pl"] * row["pp"],
                "output_tokens": tokens,
                "seconds": row["t_pp"] + row["t_tg"],
                "first_s": [],
                "gaps_s": [],
                "prefill_s": row["t_pp"],
                "full_tokens": tokens,
                "full_s": row["t_tg"],
            }
    raise Unavailable("llama-batched-bench printed no result")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _healthy(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    return False
