"""What every request passes: no door without a key, and an id on every answer."""

from __future__ import annotations

import asyncio
import secrets

import httpx
import pytest

from services.gateway.guesses import GUESSES
from shared.contracts import subjects
from shared.contracts.ids import TenantId
from shared.contracts.messages import PolicyEvent
from tests.pipeline.gateway_support import HEADERS, KEYS, Stack, completion, gateway_stack


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


async def ask(stack: Stack, authorization: str) -> httpx.Response:
    return await stack.client.get("/v1/models", headers={"authorization": authorization})
