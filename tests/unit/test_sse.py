"""Response bodies: the official client's strict types, and the shape of streams."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from services.gateway.chunks import DONE, ChunkWriter, error_frame
from services.gateway.errors import error_headers
from shared.contracts.errors import (
    BatonError,
    BodyTooLarge,
    Internal,
    InvalidInput,
    Overloaded,
    ProtocolError,
    QuotaExceeded,
    Unauthenticated,
    Unavailable,
)
from shared.ingress.completion_body import Choice, Usage, whole_body
from shared.ingress.error_body import error_body

USAGE = Usage(5, 2, 3)


def events(body: bytes) -> list[Any]:
    frames = body.decode().split("\n\n")
    assert frames[-1] == ""
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1] if frame != "data: [DONE]"]


def stream(kind: str, include_usage: bool) -> bytes:
    writer = ChunkWriter(kind, "req-1", "m", 7, include_usage)
    return writer.role(0) + writer.delta(0, 'a"\n\u2028é') + writer.finish(0, "stop") + writer.end(USAGE)


@pytest.mark.parametrize("include_usage", [False, True])
def test_chat_chunks_are_the_clients_types(include_usage: bool) -> None:
    got = events(stream("chat", include_usage))
    chunks = [ChatCompletionChunk.model_validate(event, strict=True) for event in got]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[1].choices[0].delta.content == 'a"\n\u2028é'
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["stop"]
    assert {chunk.id for chunk in chunks} == {"chatcmpl-1"}


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_the_usage_chunk_comes_only_when_asked_for_after_the_finish(kind: str) -> None:
    without, with_usage = stream(kind, False), stream(kind, True)
    assert b"usage" not in without
    got = events(with_usage)
    assert got[-1]["choices"] == []
    assert got[-1]["usage"]["total_tokens"] == 7
    assert got[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    assert all(event["usage"] is None for event in got[:-1])
    for body in (without, with_usage):
        assert body.endswith(DONE)
        assert body.count(DONE) == 1


def test_completion_chunks_are_the_clients_types() -> None:
    got = events(stream("completions", True))
    reasons = [choice["finish_reason"] for event in got for choice in event["choices"]]
    assert reasons == [None, "stop"]
    got[0]["choices"][0]["finish_reason"] = "stop"  # the type knows only last chunks
    chunks = [Completion.model_validate(event, strict=True) for event in got]
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == 'a"\n\u2028é'


def test_whole_answers_are_the_clients_types() -> None:
    chat = ChatCompletion.model_validate(
        whole_body("chat", "req-1", "m", 7, [Choice("x", "length")], USAGE), strict=True
    )
    assert chat.choices[0].message.content == "x"
    assert chat.usage is not None
    done = Completion.model_validate(
        whole_body("completions", "req-1", "m", 7, [Choice("x", "stop")], USAGE), strict=True
    )
    assert done.choices[0].text == "x"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidInput("bad", param="seed"), 400, "invalid_request_error"),
        (Unauthenticated("who"), 401, "authentication_error"),
        (BodyTooLarge("big"), 413, "invalid_request_error"),
        (QuotaExceeded("slow"), 429, "rate_limit_error"),
        (Overloaded("full"), 503, "service_unavailable_error"),
        (Internal("oops"), 500, "server_error"),
    ],
)
def test_errors_have_openais_shape(error: BatonError, status: int, kind: str) -> None:
    body = error_body(error)["error"]
    assert error.status == status
    assert body["type"] == kind
    assert set(body) == {"message", "type", "param", "code"}
    assert json.loads(error_frame(error).decode().removeprefix("data: "))["error"] == body


def test_retry_after_is_whole_seconds_and_never_zero() -> None:
    assert error_headers(QuotaExceeded("x", retry_after_s=6.2))["Retry-After"] == "7"
    assert error_headers(Unavailable("x"))["Retry-After"] == "1"
    assert "Retry-After" not in error_headers(InvalidInput("x"))


def test_names_of_hops_stay_inside() -> None:
    for error in (Unavailable("baton.v1.policy.admit did not answer", param="baton.v1"), ProtocolError("baton.v1")):
        assert "baton.v1" not in json.dumps(error_body(error))
