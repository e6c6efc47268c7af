"""Cases of reference reports on recovery, against a running stack of the real model."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.stack.running import MODEL, Baton
from tests.stack.streams import Stream, kill, recovered

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

MAX_TOKENS = 120
"""The case says 500; what matters is that the kill comes long before the end."""
DELTAS = 10


def test_op06_worker_dies_in_mid_stream(stack: Baton) -> None:
    # Given an undisturbed answer, and the same streamed to the official client and to curl at once
    body = {"model": MODEL, "prompt": "A list of every river:", "max_tokens": MAX_TOKENS, "temperature": 0.0}
    expected = Stream(stack, body["prompt"], MAX_TOKENS, temperature=0.0).end().text
    official = Stream(stack, body["prompt"], MAX_TOKENS, temperature=0.0)
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
    # Then both go on: nothing lost, nothing repeated, one finish and one [DONE]
    frames += [line.removeprefix("data: ").strip() for line in curl.stdout if line.startswith("data: ")]
    assert curl.wait(60) == 0
    assert frames.pop() == "[DONE]"
    chunks = [json.loads(frame) for frame in frames]
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == expected
    finishes = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert [finish for finish in finishes if finish] == ["length"]
    assert official.end(180).text == expected
    recovered(stack, workers=2)
