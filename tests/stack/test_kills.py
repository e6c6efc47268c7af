"""kill -9 of every part of a running stack of fake workers: the table "When something breaks" of docs/architecture.md.

A fake token follows from seed and position, so what an undisturbed request says is known, and a resumed one must say
the same. Every client ends with the whole text or a clear error in bounded time, and afterwards nothing is held.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.stack.running import MODEL, Baton, until

pytestmark = [pytest.mark.model, pytest.mark.timeout(150)]

END_S = 60.0
"""Every client has its end within this, whatever died."""
PROMPT = list(range(1000, 1020))
LONG_PROMPT = [1000 + i % 5000 for i in range(6000)]
OTHER_LONG_PROMPT = [1500 + i % 5000 for i in range(6000)]
"""Nobody holds any of it, and as the tokens say nothing to a fake, its answer is the same."""
TOKENS = 600


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory, default_model_dir: Path) -> Iterator[Baton]:
    """One prefill and two decode workers of fake tokens."""
    baton = Baton(tmp_path_factory.mktemp("kills") / "state")
    try:
        baton.up("--fake", "--decode", "2")
        yield baton
        traces = baton.traces_outside()
        baton.down()
        baton.nothing_left(traces)
    finally:
        baton.kill_all()


class Stream:
    """A streamed completion in a thread of its own."""

    def __init__(self, stack: Baton, prompt: list[int], max_tokens: int = TOKENS, seed: int = 5) -> None:
        self.text = ""
        self.finish = ""
        self.pieces = 0
        self.id = ""
        self._arrived = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "seed": seed}
        self._done: Future[None] = self._pool.submit(self._read, stack.openai(), body)

    def _read(self, client: openai.OpenAI, body: dict[str, Any]) -> None:
        try:
            for chunk in client.completions.create(stream=True, **body):
                self.id = chunk.id
                for choice in chunk.choices:
                    self.text += choice.text
                    self.finish = choice.finish_reason or self.finish
                    self.pieces += bool(choice.text)
                if self.pieces > 5:
                    self._arrived.set()
        finally:
            self._arrived.set()

    def flowing(self) -> Stream:
        """Once some tokens have come, and not all."""
        assert self._arrived.wait(END_S)
        assert not self._done.done()
        return self

    def end(self) -> Stream:
        """When it has ended well; raises what the client library raised."""
        self._done.result(END_S)
        assert self.finish == "length"
        return self

    def error(self) -> Exception:
        """The error it ended with."""
        found = self._done.exception(END_S)
        assert isinstance(found, Exception), f"ended with {self.finish!r}"
        return found


@pytest.fixture(scope="module")
def undisturbed(fakes: Baton) -> dict[str, str]:
    """What the requests of these tests say when nothing breaks."""
    short, long = Stream(fakes, PROMPT), Stream(fakes, LONG_PROMPT, 40)
    return {"short": short.end().text, "long": long.end().text}


def kill(stack: Baton, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    until(lambda: pid not in stack.processes(), 10)


def busy_worker(stack: Baton, role: str) -> str:
    """The worker of a role that holds an attempt."""

    def found() -> str | None:
        workers = stack.get("/baton/cluster")["workers"]
        busy = [worker["id"] for worker in workers if worker["role"] == role and worker["attempts"]]
        return busy[0] if busy else None

    return until(found, 20, lambda: stack.get("/baton/cluster"))


def prompt_tokens_left(stack: Baton) -> int:
    """Tokens the prefill worker has taken and not yet computed."""
    return sum(
        worker["queue_tokens"] for worker in stack.get("/baton/cluster")["workers"] if worker["role"] == "prefill"
    )


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


def test_a_decode_worker_dies_while_it_streams(fakes: Baton, undisturbed: dict[str, str]) -> None:
    # Given a stream that flows
    stream = Stream(fakes, PROMPT).flowing()
    # When the worker that decodes it is killed
    kill(fakes, pid_of(fakes, busy_worker(fakes, "decode")))
    # Then the stream goes on elsewhere, and says what it would have said
    assert stream.end().text == undisturbed["short"]
    spans = {span["name"]: span for span in fakes.trace(stream.id, "gateway.request", "gateway.stream")}
    assert spans["gateway.stream"]["attributes"]["baton.lost_workers"] == 1
    assert spans["gateway.request"]["attributes"]["baton.epoch"] == 2
    recovered(fakes)


def test_a_prefill_worker_dies_in_a_prompt(fakes: Baton, undisturbed: dict[str, str]) -> None:
    # Given a long prompt handed off, as both decode workers have streams to serve, of which half is computed
    victim = fakes.pid("prefill")
    neighbours = [Stream(fakes, PROMPT, 2000).flowing() for _ in range(2)]
    stream = Stream(fakes, OTHER_LONG_PROMPT, 40)
    until(lambda: 0 < prompt_tokens_left(fakes) < 3000, 20, lambda: prompt_tokens_left(fakes))
    # When the worker that computes it is killed
    kill(fakes, victim)
    # Then the decode worker computes the rest itself without a new attempt, and the text is the same
    assert stream.end().text == undisturbed["long"]
    spans = {span["name"]: span["attributes"] for span in fakes.trace(stream.id, "gateway.request", "decode.run")}
    assert spans["scheduler.place"]["baton.path"] == "handed_off"
    assert (spans["decode.run"]["baton.path"], spans["decode.run"]["baton.reason"]) == ("local", "prefill_died")
    assert spans["gateway.request"]["baton.epoch"] == 1
    # What had been pulled is kept
    assert spans["handoff.pull"]["baton.reason"] == "prefill_died"
    assert spans["handoff.pull"]["baton.blocks"] >= 32
    # And its neighbours never notice
    assert all(neighbour.end().text.startswith(undisturbed["short"]) for neighbour in neighbours)
    recovered(fakes)


def test_the_scheduler_dies_while_streams_run(fakes: Baton, undisturbed: dict[str, str]) -> None:
    # Given a stream that flows
    stream = Stream(fakes, PROMPT).flowing()
    # When the scheduler is killed, and another request comes while there is none
    kill(fakes, fakes.pid("scheduler"))
    waiting = Stream(fakes, PROMPT)
    # Then the running one never notices, and the waiting one is placed by the next leader or told to come back
    assert stream.end().text == undisturbed["short"]
    ends_well_or_says_why(waiting, undisturbed["short"])
    recovered(fakes)


def test_policy_dies_while_streams_run(fakes: Baton, undisturbed: dict[str, str]) -> None:
    # Given a stream that flows
    stream = Stream(fakes, PROMPT).flowing()
    # When policy is killed, and another request comes while there is none
    kill(fakes, fakes.pid("policy"))
    refused = Stream(fakes, PROMPT)
    # Then the running one finishes; the new one is served by the next policy, or refused with a time to come back
    assert stream.end().text == undisturbed["short"]
    ends_well_or_says_why(refused, undisturbed["short"])
    recovered(fakes)
    # And the settlement that waited is booked
    assert fakes.trace(stream.id, "policy.settle")


def test_the_index_dies_while_streams_run(fakes: Baton, undisturbed: dict[str, str]) -> None:
    # Given a stream that flows
    stream = Stream(fakes, PROMPT).flowing()
    # When the index is killed, and another request comes while there is none
    kill(fakes, fakes.pid("prefix_cache_index"))
    second = Stream(fakes, LONG_PROMPT, 40)
    # Then it counts as no match: both are served
    assert stream.end().text == undisturbed["short"]
    assert second.end().text == undisturbed["long"]
    recovered(fakes)


def test_the_gateway_dies_while_streams_run(fakes: Baton, undisturbed: dict[str, str]) -> None:
    # Given a stream that flows
    stream = Stream(fakes, PROMPT).flowing()
    # When its gateway is killed
    kill(fakes, fakes.pid("gateway"))
    # Then its client sees an error, never a clean end; it comes back on its port, and the workers drop the rest
    assert not isinstance(stream.error(), AssertionError)
    assert stream.finish == ""
    assert undisturbed["short"].startswith(stream.text)
    recovered(fakes)


def ends_well_or_says_why(stream: Stream, text: str) -> None:
    """The whole text, or 503 with a time to come back; nothing in between."""
    started = time.monotonic()
    try:
        found = stream.end().text
    except openai.APIStatusError as exc:
        assert_come_back(exc)
        found = text
    assert found == text
    assert time.monotonic() - started < END_S


def assert_come_back(refusal: openai.APIStatusError) -> None:
    assert refusal.status_code == 503
    assert int(refusal.response.headers["retry-after"]) > 0
