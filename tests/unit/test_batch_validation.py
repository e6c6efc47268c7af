"""The written rule of batch input: any bad line fails it, with line number, code and field."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Iterable
from typing import Any

import pytest

from services.batch.records import ItemBody
from services.batch.validation import MAX_ERRORS, Validator
from shared.contracts.batch_messages import BatchError
from shared.contracts.errors import Forbidden, UnknownModel
from shared.ingress.openai_schema import GenerationRequest
from shared.ingress.prompt_codec import PromptCodec
from tests.tiny_tokenizer import tiny_tokenizer

CHAT = "/v1/chat/completions"
KNOWN = ("tiny", "other", "secret")


def check_model(model: str) -> None:
    if model not in KNOWN:
        raise UnknownModel(f"the model does not exist; models here: {', '.join(KNOWN)}", param="model")
    if model == "secret":
        raise Forbidden("your tenant may not use this model", param="model")


def count_tokens(request: GenerationRequest) -> int:
    return len(getattr(request, "messages", "x"))


def validator(endpoint: str = CHAT, max_lines: int = 50_000, max_line_bytes: int = 4096) -> Validator:
    return Validator(endpoint, check_model, count_tokens, max_lines=max_lines, max_line_bytes=max_line_bytes)


def line(custom_id: Any = "a", /, *, body: Any = None, drop: str = "", **more: Any) -> bytes:
    whole = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body or chat()} | more
    whole.pop(drop, None)
    return json.dumps(whole).encode()


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]} | more


def check(data: bytes, found: Validator | None = None, piece: int = 7) -> tuple[list[tuple[int, ItemBody]], list[Any]]:
    """Items, and errors as (line, code, param), of data that comes in small pieces."""
    found = found or validator()
    pieces = [data[start : start + piece] for start in range(0, len(data), piece)]
    items = feed(found, pieces)
    return items, [(error.line, error.code, error.param) for error in found.errors]


def feed(found: Validator, pieces: Iterable[bytes]) -> list[tuple[int, ItemBody]]:
    items: list[tuple[int, ItemBody]] = []
    for piece in pieces:
        items += found.feed(piece)
    return items + found.finish()


@pytest.mark.parametrize("piece", [1, 3, 64, 10_000])
@pytest.mark.parametrize(
    "data",
    [
        line("a") + b"\n" + line("ü") + b"\n",
        line("a") + b"\n" + line("ü"),
        line("a") + b"\r\n" + line("ü") + b"\r\n",
        b"\xef\xbb\xbf" + line("a") + b"\r\n" + line("ü"),
        line("a") + b"\n" + line("ü") + b"\n\n",
        line("a") + b"\r\n" + line("ü") + b"\r\n \r\n",
    ],
    ids=["plain", "no final newline", "CRLF", "BOM", "blank at the end", "blank CRLF at the end"],
)
def test_all_forms_of_a_good_file(data: bytes, piece: int) -> None:
    found = validator()
    items, errors = check(data, found, piece)
    assert errors == []
    assert [(number, item.custom_id) for number, item in items] == [(1, "a"), (2, "ü")]
    assert json.loads(items[0][1].body) == chat()
    assert (found.total, found.tokens, found.model) == (2, 2, "tiny")
    assert (items[0][1].endpoint, items[0][1].prompt_tokens) == (CHAT, 1)


BAD: list[tuple[str, bytes, tuple[str, str]]] = [
    ("broken", b'{"custom_id": "b", "method"', ("invalid_json_line", "")),
    ("not an object", b"[1, 2]", ("invalid_json_line", "")),
    ("two objects", b"{} {}", ("invalid_json_line", "")),
    ("not UTF-8", b'{"custom_id": "\xff"}', ("invalid_json_line", "")),
    ("half a surrogate", b'{"custom_id": "\\ud800"}', ("invalid_json_line", "")),
    ("NaN", line("b").replace(b'"tiny"', b"NaN"), ("invalid_json_line", "")),
    ("deep", b'{"body": ' + b"[" * 4_000, ("invalid_json_line", "")),
    ("blank", b"", ("blank_line", "")),
    ("spaces", b"  \t ", ("blank_line", "")),
    ("no custom_id", line(drop="custom_id"), ("missing_required_parameter", "custom_id")),
    ("empty custom_id", line(""), ("invalid_custom_id", "custom_id")),
    ("blank custom_id", line(" \t\u00a0"), ("invalid_custom_id", "custom_id")),
    ("half a character", line("\ud800"), ("invalid_json_line", "")),
    ("a number", line(7), ("invalid_custom_id", "custom_id")),
    ("null", line(None), ("invalid_custom_id", "custom_id")),
    ("a long one", line("x" * 513), ("invalid_custom_id", "custom_id")),
    ("a duplicate", line("a"), ("duplicate_custom_id", "custom_id")),
    ("no method", line("b", drop="method"), ("missing_required_parameter", "method")),
    ("GET", line("b", method="GET"), ("invalid_method", "method")),
    ("no url", line("b", drop="url"), ("missing_required_parameter", "url")),
    ("another url", line("b", url="/v1/completions", body={"model": "tiny", "prompt": "x"}), ("invalid_url", "url")),
    ("another url, and a body that is not its own", line("b", url="/v1/completions"), ("invalid_url", "url")),
    ("an unknown url", line("b", url="/v1/embeddings"), ("invalid_url", "url")),
    ("no body", line("b", drop="body"), ("missing_required_parameter", "body")),
    ("a body that is text", line("b", body="text"), ("invalid_json", "body")),
    ("an unknown field", line("b", metadata={}), ("unknown_parameter", "metadata")),
    ("no messages", line("b", body={"model": "tiny"}), ("missing_required_parameter", "body.messages")),
    ("an unknown parameter", line("b", body=chat(tempature=1)), ("unknown_parameter", "body.tempature")),
    ("a wrong value", line("b", body=chat(temperature=9)), ("invalid_value", "body.temperature")),
    ("a stream", line("b", body=chat(stream=True)), ("invalid_value", "body.stream")),
    ("another class", line("b", body=chat(service_tier="priority")), ("invalid_value", "body.service_tier")),
    ("an unknown model", line("b", body=chat(model="gpt")), ("model_not_found", "body.model")),
    ("a forbidden model", line("b", body=chat(model="secret")), ("forbidden", "body.model")),
    ("another model", line("b", body=chat(model="other")), ("mismatched_model", "body.model")),
    ("too long", line("b" * 5000), ("line_too_long", "")),
]


@pytest.mark.parametrize(("bad", "expected"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_bad_line_is_named_and_nothing_is_left_to_run(bad: bytes, expected: tuple[str, str]) -> None:
    found = validator()
    items, errors = check(b"\n".join([line("a"), bad, line("z")]), found, 4096)
    assert errors == [(2, *expected)]
    assert "z" not in [item.custom_id for _, item in items]
    assert all(len(error.message) < 300 for error in found.errors)


def test_a_line_of_completions_has_one_prompt() -> None:
    lines = [
        line(str(i), url="/v1/completions", body={"model": "tiny", "prompt": prompt, "n": 2, "logprobs": 1})
        for i, prompt in enumerate(("a", ["a"], [[1, 2]], ["a", "b"], [[1], [2]]))
    ]
    _, errors = check(b"\n".join(lines), validator("/v1/completions"))
    assert errors == [(4, "invalid_value", "body.prompt"), (5, "invalid_value", "body.prompt")]


def test_unknown_models_are_told_the_known_ones() -> None:
    found = validator()
    check(line(body=chat(model="gpt")), found)
    assert "tiny, other" in found.errors[0].message


def test_the_duplicate_of_a_bad_line_is_found_too() -> None:
    _, errors = check(b"\n".join([line("a", method="GET"), line("a")]))
    assert errors == [(1, "invalid_method", "method"), (2, "duplicate_custom_id", "custom_id")]


@pytest.mark.parametrize("data", [b"", b"\n", b"\xef\xbb\xbf", b"\r\n"])
def test_an_empty_file(data: bytes) -> None:
    assert check(data) == ([], [(0, "empty_file", "")])


def test_blank_lines_at_the_end_are_one_at_most() -> None:
    assert check(line() + b"\n\n\n")[1] == [(2, "blank_line", "")]


def test_one_line_too_many() -> None:
    lines = [line(str(number)) for number in range(4)]
    assert check(b"\n".join(lines[:3]), validator(max_lines=3))[1] == []
    found = validator(max_lines=3)
    assert check(b"\n".join(lines), found)[1] == [(4, "too_many_lines", "")]
    assert found.done


def test_errors_are_bounded_and_reading_ends_there() -> None:
    found = validator()
    for _ in range(MAX_ERRORS + 50):
        found.feed(b"{\n")
    assert len(found.errors) == MAX_ERRORS
    assert found.errors[-1] == BatchError("invalid_json_line", found.errors[-1].message, MAX_ERRORS)
    assert found.done


def test_a_line_of_the_greatest_length_passes_with_mark_and_crlf() -> None:
    short = line("a")
    for limit, good in ((len(short), True), (len(short) - 1, False)):
        errors = check(b"\xef\xbb\xbf" + short + b"\r\n", validator(max_line_bytes=limit))[1]
        assert (errors == []) is good


def test_a_long_file_takes_seconds_and_holds_no_lines() -> None:
    found = validator()
    one = chat(messages=[{"role": "user", "content": "word " * 100}])
    count = 20_000
    started = time.process_time()
    tracemalloc.start()
    for start in range(0, count, 100):
        lines = [line(f"request-{number}", body=one) for number in range(start, start + 100)]
        assert len(found.feed(b"\n".join(lines) + b"\n")) == 100
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.finish() == []
    assert (found.total, found.errors) == (count, [])
    # 13 MB of lines went through; kept are the hashed names
    assert peak < 8_000_000
    # a bound against accidents: under tracing it takes about 2 s here
    assert time.process_time() - started < 60


def test_a_line_whose_output_cannot_be_had_is_named() -> None:
    codec = PromptCodec(tiny_tokenizer(), 512)
    found = Validator(CHAT, check_model, lambda r: len(codec.encode_now(r)[0]), max_lines=10, max_line_bytes=4096)
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    lines = [line("a"), line("b", body=chat(response_format=wanted)), line("c", body=chat(tool_choice="required"))]
    _, errors = check(b"\n".join(lines), found)
    codec.close()
    param = "body.response_format.json_schema.schema"
    assert errors == [(2, "invalid_value", param), (3, "invalid_value", "body.tool_choice")]
