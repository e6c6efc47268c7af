"""The gateway end to end on the memory bus: answers, errors, cancellation, failover, readiness, traces."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import pytest

from shared.bus.bus import NO_RESPONDERS
from shared.bus.memory_bus import MemoryBroker
from shared.contracts import subjects
from shared.contracts.errors import Overloaded, QuotaExceeded, Unavailable
from shared.contracts.grants import Limits
from shared.contracts.ids import TenantId
from shared.contracts.messages import PolicyEvent, SpanBatch
from shared.contracts.parts import SpanRecord
from tests.pipeline.gateway_support import (
    HEADERS,
    TOKENIZER,
    Backend,
    Stack,
    chat,
    completion,
    default_output,
    gateway_stack,
    http_stack,
)

TEXT = default_output("")


async def post(stack: Stack, path: str, body: Any, **headers: str) -> httpx.Response:
    return await stack.client.post(f"/v1/{path}", json=body, headers={**HEADERS, **headers})


def events(response: httpx.Response) -> list[Any]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


async def test_a_chat_answer_and_its_settlement() -> None:
    async with gateway_stack() as stack:
        response = await post(stack, "chat/completions", chat(seed=7, temperature=0.5))
        assert response.status_code == 200, response.text
        body = response.json()
        assert body["choices"][0]["message"]["content"] == TEXT
        assert body["choices"][0]["finish_reason"] == "stop"
        made = len(TOKENIZER.encode(TEXT)) + 1
        assert body["usage"]["completion_tokens"] == made
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
        (settle,) = await stack.settled()
        assert (settle.completion_tokens, settle.cached_tokens, settle.finish) == (made, 3, "stop")
        assert settle.prompt_tokens == body["usage"]["prompt_tokens"]
        (submit,) = stack.backend.submits
        assert (submit.sampling[0].seed, submit.sampling[0].temperature) == (7, 0.5)
        assert stack.backend.running[submit.attempt.request_id].acked


@pytest.mark.parametrize(("path", "body"), [("chat/completions", chat()), ("completions", completion())])
async def test_streamed_equals_whole(path: str, body: dict[str, Any]) -> None:
    async with gateway_stack() as stack:
        response = await post(stack, path, {**body, "stream": True, "stream_options": {"include_usage": True}})
        got = events(response)
        assert got[-1] == "[DONE]"
        pieces = [choice for event in got[:-1] for choice in event["choices"]]
        text = "".join(p.get("text") or p.get("delta", {}).get("content") or "" for p in pieces)
        assert text == TEXT
        assert [p["finish_reason"] for p in pieces if p["finish_reason"]] == ["stop"]
        whole = (await post(stack, path, body)).json()
        assert got[-2]["usage"] == whole["usage"]


@pytest.mark.parametrize(("path", "body"), [("chat/completions", chat(n=2)), ("completions", completion(["a", "b"]))])
async def test_the_usage_so_far_in_every_chunk(path: str, body: dict[str, Any]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with gateway_stack() as stack:
        got = events(await post(stack, path, {**body, "stream": True, "stream_options": options}))
        assert got.pop() == "[DONE]"
        made = [event["usage"]["completion_tokens"] for event in got]
        assert made == sorted(made)
        assert made[0] < made[-1]
        assert len({event["usage"]["prompt_tokens"] for event in got}) == 1
        options = {"continuous_usage_stats": True}
        refused = await post(stack, path, {**body, "stream": True, "stream_options": options})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "stream_options.continuous_usage_stats"


async def test_lost_frames_are_replayed() -> None:
    backend = Backend(MemoryBroker(), drop_every=3)
    async with gateway_stack(backend) as stack:
        response = await post(stack, "completions", completion())
        assert response.json()["choices"][0]["text"] == TEXT


@pytest.mark.parametrize("told", [True, False])
async def test_a_lost_worker_is_not_noticed_by_the_client(told: bool) -> None:
    backend = Backend(MemoryBroker(), step_s=0.01)
    async with gateway_stack(backend) as stack:
        answer = asyncio.create_task(post(stack, "completions", completion()))
        await backend.sent(10)
        await backend.lose_worker(told=told)
        response = await answer
        assert response.json()["choices"][0]["text"] == TEXT
        assert [submit.attempt.epoch for submit in backend.submits] == [1, 2]
        assert len(backend.submits[1].token_ids) > len(backend.submits[0].token_ids)
        (settle,) = await stack.settled()
        assert settle.attempt.epoch == 2
        assert settle.completion_tokens == response.json()["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("knob", "error", "status"),
    [
        ("policy_refuses", QuotaExceeded("slow down", retry_after_s=6.2), 429),
        ("scheduler_refuses", Overloaded("busy", retry_after_s=3), 503),
        ("refuse_placement", Overloaded("no room", retry_after_s=3), 503),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_have_their_status_also_when_streamed(knob: str, error: Any, status: int, stream: bool) -> None:
    backend = Backend(MemoryBroker(), **{knob: error})
    async with gateway_stack(backend) as stack:
        response = await post(stack, "chat/completions", chat(stream=stream))
        assert response.status_code == status
        assert response.headers["retry-after"] in ("7", "3")
        assert response.json()["error"]["message"] == error.message
        if knob != "policy_refuses":
            (settle,) = await stack.settled()
            assert (settle.prompt_tokens, settle.completion_tokens, settle.finish) == (0, 0, "error")


async def test_more_prompts_than_may_run_at_once_are_refused_before_one_is_begun() -> None:
    async with gateway_stack(Backend(MemoryBroker(), limits=Limits(max_parallel=2))) as stack:
        refused = await stack.client.post("/v1/completions", json=completion(["a", "b", "c"]), headers=HEADERS)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (429, "request_too_large", "prompt")
        assert "retry-after" not in refused.headers
        assert stack.backend.admits == []
        served = await stack.client.post("/v1/completions", json=completion(["a", "b"]), headers=HEADERS)
        assert len(served.json()["choices"]) == 2
        await stack.settled(2)


async def test_without_policy_or_scheduler_it_is_503() -> None:
    async with gateway_stack(hop_timeout_s=0.2) as stack:
        await stack.backend.bus.close()
        response = await post(stack, "chat/completions", chat())
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert "baton.v1" not in response.text


async def test_a_request_that_comes_during_an_election_waits_for_it() -> None:
    backend = Backend(MemoryBroker(), scheduler_refuses=Unavailable("no longer leading"))
    async with gateway_stack(backend) as stack:
        asked = asyncio.create_task(post(stack, "chat/completions", chat()))
        while not backend.submits:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        backend.scheduler_refuses = None
        assert (await asked).status_code == 200
        assert len({submit.attempt for submit in backend.submits}) == 1 < len(backend.submits)


async def test_an_election_that_does_not_end_is_503_and_lets_the_reservation_go() -> None:
    backend = Backend(MemoryBroker(), scheduler_refuses=Unavailable("no longer leading", code=NO_RESPONDERS))
    async with gateway_stack(backend, submit_s=1.5) as stack:
        response = await post(stack, "chat/completions", chat(stream=True))
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"]["code"] == "unavailable"
        assert len(backend.submits) == 2
        (settle,) = await stack.settled()
        assert (settle.prompt_tokens, settle.completion_tokens, settle.finish) == (0, 0, "error")


async def test_a_stream_that_fails_ends_with_an_error_frame_and_without_done() -> None:
    backend = Backend(MemoryBroker(), hold=asyncio.Event())
    async with gateway_stack(backend) as stack:
        answer = asyncio.create_task(post(stack, "chat/completions", chat(stream=True)))
        await backend.sent()
        for session in stack.service.ingress.sessions.values():
            session.fail(Unavailable("gone", code="worker_lost"))
        got = events(await answer)
        assert got[-1]["error"]["code"] == "worker_lost"
        assert not any(choice["finish_reason"] for event in got[:-1] for choice in event["choices"])
        backend.hold.set()  # type: ignore[union-attr]


async def test_a_client_that_leaves_cancels_at_the_worker_and_is_charged_for_what_came() -> None:
    backend = Backend(MemoryBroker(), hold=asyncio.Event())
    async with http_stack(backend) as (stack, url):
        async with (
            httpx.AsyncClient(base_url=url) as client,
            client.stream("POST", "/v1/completions", json=completion(stream=True), headers=HEADERS) as response,
        ):
            async for _ in response.aiter_lines():
                break
        (settle,) = await stack.settled()
        assert [cancel.reason for cancel in backend.cancels] == ["client_gone"]
        assert (settle.completion_tokens, settle.finish) == (2, "cancelled")
        assert settle.compute[0].totals.cached_tokens == 3
        backend.hold.set()  # type: ignore[union-attr]


async def test_a_client_that_leaves_an_unstreamed_request_cancels_it_too() -> None:
    backend = Backend(MemoryBroker(), hold=asyncio.Event())
    async with http_stack(backend) as (stack, url):
        async with httpx.AsyncClient(base_url=url) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/v1/completions", json=completion(), headers=HEADERS, timeout=0.3)
        await stack.settled()
        assert [cancel.reason for cancel in backend.cancels] == ["client_gone"]
        # the scheduler is told as well
        async with asyncio.timeout(10):
            while not backend.withdrawals:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        (withdrawn,) = backend.withdrawals
        assert withdrawn.attempt.request_id == backend.submits[0].attempt.request_id
        backend.hold.set()  # type: ignore[union-attr]


async def test_a_reader_that_does_not_read_is_cancelled() -> None:
    backend = Backend(MemoryBroker(), text=lambda prompt: "x" * 300_000, tokens_per_frame=100)
    options = {"max_unsent_bytes": 20_000, "context": 1_000_000, "send_buffer": 16_384}
    async with http_stack(backend, **options) as (stack, url):  # type: ignore[arg-type]
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", int(url.rsplit(":", 1)[1])))
        body = json.dumps(completion(stream=True, max_tokens=300_000)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key-a\r\nContent-Length: {len(body)}"
        sock.sendall(head.encode() + b"\r\n\r\n" + body)
        (settle,) = await stack.settled()
        assert settle.finish == "cancelled"
        assert 0 < settle.completion_tokens < 300_000
        assert [cancel.reason for cancel in backend.cancels] == ["slow_client"]
        sock.close()


async def test_a_revoked_key_is_refused_at_once_although_it_was_cached() -> None:
    async with gateway_stack() as stack:
        await post(stack, "completions", completion())
        await post(stack, "completions", completion())
        assert stack.backend.authentications == 1
        event = PolicyEvent(kind="revoked", tenant=TenantId("tenant-a"), key_id="key-a")
        await stack.backend.bus.publish(subjects.POLICY_EVENTS, event)
        await asyncio.sleep(0.01)
        await post(stack, "completions", completion())
        assert stack.backend.authentications == 2


async def test_the_key_is_checked_before_the_body_is_read() -> None:
    async with gateway_stack() as stack:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic a2V5"}):
            response = await stack.client.post("/v1/chat/completions", content=b"{", headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert not stack.backend.admits


async def test_bodies_over_the_limit_are_refused_with_and_without_a_length() -> None:
    async def chunks() -> Any:
        for _ in range(200):
            yield b" " * 10_000

    async with http_stack(max_body_bytes=50_000) as (_, url), httpx.AsyncClient(base_url=url) as client:
        response = await client.post("/v1/completions", content=b" " * 100_000, headers=HEADERS)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
        response = await client.post("/v1/completions", content=chunks(), headers=HEADERS)
        assert response.status_code == 413


async def test_models_health_unknown_paths_and_methods() -> None:
    async with gateway_stack() as stack:
        get = stack.client.get
        assert (await get("/health")).json() == {"status": "ok"}
        assert (await get("/v1/models")).status_code == 401
        models = (await get("/v1/models", headers=HEADERS)).json()
        assert [model["id"] for model in models["data"]] == ["tiny"]
        assert (await get("/v1/models/tiny", headers=HEADERS)).json()["object"] == "model"
        missing = await get("/v1/models/other", headers=HEADERS)
        assert missing.status_code == 404
        assert "tiny" in missing.json()["error"]["message"]
        for path in ("/v1/nothing", "/docs"):
            assert (await get(path)).status_code == 401
            response = await get(path, headers=HEADERS)
            assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_url")
        wrong = await get("/v1/completions", headers=HEADERS)
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")


async def test_ready_needs_everybody_and_a_token_of_the_probe() -> None:
    async with gateway_stack(probe_key="key-a") as stack:
        ready = await stack.client.get("/ready")
        assert ready.status_code == 503
        assert ready.json()["checks"]["token"] is False
        assert await stack.door.probe()
        ready = await stack.client.get("/ready")
        assert ready.status_code == 200, ready.text
        stack.service.ingress.draining = True
        assert (await stack.client.get("/ready")).status_code == 503
        response = await post(stack, "completions", completion())
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"


async def test_drain_lets_streams_finish_and_ends_the_rest_with_an_error() -> None:
    backend = Backend(MemoryBroker(), hold=asyncio.Event())
    async with gateway_stack(backend, drain_s=0.2) as stack:
        answer = asyncio.create_task(post(stack, "completions", completion(stream=True)))
        await backend.sent()
        await stack.service.drain()
        assert events(await answer)[-1]["error"]["code"] == "shutting_down"
        (settle,) = await stack.settled()
        assert settle.finish == "error"
        backend.hold.set()  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["traceparent", "tracestate", "baggage"])
async def test_trace_headers_of_strangers_stay_out_of_the_log(name: str, caplog: pytest.LogCaptureFixture) -> None:
    async with gateway_stack() as stack:
        sent = {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01", name: "whales=dawn," * 2000}
        assert (await post(stack, "chat/completions", chat(), **sent)).status_code == 200
        assert "whales" not in caplog.text
        assert "opentelemetry" not in " ".join(record.name for record in caplog.records)


async def test_a_request_admitted_while_the_gateway_drains_lets_its_reservation_go() -> None:
    async with gateway_stack(drain_s=0.3) as stack:
        service, ask = stack.service, stack.service.ingress.ask_policy
        drains: list[asyncio.Task[None]] = []

        async def slow(subject: str, *rest: Any) -> Any:
            reply = await ask(subject, *rest)
            if subject == subjects.POLICY_ADMIT:
                drains.append(asyncio.create_task(service.drain()))
                await asyncio.sleep(0.1)
                assert not drains[0].done()
            return reply

        service.ingress.ask_policy = slow  # type: ignore[method-assign]
        response = await post(stack, "chat/completions", chat())
        assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")
        (settle,) = await stack.settled()
        assert (settle.prompt_tokens, settle.completion_tokens) == (0, 0)
        await drains[0]


async def test_spans_in_another_services_name_are_dropped() -> None:
    async with gateway_stack() as stack:
        span = SpanRecord("a" * 32, "b" * 16, parent_id="", name="n", service="policy", start_ns=1, end_ns=2)
        for service in ("decode", "policy"):
            await stack.backend.bus.publish(subjects.trace(service), SpanBatch(service="policy", spans=(span,)))
            await asyncio.sleep(0.05)
            assert bool(stack.service.traces.get("a" * 32)) == (service == "policy")


async def test_the_clients_request_id_is_echoed_and_not_used() -> None:
    async with gateway_stack() as stack:
        headers = {"X-Request-Id": "same"}
        one, two = await asyncio.gather(
            post(stack, "completions", completion(), **headers), post(stack, "completions", completion(), **headers)
        )
        assert one.headers["x-request-id"] == two.headers["x-request-id"] == "same"
        assert one.json()["id"] != two.json()["id"]
        own = await post(stack, "completions", completion())
        assert own.headers["x-request-id"].startswith("req-")


async def test_a_trace_of_the_gateways_own_spans_without_prompt_text() -> None:
    async with gateway_stack() as stack:
        secret = "whales sing at dawn"
        parent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
        response = await post(stack, "chat/completions", chat(secret), traceparent=parent)
        await stack.settled()
        await asyncio.sleep(0.4)
        admin = {"authorization": "Bearer key-admin"}
        listed = (await stack.client.get("/baton/traces", headers=admin)).json()["data"]
        (line,) = listed
        assert (line["model"], line["tenant"], line["path"], line["status"]) == ("tiny", "tenant-a", "local", "ok")
        assert line["trace_id"] != "a" * 32
        whole = await stack.client.get(f"/baton/traces/{response.json()['id']}", headers=admin)
        spans = whole.json()["spans"]
        assert {span["name"] for span in spans} == {"gateway.request", "gateway.tokenize", "gateway.stream"}
        root = next(span for span in spans if span["name"] == "gateway.request")
        assert root["links"] == ["a" * 32]
        assert {span["parent_id"] for span in spans} == {"", root["span_id"]}
        assert secret not in whole.text
        assert (await stack.client.get("/baton/traces/ffffffff", headers=admin)).status_code == 404


@pytest.mark.parametrize("limit", ["0", "-1", "201", "²", "", "1e2", "000000001" + "9" * 5000, "1" * 30])
async def test_a_limit_of_traces_that_is_none_is_refused(limit: str) -> None:
    async with gateway_stack() as stack:
        answer = await stack.client.get(
            "/baton/traces", params={"limit": limit}, headers={"authorization": "Bearer key-admin"}
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")


async def test_an_admin_sees_requests_workers_and_scheduler() -> None:
    async with gateway_stack() as stack:
        assert (await stack.client.get("/baton/cluster", headers=HEADERS)).status_code == 403
        found = (await stack.client.get("/baton/cluster", headers={"authorization": "Bearer key-admin"})).json()
        assert found["gateway"] == {"id": "gateway-1", "requests": 0, "draining": False}
        assert [worker["role"] for worker in found["workers"]] == ["decode"]
        assert found["scheduler"]["term"] == 1
