"""Cases of reference reports on recovery, against a running stack of the real model."""

from __future__ import annotations

import json
import subprocess
import time

import pytest

from tests.stack.running import MODEL, Baton
from tests.stack.streams import RESUME_S, Stream, kill, recovered, resumed_after_s

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

MAX_TOKENS = 120
"""The case says 500; what matters is that the kill comes long before the end."""
DELTAS = 10


def test_op06_worker_dies_in_mid_stream(stack: Baton) -> None:
    # Given undisturbed answers, and the same streamed at once to curl, greedy, and to the official client, sampled
    body = {"model": MODEL, "prompt": "A list of every river:", "max_tokens": MAX_TOKENS, "temperature": 0.0}

    def sampled() -> Stream:
        return Stream(stack, "Story number 0: once upon a time", MAX_TOKENS, 0, temperature=0.9)

    undisturbed = [Stream(stack, body["prompt"], MAX_TOKENS, temperature=0.0), sampled()]
    expected, expected_sampled = (stream.end(RESUME_S * 3).text for stream in undisturbed)
    official = sampled()
    assert stack.record is not None
    command = ["curl", "-sN", f"{stack.url}/v1/completions", "-H", "Content-Type: application/json", "-K", "-"]
    curl = subprocess.Popen(
        [*command, "-d", json.dumps({**body, "stream": True})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert curl.stdin is not None
    assert curl.stdout is not None
    curl.stdin.write(f'header = "Authorization: Bearer {stack.record.api_key}"\n')
    curl.stdin.close()
    frames: list[str] = []
    for line in curl.stdout:
        if line.startswith("data: "):
            frames.append(line.removeprefix("data: ").strip())
        if len(frames) == DELTAS:
            break
    official.flowing()
    # When the worker that serves both is killed after 10 deltas
    kill(stack, stack.pid("decode"))
    killed = time.monotonic()
    # Then both go on: nothing lost, nothing repeated, one finish and one [DONE]
    frames += [line.removeprefix("data: ").strip() for line in curl.stdout if line.startswith("data: ")]
    assert curl.wait(60) == 0
    assert frames.pop() == "[DONE]"
    chunks = [json.loads(frame) for frame in frames]
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == expected
    finishes = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert [finish for finish in finishes if finish] == ["length"]
    assert official.end(RESUME_S * 3).text == expected_sampled
    assert resumed_after_s(official, killed) < RESUME_S
    spans = {span["name"]: span["attributes"] for span in stack.trace(official.id, "gateway.request")}
    assert spans["gateway.stream"]["baton.lost_workers"] == 1
    recovered(stack, workers=2)
