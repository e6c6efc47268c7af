"""What every request passes: no door without a key, and an id on every answer."""

from __future__ import annotations

import asyncio
import gzip
import json
import secrets

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from services.gateway.answers import SessionResponse
from services.gateway.edge import make_edge
from services.gateway.guesses import GUESSES
from shared.bus.memory_bus import MemoryBroker
from shared.contracts import subjects
from shared.contracts.ids import TenantId
from shared.contracts.messages import PolicyEvent
from tests.pipeline.gateway_support import (
    HEADERS,
    KEYS,
    MODEL,
    Backend,
    Stack,
    chat,
    completion,
    gateway_stack,
    http_stack,
)


async def test_every_answer_has_an_id() -> None:
    async with gateway_stack() as stack:
        post, get = stack.client.post, stack.client.get
        answers = [
            await get("/health"),
            await get("/v1/models"),
            await get("/v1/nothing", headers=HEADERS),
            await get("/v1/completions", headers=HEADERS),
            await post("/v1/completions", content=b"{", headers=HEADERS),
            await post("/v1/completions", json=completion(), headers=HEADERS),
            await post("/v1/completions", json=completion(stream=True), headers=HEADERS),
        ]
        ids = [answer.headers.get_list("x-request-id") for answer in answers]
        assert all(len(found) == 1 and found[0].startswith("req-") for found in ids)
        assert len({found[0] for found in ids}) == len(ids)
        mine = await get("/health", headers={"x-request-id": "mine"})
        assert mine.headers.get_list("x-request-id") == ["mine"]


async def test_a_body_that_is_packed_is_refused_by_name() -> None:
    async with gateway_stack() as stack:
        body = json.dumps(completion(max_tokens=1)).encode()
        for encoding, status in (("gzip", 400), ("br", 400), ("gzip, identity", 400), ("identity", 200), ("", 200)):
            given = gzip.compress(body) if "gzip" in encoding else body
            headers = {**HEADERS, "content-encoding": encoding}
            response = await stack.client.post("/v1/completions", content=given, headers=headers)
            assert response.status_code == status, encoding
            if status == 400:
                error = response.json()["error"]
                assert (error["param"], error["code"]) == ("Content-Encoding", "unsupported_encoding")


async def test_a_path_tells_all_its_methods_and_head_is_get_without_its_body() -> None:
    async with http_stack() as (_, url), httpx.AsyncClient(base_url=url, headers=HEADERS) as client:
        for path, methods in (
            ("/v1/completions", "POST"),
            ("/v1/models", "GET, HEAD"),
            ("/v1/files", "GET, POST"),
            ("/v1/responses/resp_1", "DELETE, GET"),
        ):
            response = await client.put(path)
            assert (response.status_code, response.headers["allow"]) == (405, methods)
        for path in ("/health", "/ready", "/v1/models", f"/v1/models/{MODEL}"):
            whole, head = await client.get(path), await client.head(path)
            assert (head.status_code, head.content) == (whole.status_code, b"")
            assert head.headers["content-length"] == whole.headers["content-length"]


async def test_a_wrong_key_is_asked_about_once_and_leaves_no_trace() -> None:
    async with gateway_stack() as stack:
        before = stack.backend.authentications
        for _ in range(5):
            assert (await ask(stack, "Bearer wrong")).status_code == 401
        assert stack.backend.authentications == before + 1
        assert not [span for span in stack.service.telemetry.queue.take() if span.name == "gateway.request"]


async def test_a_key_that_was_wrong_works_once_policy_tells_of_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway_stack() as stack:
        assert (await ask(stack, "Bearer key-new")).status_code == 401
        monkeypatch.setitem(KEYS, "key-new", "tenant-new")
        event = PolicyEvent(kind="changed", tenant=TenantId("tenant-new"))
        await stack.backend.bus.publish(subjects.POLICY_EVENTS, event)
        async with asyncio.timeout(30):
            while (await ask(stack, "Bearer key-new")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def test_who_guesses_keys_is_told_to_wait_and_others_are_not() -> None:
    async with gateway_stack() as stack:
        assert (await ask(stack, "Bearer key-a")).status_code == 200
        before = stack.backend.authentications
        statuses = [(await ask(stack, f"Bearer {secrets.token_hex(8)}")) for _ in range(3 * int(GUESSES))]
        assert {answer.status_code for answer in statuses} == {401, 429}
        refused = next(answer for answer in statuses if answer.status_code == 429)
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "too_many_keys"
        assert stack.backend.authentications < before + 2 * GUESSES
        # a key that was good from the same address is served, also when its identity must be asked for again
        await stack.backend.bus.publish(subjects.POLICY_EVENTS, PolicyEvent(kind="changed", tenant=TenantId("")))
        await asyncio.sleep(0.05)
        assert (await ask(stack, "Bearer key-a")).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_generation_has_errors_of_our_shape_though_it_passes_no_router(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: SessionResponse, scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("a secret of ours")

    async with gateway_stack() as stack:
        # another method, or a path below it, is the router's matter
        assert (await stack.client.put(path, headers=HEADERS)).status_code == 405
        assert (await stack.client.post(f"{path}/x/y", headers=HEADERS)).status_code == 404
        assert (await stack.client.post(path, json={"model": 1}, headers=HEADERS)).status_code == 400
        # what fails while it is answered is an error without details
        monkeypatch.setattr(SessionResponse, "__call__", broken)
        body = {"model": MODEL, "max_tokens": 4, "store": False, "input": "hi", "messages": chat()["messages"]}
        asked = {name: value for name, value in body.items() if name in FIELDS[path]} | EXTRA.get(path, {})
        answer = await stack.client.post(path, json=asked, headers=HEADERS)
        assert answer.status_code == 500, answer.text
        assert answer.json()["error"]["message"] == "internal error"
        assert answer.headers["x-request-id"]


FIELDS = {
    "/v1/chat/completions": ("model", "messages", "max_tokens"),
    "/v1/completions": ("model", "max_tokens"),
    "/v1/responses": ("model", "input", "store"),
    "/v1/messages": ("model", "messages", "max_tokens"),
}
EXTRA = {"/v1/completions": {"prompt": "hi"}}


@pytest.mark.parametrize("dialect", ["completions", "messages"])
async def test_a_stream_with_comments_before_and_between_its_events_is_whole(dialect: str) -> None:
    # Given a worker that is slower than the silence after which something is said, behind a page's origin
    backend = Backend(MemoryBroker(), step_s=0.2, tokens_per_frame=30)
    edge = make_edge("", "", "", "https://page.example")
    async with gateway_stack(backend, keep_alive_s=0.05, edge=edge) as stack:
        asked = completion(stream=True) if dialect == "completions" else chat(stream=True, max_tokens=50)
        headers = {**HEADERS, "origin": "https://page.example"}
        answer = await stack.client.post(f"/v1/{dialect}", json=asked, headers=headers)
    # Then the head has what each layer adds, and the body all events, in this API's words
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    assert answer.headers["x-request-id"]
    comment, last = (": keep-alive", "[DONE]") if dialect == "completions" else ("event: ping", "message_stop")
    assert answer.text.count(comment) >= 2
    assert last in answer.text.strip().splitlines()[-1]
    assert ("request-id" in answer.headers) == (dialect == "messages")


async def ask(stack: Stack, authorization: str) -> httpx.Response:
    return await stack.client.get("/v1/models", headers={"authorization": authorization})
