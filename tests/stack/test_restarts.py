"""Restarts on purpose and by force: nobody's stream notices the first, and the second loses no key and no account."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import openai
import pytest

from services.cli.state import StateFolder
from tests.stack.running import MODEL, Baton, until
from tests.stack.streams import END_S, Stream, recovered

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

PROMPT = list(range(1000, 1020))
TOKENS = 3000


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory, default_model_dir: Path) -> Iterator[Baton]:
    """One prefill and one decode worker of fake tokens."""
    baton = Baton(tmp_path_factory.mktemp("restarts") / "state")
    try:
        baton.up("--fake")
        yield baton
        traces = baton.traces_outside()
        baton.down()
        baton.nothing_left(traces)
    finally:
        baton.kill_all()


class Visitors:
    """Short requests, one after the other, for as long as the block runs."""

    def __init__(self, stack: Baton) -> None:
        self.served = 0
        self.failures: list[str] = []
        self._client = stack.openai()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._come)

    def __enter__(self) -> Visitors:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(END_S)

    def _come(self) -> None:
        while not self._over.is_set():
            try:
                self._client.completions.create(model=MODEL, prompt="Hi", max_tokens=2)
                self.served += 1
            except openai.OpenAIError as exc:
                self.failures.append(repr(exc))
            time.sleep(0.05)


def test_a_rolling_restart_of_everything(fakes: Baton) -> None:
    # Given a stream, what it says undisturbed, and visitors who come and go
    expected = Stream(fakes, PROMPT, TOKENS).end().text
    before = fakes.processes()
    stream = Stream(fakes, PROMPT, TOKENS).flowing()
    with Visitors(fakes) as visitors:
        # When every service but the gateway that holds the stream is restarted
        done = fakes.run("restart", "policy", "prefix-cache-index", "scheduler", "batch", "prefill", "decode")
    # Then the stream ends with the same text, no visitor was turned away, and every process is another
    assert done.returncode == 0, done.stderr
    assert stream.end(END_S * 2).text == expected
    assert visitors.failures == []
    assert visitors.served > 10
    after = fakes.processes()
    changed = {line for pid, line in before.items() if pid not in after}
    assert len([line for line in changed if "services." in line]) == 6
    assert sorted(after.values()) == sorted(before.values())
    recovered(fakes, workers=2)


def test_a_rolling_restart_of_the_gateway(fakes: Baton) -> None:
    # Given a stream that flows, and visitors
    pid = fakes.pid("gateway")
    stream = Stream(fakes, PROMPT, 300).flowing()
    with Visitors(fakes) as visitors:
        # When its gateway is restarted
        done = fakes.run("restart", "gateway")
    # Then the stream ends there in peace, new requests go to the new one on the same port, and none is refused
    assert done.returncode == 0, done.stderr
    stream.end()
    assert fakes.pid("gateway") != pid
    assert visitors.failures == []
    assert visitors.served > 3
    recovered(fakes, workers=2)


def test_a_gateway_that_is_told_to_stop_lets_streams_finish(fakes: Baton) -> None:
    # Given streams that flow
    expected = Stream(fakes, PROMPT, 400).end().text
    pid = fakes.pid("gateway")
    streams = [Stream(fakes, PROMPT, 400) for _ in range(5)]
    for stream in streams:
        stream.flowing()
    # When their gateway gets a SIGTERM, and no other takes its place
    os.kill(pid, signal.SIGTERM)
    # Then at once it is not ready and refuses what is new, by an answer that tells when to come again
    until(lambda: not httpx.get(f"{fakes.url}/ready").json()["checks"]["accepting"], 30)
    assert httpx.get(f"{fakes.url}/ready").status_code == 503
    assert fakes.record is not None
    key = {"Authorization": f"Bearer {fakes.record.api_key}"}
    refused = httpx.post(f"{fakes.url}/v1/completions", json={"model": MODEL, "prompt": "Hi"}, headers=key)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert refused.headers["retry-after"] == "1"
    # And the streams end as if nothing had happened, and so does the process
    assert [stream.end().text for stream in streams] == [expected] * 5
    log = StateFolder(fakes.folder).log("up")
    until(lambda: "gateway ended with " in log.read_text(), 30)
    assert "gateway ended with exit code 0" in log.read_text()
    recovered(fakes, workers=2)


def test_servers_are_restarted_in_place(fakes: Baton) -> None:
    stream = Stream(fakes, PROMPT, TOKENS).flowing()
    done = fakes.run("restart", "nats", "redis")
    assert done.returncode == 0, done.stderr
    stream.end(END_S * 2)
    recovered(fakes, workers=2)


def test_what_cannot_be_restarted_is_named(fakes: Baton) -> None:
    done = fakes.run("restart", "decode-7")
    assert done.returncode == 1
    assert "there is no 'decode-7' here; known are all, batch, decode, decode-1" in done.stderr
    elsewhere = Baton(fakes.folder.with_name("none"))
    assert "no stack is running" in elsewhere.run("restart", "policy").stderr


def test_everything_killed_at_once_and_started_again(own: Baton) -> None:
    # Given a stack that has served
    first = own.up("--fake")
    assert own.answers()
    stream = Stream(own, PROMPT, TOKENS).flowing()
    responses = own.openai().responses
    story = responses.create(model=MODEL, input="hi", background=True, max_output_tokens=1000)
    until(lambda: responses.retrieve(story.id).status == "in_progress", 30)
    # When every process of it is killed at once
    for pid in own.processes():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not own.processes(), 30)
    # Then the client saw an error, and never a clean end
    assert not isinstance(stream.error(), AssertionError)
    assert stream.finish == ""
    pools = StateFolder(own.folder).pool_folder()
    assert list(pools.iterdir())
    # When it is started again
    second = own.up("--fake")
    # Then it serves with the same keys, and what the killed workers left is gone
    assert (second.api_key, second.admin_key) == (first.api_key, first.admin_key)
    assert own.answers()
    assert len(list(pools.glob("*.kvpool"))) == 2
    # And what ran in the background goes on by itself
    responses = own.openai().responses
    until(lambda: responses.retrieve(story.id).status == "incomplete", 90)
    told = responses.retrieve(story.id)
    assert told.usage is not None
    assert told.usage.output_tokens == 1000
    assert responses.input_items.list(story.id).data
    responses.delete(story.id)
    traces = own.traces_outside()
    own.down()
    own.nothing_left(traces)
