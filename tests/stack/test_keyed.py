"""Idempotency-Key against a whole stack whose gateway is killed: real NATS, Redis and processes, fake workers."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests.stack.running import MODEL, Baton, until

pytestmark = [pytest.mark.model, pytest.mark.long, pytest.mark.timeout(300)]

BODY: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 600, "seed": 3}
STREAM = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
RETRY_S = 90.0


def texts(lines: list[str]) -> str:
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in event["choices"])


def test_the_gateway_is_killed_and_its_stream_goes_on_at_the_next(own: Baton) -> None:
    record = own.up("--fake")
    key = {"authorization": f"Bearer {record.api_key}"}
    expected = httpx.post(f"{own.url}/v1/completions", json=BODY, headers=key, timeout=120).json()
    headers = {**key, "idempotency-key": "order-1"}
    lines: list[str] = []
    with (
        suppress(httpx.HTTPError),
        httpx.stream("POST", f"{own.url}/v1/completions", json=STREAM, headers=headers, timeout=120) as response,
    ):
        for line in response.iter_lines():
            lines.append(line)
            if len(lines) == 60:
                time.sleep(1.0)  # its record is kept twice a second
                os.kill(own.pid("gateway"), signal.SIGKILL)
    last = [line.removeprefix("id: ") for line in lines if line.startswith("id: ")][-1]
    had = texts([line for line in lines if not line.startswith("data: {") or line.endswith("}")])

    def retried(**more: str) -> httpx.Response | None:
        with suppress(httpx.HTTPError):
            found = httpx.post(f"{own.url}/v1/completions", json=STREAM, headers={**headers, **more}, timeout=120)
            if found.status_code == 200:
                return found
        return None

    rest = until(lambda: retried(**{"last-event-id": last}), RETRY_S)
    assert "error" not in rest.text, rest.text
    wanted = expected["choices"][0]["text"]
    assert had + texts(rest.text.split("\n")) == wanted
    whole = until(retried, RETRY_S)
    assert texts(whole.text.split("\n")) == wanted
    assert f'"completion_tokens":{expected["usage"]["completion_tokens"]}' in whole.text
    own.wait_idle(60)
    own.down()
