"""Idempotency-Key over several gateways: once run, once billed, the same text, whoever is asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from services.gateway.keyed_run import EPOCHS_A_RUN
from shared.contracts import idempotency_messages as i
from shared.contracts.errors import Overloaded, QuotaExceeded, Unavailable
from shared.contracts.ids import TenantId
from shared.store.redis_store import RedisStore, connect_redis
from tests.pipeline.gateway_support import default_output
from tests.pipeline.keyed_support import Gateway, World, keyed_world, until
from tests.servers import RedisServer

BODY: dict[str, Any] = {"model": "tiny", "prompt": "hi", "temperature": 0}
STREAM = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
TEXT = default_output("hi")


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[RedisStore]:
    async with connect_redis(redis_server.url) as found:
        yield found


def events(response: httpx.Response) -> list[tuple[str, Any]]:
    """(id, event) of a stream; comments are left out."""
    found = []
    for frame in response.text.removesuffix("\n\n").split("\n\n"):
        lines = dict(line.split(": ", 1) for line in frame.split("\n") if not line.startswith(":"))
        if "data" in lines:
            found.append(
                (lines.get("id", ""), lines["data"] if lines["data"] == "[DONE]" else json.loads(lines["data"]))
            )
    return found


def text_of(found: list[tuple[str, Any]]) -> str:
    return "".join(c["text"] for _, event in found if event != "[DONE]" for c in event.get("choices", ()))


async def read_some(gateway: Gateway, count: int, key: str, **headers: str) -> list[tuple[str, Any]]:
    """The first `count` events of a keyed stream; then the client goes away."""
    head = {"authorization": "Bearer key-a", "idempotency-key": key, **headers}
    lines: list[str] = []
    async with gateway.client.stream("POST", "/v1/completions", json=STREAM, headers=head) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            lines.append(line)
            if sum(line.startswith("data: ") for line in lines) == count:
                break
    kept = [line for line in lines if line]
    ids = [line.removeprefix("id: ") for line in kept if line.startswith("id: ")]
    data = [json.loads(line.removeprefix("data: ")) for line in kept if line.startswith("data: ")]
    return list(zip(ids, data, strict=True))


async def test_a_retry_at_any_gateway_gives_the_answer_once_and_is_billed_once(redis: RedisStore) -> None:
    async with keyed_world(redis) as world:
        first, second = world.gateways
        answer = await first.post("completions", BODY, "k")
        assert answer.json()["choices"][0]["text"] == TEXT
        for gateway in (first, second):
            again = await gateway.post("completions", BODY, "k")
            assert again.status_code == 200
            assert again.content == answer.content
            assert again.headers["x-request-id"] == answer.headers["x-request-id"]
        assert len(world.backend.submits) == 1
        (settle,) = await world.settled(1)
        assert settle.completion_tokens == answer.json()["usage"]["completion_tokens"]


async def test_a_stream_is_replayed_byte_for_byte(redis: RedisStore) -> None:
    async with keyed_world(redis) as world:
        answers = [await gateway.post("completions", STREAM, "k") for gateway in world.gateways]
        assert answers[0].content == answers[1].content
        found = events(answers[0])
        assert text_of(found) == TEXT
        assert found[-1][1] == "[DONE]"
        assert len({name for name, _ in found}) == len(found)
        assert "id: " not in (await world.gateways[0].post("completions", STREAM)).text
        assert len(await world.settled(2)) == 2


async def test_the_official_client_reads_keyed_streams(redis: RedisStore) -> None:
    async with keyed_world(redis) as world:
        for gateway in world.gateways:
            async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="key-a", max_retries=0) as ai:
                stream = await ai.completions.create(
                    model="tiny", prompt="hi", stream=True, extra_headers={"Idempotency-Key": "k"}
                )
                assert "".join([chunk.choices[0].text async for chunk in stream]) == TEXT
                with pytest.raises(openai.UnprocessableEntityError):
                    await ai.completions.create(model="tiny", prompt="ho", extra_headers={"Idempotency-Key": "k"})
        await world.settled(1)


async def test_requests_at_the_same_time_run_once(redis: RedisStore) -> None:
    async with keyed_world(redis, step_s=0.01) as world:
        asked = [gateway.post("completions", STREAM, "k") for gateway in world.gateways * 4]
        answers = await asyncio.gather(*asked)
        assert {answer.content for answer in answers} == {answers[0].content}
        assert text_of(events(answers[0])) == TEXT
        assert len(world.backend.submits) == 1
        await world.settled(1)


async def test_another_body_is_422_and_another_tenant_knows_nothing(redis: RedisStore) -> None:
    async with keyed_world(redis) as world:
        first, second = world.gateways
        await first.post("completions", BODY, "k")
        for gateway in (first, second):
            refused = await gateway.post("completions", {**BODY, "prompt": "ho"}, "k")
            assert refused.status_code == 422
            error = refused.json()["error"]
            assert (error["param"], error["code"]) == ("Idempotency-Key", "idempotency_key_reused")
        other = await second.post("completions", {**BODY, "prompt": "ho"}, "k", key="key-b")
        assert other.status_code == 200
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        assert (await first.post("chat/completions", chat, "k")).status_code == 200  # a key is of its route
        await world.settled(3)


async def test_another_body_while_the_first_runs_is_422(redis: RedisStore) -> None:
    hold = asyncio.Event()
    async with keyed_world(redis, hold=hold) as world:
        running = asyncio.create_task(world.gateways[0].post("completions", BODY, "k"))
        await world.backend.sent()
        for gateway in world.gateways:
            assert (await gateway.post("completions", {**BODY, "seed": 3}, "k")).status_code == 422
        hold.set()
        assert (await running).status_code == 200


@pytest.mark.parametrize("at", [0, 1])
async def test_a_dropped_stream_runs_on_and_is_resumed_where_it_was(redis: RedisStore, at: int) -> None:
    hold = asyncio.Event()
    async with keyed_world(redis, hold=hold) as world:
        had = await read_some(world.gateways[0], 1, "k")
        hold.set()
        resumed = await world.gateways[at].post("completions", STREAM, "k", **{"last-event-id": had[-1][0]})
        rest = events(resumed)
        assert text_of(had) + text_of(rest) == TEXT
        finishes = [c["finish_reason"] for _, e in rest if e != "[DONE]" for c in e["choices"] if c["finish_reason"]]
        assert finishes == ["stop"]
        assert rest[-1][1] == "[DONE]"
        assert not {name for name, _ in had} & {name for name, _ in rest}
        assert len(world.backend.submits) == 1
        await world.settled(1)


async def test_without_a_client_it_is_cancelled_in_the_end_and_a_retry_goes_on(redis: RedisStore) -> None:
    hold = asyncio.Event()
    async with keyed_world(redis, hold=hold, linger_s=0.2) as world:
        await read_some(world.gateways[0], 1, "k")
        (settle,) = await world.settled(1)
        assert settle.finish == "cancelled"
        hold.set()
        again = await world.gateways[1].post("completions", STREAM, "k")
        assert text_of(events(again)) == TEXT
        first, last = await world.settled(2)
        assert last.attempt.request_id == first.attempt.request_id
        assert last.attempt.epoch > first.attempt.epoch


async def test_a_request_that_failed_runs_again_under_the_same_id_and_seed(redis: RedisStore) -> None:
    async with keyed_world(redis) as world:
        world.backend.scheduler_refuses = Overloaded("full", retry_after_s=1.0)
        assert (await world.gateways[0].post("completions", BODY, "k")).status_code == 503
        world.backend.scheduler_refuses = None
        answer = await world.gateways[1].post("completions", BODY, "k")
        assert answer.status_code == 200
        first, second = world.backend.submits
        assert first.attempt.request_id == second.attempt.request_id
        assert first.sampling[0].seed == second.sampling[0].seed
        assert second.attempt.epoch > first.attempt.epoch


@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_a_refusal_behind_admission_keeps_its_headers_and_frees_the_key(
    redis: RedisStore, body: dict[str, Any]
) -> None:
    async with keyed_world(redis) as world:
        world.backend.refuse_placement = Overloaded("full", retry_after_s=7.0)
        refused = await world.gateways[0].post("completions", body, "k")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "7")
        world.backend.refuse_placement = None
        assert (await world.gateways[1].post("completions", body, "k")).status_code == 200
        assert {settle.attempt.request_id for settle in await world.settled(2)} == {refused.headers["x-request-id"]}


async def test_several_prompts_and_choices_are_one_answer(redis: RedisStore) -> None:
    async with keyed_world(redis) as world:
        body = {**STREAM, "prompt": ["hi", "ho"], "n": 2, "max_tokens": 6}
        answers = [await gateway.post("completions", body, "k") for gateway in world.gateways]
        assert answers[0].content == answers[1].content
        texts = ["", "", "", ""]
        for _, event in events(answers[0])[:-1]:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == [TEXT[:6]] * 4
        requests = {settle.attempt.request_id for settle in await world.settled(2)}
        assert len(requests) == 2
        assert answers[1].headers["x-request-id"] in requests


async def test_a_stream_that_failed_goes_on_when_it_is_resumed(redis: RedisStore) -> None:
    hold = asyncio.Event()
    async with keyed_world(redis, hold=hold) as world:
        first, second = world.gateways
        asked = asyncio.create_task(first.post("completions", STREAM, "k"))
        await world.backend.sent()
        for session in first.service.ingress.sessions.values():
            session.fail(Unavailable("gone", code="worker_lost"))
        *had, (last, error) = events(await asked)
        assert error["error"]["code"] == "worker_lost"
        assert text_of(had)
        hold.set()
        rest = events(await second.post("completions", STREAM, "k", **{"last-event-id": last}))
        assert text_of(had) + text_of(rest) == TEXT
        one, two = await world.settled(2)
        assert (one.attempt.request_id, one.finish) == (two.attempt.request_id, "error")
        assert two.attempt.epoch > one.attempt.epoch


async def test_without_policy_a_new_key_is_503_and_a_running_stream_ends_well(redis: RedisStore) -> None:
    hold = asyncio.Event()
    async with keyed_world(redis, 1, hold=hold) as world:
        (gateway,) = world.gateways
        running = asyncio.create_task(gateway.post("completions", STREAM, "k"))
        await world.backend.sent()
        await world.desk.stop()
        assert (await gateway.post("completions", BODY, "l")).status_code == 503
        hold.set()
        found = events(await running)
        assert text_of(found) == TEXT
        assert found[-1][1] == "[DONE]"
        again = events(await gateway.post("completions", STREAM, "k"))  # the entry is here still
        assert again == found
        await world.settled(1)
        await world.desk.start()
        await _finished(world)
        assert events(await gateway.post("completions", STREAM, "k")) == found
        assert len(world.backend.submits) == 1


async def test_a_claim_whose_answer_was_lost_does_not_keep_the_key(redis: RedisStore) -> None:
    async with keyed_world(redis) as world:
        first, second = world.gateways
        once, lost = first.door.keyed.once, [True]
        ask = once._ask

        async def losing(claim: i.IdempotencyClaim) -> i.IdempotencyState:
            state = await ask(claim)
            if lost:
                lost.clear()
                raise Unavailable("no answer came in time")
            return state

        once._ask = losing
        assert (await first.post("completions", BODY, "k")).status_code == 503
        assert (await second.post("completions", BODY, "k")).json()["choices"][0]["text"] == TEXT
        await world.settled(1)


async def test_what_redis_lost_is_written_again(redis: RedisStore) -> None:
    async with keyed_world(redis, step_s=0.05) as world:
        first, second = world.gateways
        asked = asyncio.create_task(first.post("completions", STREAM, "k"))
        (name,) = await found_keys(redis, f"{world.records._prefix}:*:once-parts:*")

        async def has_three() -> bool:
            return int(await redis.execute("LLEN", name)) >= 3

        # Given parts of an answer, the last of which Redis loses, as it does when its machine dies
        await until(has_three)
        await redis.execute("LTRIM", name, 0, 0)
        # Then its client has the answer, and so has whoever asks again
        answer = await asked
        assert text_of(events(answer)) == TEXT
        assert (await second.post("completions", STREAM, "k")).content == answer.content
        await world.settled(1)


async def found_keys(redis: RedisStore, pattern: str) -> list[str]:
    """Keys of this pattern, once there are some."""
    found: list[str] = []

    async def look() -> bool:
        found[:] = [key.decode() async for key in redis._client.scan_iter(pattern)]
        return bool(found)

    await until(look)
    return found


async def test_a_refused_admission_leaves_the_key_free(redis: RedisStore) -> None:
    async with keyed_world(redis) as world:
        world.backend.policy_refuses = QuotaExceeded("slow down", retry_after_s=1.0)
        for gateway in world.gateways:
            assert (await gateway.post("completions", BODY, "k")).status_code == 429
        assert not await world.records.purge(TenantId("tenant-a"))  # nor does it count among those there may be
        world.backend.policy_refuses = None
        assert (await world.gateways[1].post("completions", BODY, "k")).status_code == 200
        await world.settled(1)


async def test_the_owner_of_a_whole_answer_is_killed_and_a_retry_goes_on_from_its_tokens(redis: RedisStore) -> None:
    hold = asyncio.Event()
    async with keyed_world(redis, hold=hold, tokens_per_frame=7) as world:
        first, second = world.gateways
        gone = asyncio.create_task(first.post("completions", BODY, "k"))
        await until(lambda: _kept(world, 7))
        await first.kill()
        hold.set()
        assert (await second.post("completions", BODY, "k")).json()["choices"][0]["text"] == TEXT
        one, two = world.backend.submits
        assert len(two.token_ids) == len(one.token_ids) + 6 * 4
        await world.settled(1)
        gone.cancel()


async def test_a_client_that_had_more_than_was_kept_loses_and_repeats_nothing(
    redis: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = asyncio.Event()
    async with keyed_world(redis, hold=hold, tokens_per_frame=7) as world:
        first, second = world.gateways
        head = {"authorization": "Bearer key-a", "idempotency-key": "k"}
        had: list[tuple[str, Any]] = []
        async with first.client.stream("POST", "/v1/completions", json=STREAM, headers=head) as response:
            name = ""
            async for line in response.aiter_lines():
                name = line.removeprefix("id: ") if line.startswith("id: ") else name
                if line.startswith("data: "):
                    had.append((name, json.loads(line.removeprefix("data: "))))
                    if len(had) == 1:
                        await until(lambda: _kept(world, 7))
                        for entry in first.door.keyed.once._entries.values():
                            assert entry.run is not None
                            monkeypatch.setattr(entry.run, "_put", _unavailable)
                        world.backend.tokens_per_frame = 5
                        hold.set()
                    if len(had) == 3:
                        break
        hold.clear()
        await first.kill()
        resumed = asyncio.create_task(second.post("completions", STREAM, "k", **{"last-event-id": had[-1][0]}))
        await until(lambda: any(submit.ingress_id == second.id for submit in world.backend.submits))
        hold.set()
        rest = events(await resumed)
        assert text_of(had) + text_of(rest) == TEXT
        assert rest[-1][1] == "[DONE]"


async def _unavailable(state: str) -> bool:
    raise Unavailable("policy is away")


async def _kept(world: World, tokens: int) -> bool:
    """The record says so many."""
    if not world.backend.submits:
        return False
    found = await world.records.progress(TenantId("tenant-a"), world.backend.submits[0].attempt.request_id)
    return found is not None and found.completion_tokens == tokens


@pytest.mark.parametrize("resume", [False, True])
async def test_the_owner_is_killed_and_a_retry_elsewhere_goes_on_from_its_tokens(
    redis: RedisStore, resume: bool
) -> None:
    hold = asyncio.Event()
    async with keyed_world(redis, hold=hold, tokens_per_frame=7) as world:
        first, second = world.gateways
        had = await read_some(first, 1, "k")

        await until(lambda: _kept(world, 7))
        await first.kill()
        hold.set()
        headers = {"last-event-id": had[-1][0]} if resume else {}
        rest = events(await second.post("completions", STREAM, "k", **headers))
        assert (text_of(had) if resume else "") + text_of(rest) == TEXT
        assert rest[-1][1] == "[DONE]"
        one, two = world.backend.submits
        assert one.attempt.request_id == two.attempt.request_id
        assert two.attempt.epoch > one.attempt.epoch
        assert len(two.token_ids) == len(one.token_ids) + 6 * 4  # all but the last token
        (settle,) = await world.settled(1)
        assert settle.attempt.epoch == two.attempt.epoch


@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_a_frozen_owner_that_comes_back_neither_settles_nor_answers_well(
    redis: RedisStore, body: dict[str, Any]
) -> None:
    hold = asyncio.Event()
    async with keyed_world(redis, hold=hold) as world:
        first, second = world.gateways
        stale = asyncio.create_task(first.post("completions", body, "k"))
        await world.backend.sent()
        for _ in range(2):  # as if it had not been heard of for long
            world.watch.nobody_listens(first.id, world.desk._clock() - 60.0)
        world.watch.heard = lambda ingress, now: None  # type: ignore[method-assign]
        world.watch.beat = lambda ingress, requests, now: None  # type: ignore[method-assign]
        fresh = asyncio.create_task(second.post("completions", body, "k"))
        await until(lambda: any(submit.ingress_id == second.id for submit in world.backend.submits))
        hold.set()
        answer, broken = await fresh, await stale
        if body is STREAM:
            assert text_of(events(answer)) == TEXT
            assert "error" in events(broken)[-1][1]
        else:
            assert answer.json()["choices"][0]["text"] == TEXT
            assert broken.status_code in (409, 499)
        (settle,) = await world.settled(1)
        assert settle.attempt.epoch > EPOCHS_A_RUN


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"idempotency-key": ""}, "Idempotency-Key"),
        ({"idempotency-key": "x" * 256}, "Idempotency-Key"),
        ({"last-event-id": "1-2"}, "Last-Event-ID"),
        ({"idempotency-key": "k", "last-event-id": "nonsense"}, "Last-Event-ID"),
        ({"idempotency-key": "k", "last-event-id": ""}, "Last-Event-ID"),
    ],
)
async def test_headers_that_mean_nothing_are_named(redis: RedisStore, headers: dict[str, str], param: str) -> None:
    async with keyed_world(redis, 1) as world:
        refused = await world.gateways[0].post("completions", STREAM, **headers)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        gone = await world.gateways[0].post("completions", STREAM, "never", **{"last-event-id": "1-2"})
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "stream_not_found")
        whole = await world.gateways[0].post("completions", BODY, "whole", **{"last-event-id": "1-2"})
        assert (whole.status_code, whole.json()["error"]["param"]) == (400, "Last-Event-ID")
        assert not world.backend.submits


async def _finished(world: World) -> None:
    await until(lambda: not any(g.door.keyed.once.entries for g in world.gateways))


async def test_entries_go_when_their_answers_are_kept(redis: RedisStore) -> None:
    async with keyed_world(redis) as world:
        for number in range(3):
            await world.gateways[0].post("completions", BODY, f"k{number}")
        await _finished(world)
