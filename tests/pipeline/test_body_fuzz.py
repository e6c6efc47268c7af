"""Bodies of all kinds: whatever comes, the answer is documented, and never a fault of ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.pipeline.gateway_support import HEADERS, MODEL
from tests.pipeline.gateway_thread import scripted_gateway

REFUSALS = {400, 404, 413, 422, 429}
FIELDS = (
    *("model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p"),
    *("n", "best_of", "stream", "stream_options", "stop", "stop_token_ids", "seed", "logprobs", "top_logprobs", "echo"),
    *("logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "ignore_eos", "user"),
    *("metadata", "service_tier", "suffix", "tools", "tool_choice", "parallel_tool_calls", "response_format", "store"),
    *("include_stop_str_in_output", "reasoning_effort", "modalities", "functions", "unheard_of"),
)
NUMBERS = st.one_of(
    st.integers(-3, 40),
    st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**30, 0.0, -0.0, 0.5, 1.5, 1e308, float("nan"), float("inf")]),
)
TEXTS = st.one_of(st.text(max_size=8), st.sampled_from(["", "\x00", "\ud800", "🫠", "json", "auto", "none", "x" * 300]))
NAMES = ("type", "content", "role", "text", "function", "name", "parameters", "schema", "json_schema")
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(TEXTS, st.sampled_from(NAMES)), inner, max_size=4),
    ),
    max_leaves=8,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool", "developer", "other"]), "content": VALUES},
    optional={"name": VALUES, "tool_calls": VALUES, "tool_call_id": VALUES},
)
PLAUSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "messages": st.lists(MESSAGE, max_size=3),
    "max_tokens": st.integers(1, 8),
    "temperature": st.floats(0, 2),
    "n": st.integers(1, 3),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "stop": st.one_of(TEXTS, st.lists(TEXTS, max_size=5)),
    "logprobs": st.one_of(st.booleans(), st.integers(0, 6)),
    "echo": st.booleans(),
    "seed": st.integers(-(2**63), 2**63),
}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with scripted_gateway() as url, httpx.Client(base_url=url, headers=HEADERS, timeout=60) as found:
        yield found


def body_of(data: st.DataObject, chat: bool) -> bytes:
    """A body that would be served, with some fields changed, added or taken away, or its bytes damaged."""
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 4}
    body |= {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    for name in data.draw(st.lists(st.sampled_from(FIELDS), max_size=4)):
        body[name] = data.draw(st.one_of(PLAUSIBLE.get(name, VALUES), VALUES))
    for name in data.draw(st.lists(st.sampled_from(FIELDS[:3]), max_size=1)):
        body.pop(name, None)
    raw = bytearray(json.dumps(body).encode())
    if data.draw(st.integers(0, 4)) == 0:
        at = data.draw(st.integers(0, len(raw)))
        raw[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    return bytes(raw)


def check(client: httpx.Client, data: st.DataObject) -> None:
    chat = data.draw(st.booleans())
    path, raw = f"/v1/{'chat/' if chat else ''}completions", body_of(data, chat)
    response = client.post(path, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 200 or response.status_code in REFUSALS, (raw, response.text)
    if response.status_code != 200:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        return
    if not response.headers["content-type"].startswith("text/event-stream"):
        whole = response.json()
        assert [choice["index"] for choice in whole["choices"]] == list(range(len(whole["choices"])))
        assert all(choice["finish_reason"] in ("stop", "length", "tool_calls") for choice in whole["choices"])
        return
    check_frames(response.content, raw)


def check_frames(content: bytes, raw: bytes) -> None:
    frames = content.decode().removesuffix("\n\n").split("\n\n")
    events = [frame.removeprefix("data: ") for frame in frames if not frame.startswith(":")]
    assert events.pop() == "[DONE]", raw
    ended: set[int] = set()
    for event in map(json.loads, events):
        for choice in event["choices"]:
            assert choice["index"] not in ended, raw
            if choice["finish_reason"]:
                ended.add(choice["index"])
    assert ended == set(range(len(ended)))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_no_body_is_a_fault_of_ours(client: httpx.Client, data: st.DataObject) -> None:
    check(client, data)


@pytest.mark.long
@pytest.mark.timeout(900)
@settings(max_examples=2500, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_no_body_is_a_fault_of_ours_at_length(client: httpx.Client, data: st.DataObject) -> None:
    check(client, data)
