"""OP-28 to 31: budgets that many race for, usage of those who leave, headers of refusals, doors without a key."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

from services.policy import service as policy_service
from services.policy.tenants import OwnLimits
from shared.contracts.ids import RequestId
from tests.conformance.limited import LIMIT_S, TENANT, Limited, limited_stack
from tests.conformance.support import bystander, send
from tests.pipeline.gateway_support import HEADERS, MODEL, completion, gateway_stack
from tests.servers import RedisServer

WRONG = ("", "Bearer", "Bearer wrong", "Basic a2V5LWE=", "Bearer  ", "key-a", "Bearer key-a key-a", "bearer x")
PROMPT = "x" * 19  # with the tokenizer's own first one: 20 tokens


@pytest.mark.parametrize(("limit", "users"), [(250, ("",)), (100, tuple(f"new-{number}" for number in range(10)))])
async def test_op28_what_is_admitted_at_once_fits_the_budget(
    redis_server: RedisServer, limit: int, users: tuple[str, ...]
) -> None:
    hold = asyncio.Event()
    own = OwnLimits(tokens_per_minute=limit)
    async with limited_stack(redis_server.url, own, hold=hold) as limited, bystander(limited.stack, "key-b"):
        # nobody of this tenant has ever asked: there is no counter yet that could be read
        assert await limited.accounts.quota(TENANT) == {}
        # each of ten may come to 84 tokens or so, and none ends before all are judged: never more than the limit at
        # once, no matter for whom of its end users the tenant asks
        bodies = [completion(PROMPT, max_tokens=64, user=users[number % len(users)]) for number in range(10)]
        asks = [asyncio.create_task(send(limited.stack, "completions", body)) for body in bodies]
        sessions = limited.stack.service.ingress.sessions
        await until(lambda: len(sessions) - 1 + sum(ask.done() for ask in asks) == len(asks))
        hold.set()
        answers = await asyncio.gather(*asks)
        passed = [answer for answer in answers if answer.status_code == 200]
        worst = passed[0].json()["usage"]["prompt_tokens"] + 64
        assert len(passed) == limit // worst
        assert {answer.status_code for answer in answers} == {200, 429}
        # what was reserved and not used is given back
        await limited.nothing_held()
        level = int((await limited.accounts.quota(TENANT))["tokens"]) / 60_000_000
        assert level <= sum(answer.json()["usage"]["total_tokens"] for answer in passed)


@pytest.mark.parametrize("came", [0, 2])
async def test_op29_who_leaves_is_charged_for_what_came(redis_server: RedisServer, came: int) -> None:
    # frames wait after the first, of two tokens; or nothing comes: it is queued, or its prompt is computed
    options = {"hold": asyncio.Event(), "step_s": 0.0 if came else 3600.0}
    async with limited_stack(redis_server.url, OwnLimits(tokens_per_minute=10_000), **options) as limited:
        sessions, running = limited.stack.service.ingress.sessions, limited.stack.backend.running
        leaving = asyncio.create_task(stream_and_wait(limited.url))
        await until(lambda: [key for key in sessions if key in running and running[key].sent == came])
        (request_id,) = sessions
        await until(lambda: sessions[request_id].usage().completion_tokens == came)
        leaving.cancel()
        await limited.idle()
        row = await row_of(limited, request_id)
        assert (row["finish"], row["completion_tokens"]) == ("cancelled", str(came))
        assert (int(row["prompt_tokens"]) > 0) == (came > 0)
        assert (await limited.accounts.usage(TENANT))["requests"] == "1"


async def test_op30_a_refusal_says_when_to_come_back(redis_server: RedisServer) -> None:
    # one more every three seconds, so that the wait is short
    own = OwnLimits(requests_per_minute=20, tokens_per_minute=100_000)
    async with limited_stack(redis_server.url, own) as limited, bystander(limited.stack, "key-b"):
        body = completion(max_tokens=1)
        lefts = []
        for _ in range(62):
            answer = await send(limited.stack, "completions", body)
            lefts.append(int(answer.headers["x-ratelimit-remaining-requests"]))
            if answer.status_code == 429:
                break
        assert answer.status_code == 429
        error = answer.json()["error"]
        assert error["type"] == "rate_limit_error"
        assert "20 requests per minute" in error["message"]
        assert lefts[-1] == 0
        assert min(lefts) == 0
        assert answer.headers["x-ratelimit-limit-requests"] == "20"
        wait_s = int(answer.headers["retry-after"])
        assert wait_s >= 1
        await asyncio.sleep(wait_s)
        assert (await send(limited.stack, "completions", body)).status_code == 200


async def test_op30_headers_tell_of_the_limit_that_refused(redis_server: RedisServer) -> None:
    own = OwnLimits(tokens_per_minute=100)
    async with limited_stack(redis_server.url, own) as limited, bystander(limited.stack, "key-b"):
        first = await send(limited.stack, "completions", completion(PROMPT, max_tokens=40))
        assert first.status_code == 200
        assert first.headers["x-ratelimit-limit-tokens"] == "100"
        worst = first.json()["usage"]["prompt_tokens"] + 40
        # what it holds is not left, also while it runs
        assert 100 - worst - 1 <= int(first.headers["x-ratelimit-remaining-tokens"]) <= 100 - worst + 5
        assert "x-ratelimit-limit-requests" not in first.headers
        refused = await send(limited.stack, "completions", completion(PROMPT, max_tokens=70))
        assert refused.status_code == 429
        assert "tokens per minute" in refused.json()["error"]["message"]
        assert 0 <= int(refused.headers["x-ratelimit-remaining-tokens"]) < worst + 70
        # a request that never fits is told apart, and not to be tried again
        never = await send(limited.stack, "completions", completion(PROMPT, max_tokens=200))
        assert (never.status_code, never.json()["error"]["code"]) == (429, "request_too_large")
        assert "retry-after" not in never.headers
        assert int(refused.headers["retry-after"]) >= 1


async def test_op30_requests_at_once_are_refused_by_name_and_served_when_one_has_ended(
    redis_server: RedisServer,
) -> None:
    hold = asyncio.Event()
    own = OwnLimits(requests_per_minute=20, max_parallel=2)
    async with limited_stack(redis_server.url, own, hold=hold) as limited, bystander(limited.stack, "key-b"):
        stack, sessions = limited.stack, limited.stack.service.ingress.sessions
        asks = [asyncio.create_task(send(stack, "completions", completion(max_tokens=8))) for _ in range(2)]
        await until(lambda: len(sessions) == 3)
        refused = await send(stack, "completions", completion(max_tokens=8))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "concurrency_limit_exceeded")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert "limit of 2 requests at once" in refused.json()["error"]["message"]
        told = {name: value for name, value in refused.headers.items() if name.startswith("x-ratelimit")}
        assert (told["x-ratelimit-limit-parallel"], told["x-ratelimit-remaining-parallel"]) == ("2", "0")
        assert int(told["x-ratelimit-remaining-requests"]) > 0  # of a limit that did not refuse
        assert not {name for name in told if name.endswith("tokens") or "reset-parallel" in name}
        wait_s = int(refused.headers["retry-after"])
        assert wait_s >= 1
        hold.set()
        served = await asyncio.gather(*asks)
        assert [answer.status_code for answer in served] == [200, 200]
        await asyncio.sleep(wait_s)
        again = await send(stack, "completions", completion(max_tokens=8))
        assert again.status_code == 200
        assert again.headers["x-ratelimit-remaining-parallel"] in ("1", "2")  # with itself, or after it


async def test_one_after_another_is_never_more_than_one_at_once(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a client that asks again as soon as it has its answer may be ahead of that one's settlement
    monkeypatch.setattr(policy_service, "SLOT_LOOKS_S", (0.02,) * 500)
    async with limited_stack(redis_server.url, OwnLimits(max_parallel=1)) as limited:
        for number in range(30):
            answer = await send(limited.stack, "completions", completion(max_tokens=4, stream=bool(number % 2)))
            assert answer.status_code == 200, number
            assert answer.headers["x-ratelimit-remaining-parallel"] in ("0", "1")


async def test_limits_are_told_on_every_answer_of_a_key_that_has_some(redis_server: RedisServer) -> None:
    async with limited_stack(redis_server.url, OwnLimits(requests_per_minute=30)) as limited:
        stack = limited.stack
        asks = [
            stack.client.get("/v1/models", headers=HEADERS),
            stack.client.get("/v1/nothing", headers=HEADERS),
            send(stack, "completions", b"{"),
            send(stack, "completions", completion(stream=True)),
        ]
        for number, ask in enumerate(asks):
            answer = await ask
            assert answer.headers["x-ratelimit-limit-requests"] == "30"
            left = int(answer.headers["x-ratelimit-remaining-requests"])
            assert left == (30 if number < 3 else 29)
            reset_s = float(answer.headers["x-ratelimit-reset-requests"].removesuffix("s"))
            assert 0 <= reset_s <= (0 if number < 3 else 2)
        others = await stack.client.get("/v1/models", headers={"authorization": "Bearer key-b"})
        assert not [name for name in others.headers if name.startswith("x-ratelimit")]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
async def test_what_only_counts_tokens_is_one_of_the_requests_a_minute(
    redis_server: RedisServer, path: str, body: dict[str, Any]
) -> None:
    hold = asyncio.Event()
    own = OwnLimits(requests_per_minute=3, tokens_per_minute=600, max_parallel=1)
    async with limited_stack(redis_server.url, own, hold=hold) as limited:
        stack = limited.stack
        runs = asyncio.create_task(send(stack, "completions", completion(max_tokens=8)))
        await until(lambda: stack.service.ingress.sessions)
        left = []
        for _ in range(3):
            answer = await stack.client.post(path, json={"model": MODEL, **body}, headers=HEADERS)
            left.append((answer.status_code, answer.headers["x-ratelimit-remaining-requests"]))
        # the one place is taken, and is not asked for
        assert left == [(200, "1"), (200, "0"), (429, "0")]
        assert int(answer.headers["retry-after"]) >= 1
        wrong = await stack.client.post(path, json={"model": MODEL, **body, "nonsense": 1}, headers=HEADERS)
        assert wrong.status_code == 400
        free = await stack.client.post(path, json={"model": MODEL, **body}, headers={"authorization": "Bearer key-b"})
        assert free.status_code == 200
        hold.set()
        assert (await runs).status_code == 200
        await limited.idle()
        assert (await limited.accounts.usage(TENANT))["requests"] == "1"  # of work


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"])
async def test_op31_what_is_not_on_the_public_list_needs_a_key(method: str) -> None:
    paths = (
        *("/v1/models", "/v1/models/tiny", "/v1/chat/completions", "/v1/completions", "/v1/files", "/v1/batches"),
        *("/v1/embeddings", "/v1/responses", "/tokenize", "/metrics", "/docs", "/openapi.json", "/invocations"),
        *("/baton/cluster", "/baton/traces", "/health/", "/healthz", "/readyx", "/consolex"),
        *("//v1/models", "/v1//models", "/v1/models/", "/v1/../v1/models", "/console/../v1/models", "/%2e/v1/models"),
    )
    async with gateway_stack() as stack, bystander(stack):
        said = set()
        for number, path in enumerate(paths):
            for wrong in ("", WRONG[number % len(WRONG)]):
                response = await stack.client.request(method, path, headers={"authorization": wrong} if wrong else {})
                # a path that is none of ours may be told as such, and the page's folder holds no secret
                page = path.startswith("/console/") and response.status_code in (404, 405)
                assert response.status_code == 401 or page
                if response.status_code == 401:
                    assert response.headers["www-authenticate"] == "Bearer"
                    said.add(response.text)
        assert len(said - {""}) <= 1
        assert len(stack.backend.admits) == 1  # the bystander's
        assert (await stack.client.get("/v1/models", headers={"authorization": "BEARER key-a"})).status_code == 200


async def stream_and_wait(url: str) -> None:
    async with (
        httpx.AsyncClient(base_url=url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=completion(stream=True), headers=HEADERS) as response,
    ):
        async for _ in response.aiter_lines():
            pass
        await asyncio.sleep(60)


async def until(condition: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        await asyncio.sleep(0.01)


async def row_of(limited: Limited, request_id: RequestId) -> dict[str, str]:
    """The ledger's row, once it is there."""
    async with asyncio.timeout(LIMIT_S):
        while not (row := await limited.accounts.row(TENANT, request_id)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return row
