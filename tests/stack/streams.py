"""Streams in threads of their own, and what tests do to a stack beneath them."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai

from tests.stack.running import MODEL, Baton, until

END_S = 60.0
"""Every client has its end within this, whatever died."""
RESUME_S = 60.0
"""On an idle machine 10 s are promised (docs/results/resume.txt); here others may compute."""
TOKENS = 600


class Stream:
    """A streamed completion in a thread of its own."""

    def __init__(
        self, stack: Baton, prompt: list[int] | str, max_tokens: int = TOKENS, seed: int = 5, **more: Any
    ) -> None:
        self.text = ""
        self.finish = ""
        self.pieces = 0
        self.id = ""
        self.times: list[float] = []
        """When each piece of text came, monotonic seconds."""
        self._arrived = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "seed": seed, **more}
        self._done: Future[None] = self._pool.submit(self._read, stack.openai(), body)

    def _read(self, client: openai.OpenAI, body: dict[str, Any]) -> None:
        try:
            for chunk in client.completions.create(stream=True, **body):
                self.id = chunk.id
                for choice in chunk.choices:
                    self.text += choice.text
                    self.finish = choice.finish_reason or self.finish
                    if choice.text:
                        self.pieces += 1
                        self.times.append(time.monotonic())
                if self.pieces > 2:
                    self._arrived.set()
        finally:
            self._arrived.set()

    def flowing(self) -> Stream:
        """Once some tokens have come, and not all."""
        assert self._arrived.wait(END_S)
        assert not self._done.done()
        return self

    def end(self, limit_s: float = END_S) -> Stream:
        """When it has ended well; raises what the client library raised."""
        self._done.result(limit_s)
        assert self.finish in ("length", "stop")
        return self

    def error(self) -> Exception:
        """The error it ended with."""
        found = self._done.exception(END_S)
        assert isinstance(found, Exception), f"ended with {self.finish!r}"
        return found


def resumed_after_s(stream: Stream, killed: float) -> float:
    """Seconds from the kill to the first piece that came from another worker: the end of the longest silence.

    The last piece may have come just before the kill was seen.
    """
    gaps = [(after - before, after) for before, after in pairwise(stream.times) if after > killed]
    return max(gaps)[1] - killed if gaps else 0.0


def kill(stack: Baton, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    until(lambda: pid not in stack.processes(), 30)


def busy_worker(stack: Baton, role: str) -> str:
    """The worker of a role that holds an attempt."""

    def found() -> str | None:
        workers = stack.get("/baton/cluster")["workers"]
        busy = [worker["id"] for worker in workers if worker["role"] == role and worker["attempts"]]
        return busy[0] if busy else None

    return until(found, 20, lambda: stack.get("/baton/cluster"))


def pid_of(stack: Baton, worker: str) -> int:
    """The process of a worker: of its role, with its pool file open."""
    for pid, line in stack.processes().items():
        if line.strip().endswith(f"services.{worker.partition('-')[0]}"):
            files = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
            if any(f"{worker}.kvpool" in file for file in files):
                return pid
    raise AssertionError(f"no process of {worker}")


def recovered(stack: Baton, workers: int = 3) -> None:
    """All parts are back, a canary runs, and nothing is held."""

    def whole() -> bool:
        try:
            found = stack.get("/baton/cluster")["workers"]
        except Exception:
            return False
        return len([worker for worker in found if worker["age_s"] < 3]) >= workers and stack.answers()

    until(whole, END_S)
    stack.wait_idle(30)
