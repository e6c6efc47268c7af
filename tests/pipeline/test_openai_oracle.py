"""The oracle that holds every answer finds what is wrong, and `llm-comply` finds nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from llm_comply.config import ComplianceConfig
from llm_comply.result import TestStatus as Status
from llm_comply.runner import TestRunner as Runner
from llm_comply.schema import SpecLoader
from llm_comply.tests.openai_chat import OPENAI_CHAT_TESTS

from shared.bus.memory_bus import MemoryBroker
from tests import openai_oracle
from tests.answer_tap import tapped
from tests.answer_watch import WATCH
from tests.pipeline.gateway_support import MODEL, Backend, completion, http_stack
from tests.pipeline.test_gateway_connections import connect, request

CHOICE = {"index": 0, "text": "hi", "logprobs": None, "finish_reason": "stop"}
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
WHOLE = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": [CHOICE], "usage": USAGE}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "San Francisco"}}\n</tool_call>'
FOR_IMAGES = "chat-image-input"
"""The one case that no text model can pass."""
FOR_OTHERS = "chat-reasoning-summary"
"""The tool itself skips it for models that are not of its list."""


@pytest.mark.parametrize(
    "broken",
    [
        {"object": "chat.completion"},
        {"created": "1"},
        {"nonsense": 1},
        {"choices": [CHOICE | {"finish_reason": "abort"}]},
        {"choices": [{"index": 0, "text": "hi"}]},
        {"usage": USAGE | {"cached": 1}},
    ],
)
def test_it_finds_faults(broken: dict[str, Any]) -> None:
    assert openai_oracle.faults(WHOLE, "CreateCompletionResponse") == []
    assert openai_oracle.faults(WHOLE | broken, "CreateCompletionResponse")


def test_it_finds_faults_in_streams_and_in_numbers() -> None:
    for body in (b'data: {"id": "x"}\n\n', b'data: {"error": {"message": "m"}}\n\n'):
        with pytest.raises(AssertionError):
            openai_oracle.check("/v1/chat/completions", 200, "text/event-stream", body)
    with pytest.raises(AssertionError, match="NaN"):
        openai_oracle.check("/v1/completions", 200, "application/json", b'{"a": NaN}')


LINE = {"id": "batch_req_1", "custom_id": "a", "response": None, "error": {"code": "c", "message": "m"}}


def lines_faults(*lines: object) -> list[str]:
    body = b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    return openai_oracle.all_faults("GET", "/v1/files/file-1/content", 200, "application/octet-stream", body)


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in LINE.items() if key != name}


@pytest.mark.parametrize("broken", [b"{", b"[]", b"", *map(without, LINE), LINE | {"id": 1}, LINE | {"more": 1}])
@pytest.mark.parametrize("before", [[LINE], [LINE | {"id": 2}]])
def test_it_finds_faults_in_a_batchs_lines_and_forgets_none(before: list[Any], broken: Any) -> None:
    assert lines_faults(LINE, LINE) == []
    expected = len(lines_faults(*before)) + 1
    assert len(lines_faults(*before, broken, LINE)) == expected


def test_a_batchs_first_line_tells_what_the_file_is() -> None:
    wrong = LINE | {
        "response": {"status_code": 200, "request_id": "r", "body": WHOLE | {"created": "1"}},
        "error": None,
    }
    assert len(lines_faults(wrong, LINE)) == 1
    assert len(lines_faults(without("error"), LINE)) == len(lines_faults(without("response"), LINE)) == 1
    asked = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}
    for other in (b"plain text", b"[1]", asked, b""):
        assert lines_faults(other, LINE) == []


BAD = b'{"object": "list", "data": [{"id": "m"}]}'
CUT = b'data: {"id": "x"}\n\ndata: {"id": "y'


async def test_what_a_gateway_of_this_process_answers_is_watched() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        kind = b"text/event-stream" if scope["method"] == "POST" else b"application/json"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        await send({"type": "http.response.body", "body": CUT if scope["method"] == "POST" else BAD, "more_body": True})
        if scope["path"] == "/v1/models":
            await send({"type": "http.response.body", "body": b""})

    async def taken(message: Any) -> None: ...

    WATCH.faults()
    for method, path, count in (
        ("GET", "/v1/models", 3),  # of its only model three fields are missing
        ("GET", "/v1/models/m", 0),  # broke off
        ("POST", "/v1/completions", 4),
        ("POST", "/v1/messages", 0),
        ("POST", "/other", 0),
    ):
        await tapped(app, WATCH.take)({"type": "http", "method": method, "path": path}, None, taken)
        assert len(WATCH.faults()) == count, path


@pytest.mark.parametrize("kind", ["httpx", "openai"])
async def test_what_clients_read_from_other_gateways_is_watched(kind: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\nx-request-id: r\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(BAD) + BAD)
        writer.close()

    WATCH.faults()
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        if kind == "openai":
            async with openai.AsyncOpenAI(base_url=url, api_key="k") as client:
                await client.models.list()
        else:
            async with httpx.AsyncClient() as plain:
                await plain.get(f"{url}/models")
    assert len(WATCH.faults()) == 3


async def test_what_clients_of_any_kind_see_is_watched() -> None:
    async with http_stack() as (_, url):
        before = openai_oracle.answers["CreateCompletionResponse"]
        reader, writer = await connect(url)
        writer.write(request(completion(max_tokens=2), "/v1/completions"))
        await reader.readuntil(b"}}")
        writer.close()
    assert WATCH.faults() == []
    assert openai_oracle.answers["CreateCompletionResponse"] == before + 1


async def test_llm_comply_passes_all_that_a_text_model_can() -> None:
    backend = Backend(MemoryBroker(), text=lambda prompt: CALL if "weather in San Francisco" in prompt else "Hello.")
    async with http_stack(backend, context=4096) as (_, url):
        config = ComplianceConfig(base_url=f"{url}/v1", api_key="key-a", model=MODEL, timeout=20)
        cases = [case for case in OPENAI_CHAT_TESTS if case.id != FOR_IMAGES]
        suite = await asyncio.to_thread(Runner(config, cases, SpecLoader(_spec())).run_all)
    told = {result.id: (result.status, result.errors, result.warnings, result.response) for result in suite.results}
    assert told.pop(FOR_OTHERS)[0] is Status.SKIPPED
    assert len(told) == 7
    assert {name: found for name, found in told.items() if found[0] is not Status.PASSED or found[2]} == {}


def _spec() -> str:
    from llm_comply import schema

    return str(schema._SPECS_DIR / "openai_chat.json")
