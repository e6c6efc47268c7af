"""Cases of reference reports on stopping and on standing still, against a running stack of fake workers."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from services.cli.state import StateFolder
from shared.lifecycle.ready import read_ready
from tests.fault_switch import FOLDER_VARIABLE, blocks_step
from tests.stack.running import MODEL, Baton, until
from tests.stack.streams import END_S, Stream, busy_worker, pid_of, recovered

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

PROMPT = list(range(1000, 1020))
STREAMS = 10
DRAIN_S = 10
STALL_S, HANG_S = 3, 14
LONG = 7000
"""Tokens that take longer than the drain limit."""
FAST_S = 20.0
"""A refusal comes within 5 s of the loss being known, which takes 5 s at most; here others may compute."""


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory, default_model_dir: Path) -> Iterator[Baton]:
    """One prefill and two decode workers of fake tokens, which can be told to get stuck."""
    folder = tmp_path_factory.mktemp("operations")
    faults = folder / "faults"
    faults.mkdir()
    baton = Baton(folder / "state", {FOLDER_VARIABLE: str(faults)})
    settings = f"gateway.shutdown_s={DRAIN_S}", f"scheduler.worker_timeout_s={STALL_S}", f"lifecycle.hang_s={HANG_S}"
    try:
        baton.up("--fake", "--decode", "2", *(flag for setting in settings for flag in ("--set", setting)))
        yield baton
        baton.down()
    finally:
        baton.kill_all()


def readiness(stack: Baton) -> tuple[int, dict[str, bool]]:
    response = httpx.get(f"{stack.url}/ready", timeout=10)
    return response.status_code, response.json()["checks"]


def said(stack: Baton, words: str) -> None:
    """The supervisor has told of it."""
    log = StateFolder(stack.folder).log("up")
    until(lambda: re.search(words, log.read_text()), 60, lambda: log.read_text()[-2000:])


def told_to_come_back(stack: Baton) -> None:
    """A request is refused with 503 and when to come again."""
    with pytest.raises(openai.APIStatusError) as refused:
        stack.openai().completions.create(model=MODEL, prompt="Hi", max_tokens=2)
    assert refused.value.status_code == 503
    assert int(refused.value.response.headers["retry-after"]) > 0


def test_op67_sigterm_with_streams_open(fakes: Baton) -> None:
    """Streams of 400 tokens instead of 20 s, and one that would outlast the drain limit."""
    expected = Stream(fakes, PROMPT, 400).end().text
    # When scheduler, worker and gateway are told to stop in turn, each beneath ten streams
    for service in ("scheduler", "decode", "gateway"):
        endless = Stream(fakes, PROMPT, LONG) if service == "gateway" else None
        streams = [Stream(fakes, PROMPT, 400).flowing() for _ in range(STREAMS)]
        worker = busy_worker(fakes, "decode") if service == "decode" else ""
        pid = pid_of(fakes, worker) if worker else fakes.pid(service)
        os.kill(pid, signal.SIGTERM)
        # Then new requests go to a peer, or are refused with a time to come back
        if service == "gateway":
            until(lambda: readiness(fakes)[0] == 503, 30)
            assert readiness(fakes)[1]["accepting"] is False
        if service == "gateway":
            told_to_come_back(fakes)
        else:
            assert Stream(fakes, PROMPT, 400).end().text == expected
        # And all ten say what they say undisturbed; what is not over at the drain limit ends with an error
        assert [stream.end().text for stream in streams] == [expected] * STREAMS
        if endless is not None:
            assert "shutting down" in str(endless.error())
            assert endless.finish == ""
        # And the process ends well
        name = {"decode": r"decode-\d"}.get(service, service)
        said(fakes, rf"{name} ended with exit code 0")
        recovered(fakes)


def test_op67_a_second_signal_ends_it_at_once(fakes: Baton) -> None:
    stream = Stream(fakes, PROMPT, LONG).flowing()
    pid = fakes.pid("gateway")
    # When it is told twice, the second time while it drains
    os.kill(pid, signal.SIGTERM)
    until(lambda: readiness(fakes)[0] == 503, 30)
    os.kill(pid, signal.SIGTERM)
    # Then it does not wait for what runs, whose client sees an error
    said(fakes, "gateway was killed by SIGTERM")
    assert not isinstance(stream.error(), AssertionError)
    assert stream.finish == ""
    recovered(fakes)


def test_op68_green_health_on_a_dead_engine(fakes: Baton) -> None:
    """The three ways to die at once, as the pool has three workers: a step that is blocked, SIGSTOP and SIGKILL."""
    expected = Stream(fakes, PROMPT, 2000).end().text
    assert readiness(fakes) == (200, dict.fromkeys(readiness(fakes)[1], True))
    # Given a stream on one of the two decode workers
    caught = Stream(fakes, PROMPT, 2000).flowing()
    workers = {w["id"]: pid_of(fakes, w["id"]) for w in fakes.get("/baton/cluster")["workers"]}
    stuck = busy_worker(fakes, "decode")
    (stopped,) = [worker for worker in workers if worker.startswith("decode") and worker != stuck]
    (prefill,) = [worker for worker in workers if worker.startswith("prefill")]
    # When its step does not end, the other does not run, and the prefill worker is killed
    switch = blocks_step(Path(fakes.env[FOLDER_VARIABLE]), workers[stuck])
    switch.touch()
    os.kill(workers[stopped], signal.SIGSTOP)
    os.kill(workers[prefill], signal.SIGKILL)
    # Then the gateway is not ready within 5 s of the silence of one and the stall of the other, though its process is
    until(lambda: readiness(fakes)[1]["decode"] is False, 30)
    assert readiness(fakes)[0] == 503
    assert httpx.get(f"{fakes.url}/health").status_code == 200
    # And the worker whose engine stands still says so, where its own liveness is asked for
    health = {
        facts["worker"]: facts["metrics_url"].replace("/metrics", "/health")
        for path in StateFolder(fakes.folder).run.glob("*.ready")
        if (facts := read_ready(path)) and facts.get("worker") in workers
    }
    answer = httpx.get(health[stuck])
    assert answer.status_code == 503
    assert "the engine has ended no step" in answer.text
    with pytest.raises(httpx.TimeoutException):
        httpx.get(health[stopped], timeout=1)
    # And requests are refused instead of waiting for ever
    asked = time.monotonic()
    told_to_come_back(fakes)
    assert time.monotonic() - asked < FAST_S
    # And all are started again, by which it turns green
    said(fakes, r"prefill-\d was killed by SIGKILL")
    said(fakes, r"decode-\d ended with exit code 1")  # the stuck one ended itself, and left its stacks
    said(fakes, r"decode-\d has stood still for \d+ s and is killed")
    until(lambda: readiness(fakes)[0] == 200, 60, lambda: readiness(fakes))
    assert any("Timeout (0:00:" in log.read_text() for log in StateFolder(fakes.folder).logs.glob("decode-*.log"))
    # And the stream that was caught in it has gone on to its end
    assert caught.end(END_S).text == expected
    recovered(fakes)
