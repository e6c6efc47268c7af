"""Cases of reference reports on the queue: a stack of fake workers on a NATS server that the test stops."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from services.cli.state import StateFolder
from tests.conformance.faulty_stack import faulty_stack, readiness
from tests.servers import NatsServer, start_nats
from tests.stack.running import MODEL, Baton, until
from tests.stack.streams import END_S, Stream, recovered

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

PROMPT = list(range(1000, 1020))
LINES = 12
MAX_PAYLOAD = 32 * 1024
"""Bytes."""
OUTAGE_S = 6.0
"""The case says 20; what matters is that it is longer than any request waits for its answer."""
NORMAL_S = 10.0
"""After so long all is as before; the machine of a test may be three times as slow."""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    config = f"jetstream {{ max_mem: 64MB, max_file: 2GB }}\nmax_payload: {MAX_PAYLOAD}\n"
    server = start_nats(tmp_path_factory.mktemp("nats"), config)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory, broker: NatsServer, default_model_dir: Path) -> Iterator[Baton]:
    yield from faulty_stack(tmp_path_factory.mktemp("broker"), **{"bus.nats_url": broker.url})


def batch_of(stack: Baton) -> str:
    """A batch of short completions, given in now; its id."""
    bodies = [{"model": MODEL, "prompt": PROMPT, "max_tokens": 40 * i, "seed": 5} for i in range(1, LINES + 1)]
    lines = [
        json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body})
        for i, body in enumerate(bodies)
    ]
    client = stack.openai()
    file = client.files.create(file=("lines.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    return batch.id


@pytest.mark.long
@pytest.mark.parametrize("store", ["lost", "kept"])
def test_op61_broker_restart(fakes: Baton, broker: NatsServer, store: str) -> None:
    expected = Stream(fakes, PROMPT, 1500).end().text
    pids = set(fakes.processes())
    # Given a stream and a batch under way
    stream = Stream(fakes, PROMPT, 1500).flowing()
    batch = batch_of(fakes)
    until(lambda: fakes.openai().batches.retrieve(batch).request_counts.completed > 0, 60)
    # When the broker is gone for a while
    broker.kill()
    gone = time.monotonic()
    until(lambda: readiness(fakes)[0] == 503, 30)
    assert readiness(fakes)[1]["bus"] is False
    # Then requests are refused at once, with a time to come back
    refused = 0
    while time.monotonic() - gone < OUTAGE_S:
        asked = time.monotonic()
        with pytest.raises(openai.APIStatusError) as caught:
            fakes.openai().completions.create(model=MODEL, prompt="Hi", max_tokens=2)
        assert caught.value.status_code == 503
        assert int(caught.value.response.headers["retry-after"]) > 0
        assert time.monotonic() - asked < 20
        refused += 1
        time.sleep(0.2)
    assert refused > 1
    # And when it is back, with or without what it stored, all goes on with no process started anew
    if store == "lost":
        shutil.rmtree(broker.folder / "store")
    broker.start()
    until(lambda: readiness(fakes)[0] == 200 and fakes.answers(), NORMAL_S * 3, lambda: readiness(fakes))
    assert stream.end(END_S * 2).text == expected
    assert pids <= set(fakes.processes())
    # And every line of the batch has one result
    until(lambda: fakes.openai().batches.retrieve(batch).status == "completed", 120)
    done = fakes.openai().batches.retrieve(batch)
    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (LINES, 0)
    assert done.output_file_id is not None
    results = [json.loads(line) for line in fakes.openai().files.content(done.output_file_id).text.splitlines()]
    assert sorted(int(result["custom_id"]) for result in results) == list(range(LINES))
    recovered(fakes)


def test_op60_message_above_max_payload(fakes: Baton) -> None:
    """The broker takes 32 KiB here, as a model of 8,192 tokens of context cannot fill the 1 MiB of the case."""
    expected = Stream(fakes, PROMPT, 600).end().text
    neighbour = Stream(fakes, PROMPT, 600).flowing()
    assert fakes.record is not None
    headers = {"Authorization": f"Bearer {fakes.record.api_key}"}

    def ask(tokens: int) -> int:
        body = {"model": MODEL, "prompt": [1000] * tokens, "max_tokens": 2, "seed": 5}
        answer = httpx.post(f"{fakes.url}/v1/completions", json=body, headers=headers, timeout=END_S)
        assert answer.status_code == 200 or f"the limit is {MAX_PAYLOAD}" in answer.json()["error"]["message"]
        return answer.status_code

    # When prompts just below the limit and above it come beside small ones
    asked = time.monotonic()
    assert [ask(tokens) for tokens in (20, 6500, 20, 8180, 20)] == [200, 200, 200, 413, 200]
    # and one whose submit fits while what the scheduler makes of it, with the tags of its blocks, does not
    assert ask(7950) == 413
    # Then each is answered at once, the neighbour is not harmed, and no connection was lost
    assert time.monotonic() - asked < END_S
    assert neighbour.end().text == expected
    assert "Maximum Payload" not in "".join(log.read_text() for log in StateFolder(fakes.folder).logs.glob("*.log"))
    recovered(fakes)
