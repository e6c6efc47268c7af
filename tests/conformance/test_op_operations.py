"""Cases of reference reports on processes that stop, stand still or die, against a running stack of fake workers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from services.cli.state import StateFolder
from shared.lifecycle.ready import read_ready
from tests.conformance.faulty_stack import faults_of, faulty_stack, readiness, said, told_to_come_back
from tests.fault_switch import blocks_step, fails_step, holds_pull
from tests.stack.running import Baton, until
from tests.stack.streams import END_S, Stream, busy_worker, pid_of, recovered
from tests.stack.test_kills import assert_come_back

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

PROMPT = list(range(1000, 1020))
STREAMS = 10
LONG = 7000
"""Tokens that take longer than the drain limit."""
LONG_PROMPT = 6000
"""Tokens; one decode worker would take so long for it beside what it decodes that it is handed off."""
PAUSE_S = 0.2
FAST_S = 20.0
"""A refusal comes within 5 s of the loss being known, which takes 5 s at most; here others may compute."""


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory, default_model_dir: Path) -> Iterator[Baton]:
    yield from faulty_stack(tmp_path_factory.mktemp("operations"))


@pytest.fixture(autouse=True)
def switched_off(fakes: Baton) -> Iterator[None]:
    """No test leaves a fault to the next."""
    yield
    for switch in faults_of(fakes).iterdir():
        switch.unlink(missing_ok=True)


@pytest.mark.parametrize("outlasting", [False, pytest.param(True, marks=pytest.mark.long)])
def test_op67_sigterm_with_streams_open(fakes: Baton, outlasting: bool) -> None:
    """Streams of 400 tokens instead of 20 s, and one that would outlast the drain limit."""
    expected = Stream(fakes, PROMPT, 400).end().text
    # When scheduler, worker and gateway are told to stop in turn, each beneath ten streams
    for service in ("scheduler", "decode", "gateway"):
        endless = Stream(fakes, PROMPT, LONG) if service == "gateway" and outlasting else None
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


@pytest.mark.long
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
    # Given a stream on one of the two decode workers, which is the only thing that any of them holds
    until(lambda: not any(w["attempts"] for w in fakes.get("/baton/cluster")["workers"]), 30)
    caught = Stream(fakes, PROMPT, 2000).flowing()
    workers = {w["id"]: pid_of(fakes, w["id"]) for w in fakes.get("/baton/cluster")["workers"]}
    stuck = busy_worker(fakes, "decode")
    (stopped,) = [worker for worker in workers if worker.startswith("decode") and worker != stuck]
    (prefill,) = [worker for worker in workers if worker.startswith("prefill")]
    # When its step does not end, the other does not run, and the prefill worker is killed
    switch = blocks_step(faults_of(fakes), workers[stuck])
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


def handed_off(stack: Baton, number: int) -> Stream:
    """A stream whose long prompt nobody holds any of; as the tokens say nothing to a fake, its answer is known."""
    return Stream(stack, [1000 + (i + 37 * number) % 5000 for i in range(LONG_PROMPT)], 40)


def prefill_load(stack: Baton) -> tuple[int, int, bool]:
    """Attempts the prefill worker holds, tokens it has yet to compute, and whether all its blocks are free."""
    (worker,) = [w for w in stack.get("/baton/cluster")["workers"] if w["role"] == "prefill" and w["age_s"] < 3]
    return worker["attempts"], worker["queue_tokens"], worker["free_blocks"] == worker["total_blocks"]


def hold_pulls(stack: Baton) -> list[Path]:
    """Keep both decode workers from pulling; their switches."""
    workers = [w["id"] for w in stack.get("/baton/cluster")["workers"] if w["role"] == "decode" and w["age_s"] < 3]
    switches = [holds_pull(faults_of(stack), pid_of(stack, worker)) for worker in workers]
    for switch in switches:
        switch.touch()
    return switches


def busy(stack: Baton) -> list[Stream]:
    """Neighbours on both decode workers, which make handing a prompt off worth it."""
    return [Stream(stack, PROMPT, 3000).flowing() for _ in range(2)]


@pytest.fixture(scope="module")
def told(fakes: Baton) -> str:
    """What a long prompt is answered when nothing breaks."""
    return handed_off(fakes, 0).end().text


@pytest.mark.long
@pytest.mark.parametrize("rounds", [1, 5])
def test_op45_a_decode_worker_dies_after_the_handoff(fakes: Baton, told: str, rounds: int) -> None:
    """Four requests instead of twenty, whose KV waits at the prefill worker when the decode worker dies."""
    for number in range(rounds):
        neighbours = busy(fakes)
        switches = hold_pulls(fakes)
        # Given prompts that are computed and wait to be pulled
        streams = [handed_off(fakes, 10 * number + i) for i in range(4)]
        until(lambda: prefill_load(fakes)[0] > 1 and prefill_load(fakes)[1] == 0, 60, lambda: prefill_load(fakes))
        assert not prefill_load(fakes)[2]
        # When one of the decode workers is killed
        victim = busy_worker(fakes, "decode")
        os.kill(pid_of(fakes, victim), signal.SIGKILL)
        for switch in switches:
            switch.unlink(missing_ok=True)
        # Then every request is answered, by another where it has to be, and the prefill worker's blocks come back
        assert [stream.end(END_S * 2).text for stream in streams] == [told] * 4
        until(lambda: prefill_load(fakes) == (0, 0, True), 30, lambda: prefill_load(fakes))
        for neighbour in neighbours:
            neighbour.end(END_S * 2)
        recovered(fakes)


@pytest.mark.long
@pytest.mark.parametrize("moment", ["transfer", "prefill", "error"])
def test_op46_prefill_fails_while_decode_waits(fakes: Baton, told: str, moment: str) -> None:
    neighbours = busy(fakes)
    victim = fakes.pid("prefill")
    switches = hold_pulls(fakes) if moment == "transfer" else []
    failing = fails_step(faults_of(fakes), victim)
    if moment == "error":
        failing.touch()
    stream = handed_off(fakes, 100 + len(moment))
    # When the prefill worker is killed while it computes, or when all of it waits to be pulled; or answers errors
    if moment == "prefill":
        until(lambda: 0 < prefill_load(fakes)[1] < LONG_PROMPT * 0.7, 30, lambda: prefill_load(fakes))
    elif moment == "transfer":
        until(lambda: prefill_load(fakes)[:2] == (1, 0), 30, lambda: prefill_load(fakes))
    if moment != "error":
        os.kill(victim, signal.SIGKILL)
    for switch in switches:
        switch.unlink(missing_ok=True)
    # Then the decode worker computes what is missing, and the answer is the same
    assert stream.end(END_S).text == told
    spans = fakes.trace(stream.id, "decode.run", "scheduler.place")
    (run,) = [span["attributes"] for span in spans if span["name"] == "decode.run"]
    reason = {"error": "prefill_failed:Internal/engine_error"}.get(moment, "prefill_died")
    assert (run["baton.path"], run["baton.reason"]) == ("local", reason)
    # And of all its spans one is an error, of the stage that failed
    stage = "prefill.run" if moment == "error" else "handoff.pull"
    spans = fakes.trace(stream.id, stage)
    assert [span["name"] for span in spans if span.get("status") == "error"] == [stage]
    for neighbour in neighbours:
        neighbour.end(END_S * 2)
    recovered(fakes)


@pytest.mark.long
@pytest.mark.parametrize(("requests", "kills"), [(40, 6), (300, 20)])
def test_op49_workers_join_and_leave_under_load(fakes: Baton, told: str, requests: int, kills: int) -> None:
    """40 requests in 8 s instead of 300 in 60 s; who leaves is started again by the supervisor, and so joins."""
    expected = Stream(fakes, PROMPT, 100).end().text
    over = threading.Event()

    def leave() -> None:
        for number in range(kills):
            service = ("decode", "prefill", "decode")[number % 3]
            found = [pid for pid, line in fakes.processes().items() if line.strip().endswith(f"services.{service}")]
            if found:
                os.kill(max(found), (signal.SIGTERM, signal.SIGKILL)[number % 2])
            if over.wait(requests * PAUSE_S / kills):
                return

    # Given workers that leave, told to or killed, and come back
    leaving = threading.Thread(target=leave)
    leaving.start()
    # When requests come all the while
    streams = []
    for number in range(requests):
        streams.append(Stream(fakes, PROMPT, 100) if number % 10 else handed_off(fakes, 200 + number))
        time.sleep(PAUSE_S)
    # Then each has its end: the whole answer, or an error that says when to come back
    ends = [ends_well_or_says_why(stream) for stream in streams]
    over.set()
    leaving.join()
    for number, text in enumerate(ends):
        assert text in ("", expected if number % 10 else told)
    assert len([text for text in ends if text]) > requests / 2
    recovered(fakes)


def ends_well_or_says_why(stream: Stream) -> str:
    try:
        return stream.end(END_S * 2).text
    except openai.APIStatusError as exc:
        assert_come_back(exc)
        return ""
