"""kill -9 of every part of a running stack of fake workers: the table "When something breaks" of docs/architecture.md.

A fake token follows from seed and position, so what an undisturbed request says is known, and a resumed one must say
the same. Every client ends with the whole text or a clear error in bounded time, and afterwards nothing is held.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.stack.running import Baton, until
from tests.stack.streams import END_S, Stream, busy_worker, kill, pid_of, recovered

pytestmark = [pytest.mark.model, pytest.mark.timeout(150)]

PROMPT = list(range(1000, 1020))
LONG_PROMPT = [1000 + i % 5000 for i in range(6000)]
OTHER_LONG_PROMPT = [1500 + i % 5000 for i in range(6000)]
"""Nobody holds any of it, and as the tokens say nothing to a fake, its answer is the same."""


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


@pytest.fixture(scope="module")
def undisturbed(fakes: Baton) -> dict[str, str]:
    """What the requests of these tests say when nothing breaks."""
    short, long = Stream(fakes, PROMPT), Stream(fakes, LONG_PROMPT, 40)
    return {"short": short.end().text, "long": long.end().text}


def prompt_tokens_left(stack: Baton) -> int:
    """Tokens the prefill worker has taken and not yet computed."""
    return sum(
        worker["queue_tokens"] for worker in stack.get("/baton/cluster")["workers"] if worker["role"] == "prefill"
    )


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
