"""OP-55 to OP-57: lines that may not pass, and a cancel in mid-run, by the official client on a stack of fakes."""

from __future__ import annotations

import io
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from openai import OpenAI
from openai.types import Batch

from tests.stack.batch_runs import Ledger, tokens_in
from tests.stack.running import MODEL, OTHER_KEY, Baton, until

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]

ENDPOINT = "/v1/completions"
MAX_LINES = 1000
"""As the stack is set."""
BYSTANDER_TOKENS = 300
ENDED = ("completed", "failed", "expired", "cancelled")


def line(custom_id: Any, max_tokens: int = 4, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": "one two three", "max_tokens": max_tokens, "temperature": 0}
    return {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body} | more


def jsonl(*lines: dict[str, Any] | str) -> bytes:
    return b"\n".join((text if isinstance(text, str) else json.dumps(text)).encode() for text in lines) + b"\n"


@pytest.fixture
def client(fake_stack: Baton) -> OpenAI:
    return fake_stack.openai()


def begin(client: OpenAI, data: bytes) -> Batch:
    file = client.files.create(file=("lines.jsonl", io.BytesIO(data)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")


def end(client: OpenAI, batch: Batch, timeout_s: float = 60.0) -> Batch:
    """The batch once it has ended."""
    return until(lambda: (now := client.batches.retrieve(batch.id)) and now.status in ENDED and now, timeout_s)


def content(client: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [json.loads(text) for text in client.files.content(file_id).text.splitlines()] if file_id else []


@contextmanager
def beside(stack: Baton) -> Iterator[None]:
    """A long stream of the other tenant runs before and must finish unharmed; then a canary must be served."""
    other = stack.openai(OTHER_KEY)
    seen: list[Any] = []
    begun = threading.Event()

    def stream() -> None:
        for chunk in other.completions.create(
            model=MODEL,
            prompt="bystander",
            max_tokens=BYSTANDER_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
        ):
            seen.append(chunk)
            begun.set()
        begun.set()

    thread = threading.Thread(target=stream)
    thread.start()
    try:
        assert begun.wait(30)
        yield
    finally:
        thread.join(90)
    assert not thread.is_alive()
    assert seen[-1].usage.completion_tokens == BYSTANDER_TOKENS
    assert [choice.finish_reason for chunk in seen for choice in chunk.choices if choice.finish_reason] == ["length"]
    started = time.monotonic()
    canary = other.completions.create(model=MODEL, prompt="canary", max_tokens=4, temperature=0)
    assert canary.usage is not None
    assert canary.usage.completion_tokens == 4
    assert time.monotonic() - started < 5 + 15  # the case's 5 s, with room for a loaded machine


def errors_of(batch: Batch) -> list[tuple[int | None, str | None, str | None]]:
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert all(error.message for error in batch.errors.data)
    return [(error.line, error.code, error.param) for error in batch.errors.data]


def test_op55_a_duplicate_or_unusable_custom_id_fails_the_batch_and_bills_nothing(
    fake_stack: Baton, client: OpenAI
) -> None:
    ledger = Ledger(fake_stack)
    lines = [line(f"line-{number}") for number in range(1, 11)]
    lines[4] = line("line-2")
    del lines[6]["custom_id"]
    lines[7] = line("")
    lines[8] = line(9)
    with beside(fake_stack):
        batch = end(client, begin(client, jsonl(*lines)))
    assert batch.status == "failed"
    assert errors_of(batch) == [
        (5, "duplicate_custom_id", "custom_id"),
        (7, "missing_required_parameter", "custom_id"),
        (8, "invalid_custom_id", "custom_id"),
        (9, "invalid_custom_id", "custom_id"),
    ]
    assert (batch.output_file_id, batch.error_file_id, batch.in_progress_at) == (None, None, None)
    assert batch.failed_at
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed) == (0, 0)
    fake_stack.wait_idle()
    assert ledger.billed() == (0, 0, 0)


MALFORMED: list[tuple[str, bytes, list[tuple[int | None, str, str | None]]]] = [
    ("a broken line", jsonl(line("a"), '{"custom_id": "b", '), [(2, "invalid_json_line", None)]),
    ("a blank line", jsonl(line("a"), "", line("b")), [(2, "blank_line", None)]),
    (
        "a missing method",
        jsonl(line("a"), {k: v for k, v in line("b").items() if k != "method"}),
        [(2, "missing_required_parameter", "method")],
    ),
    ("another url", jsonl(line("a"), line("b", url="/v1/embeddings")), [(2, "invalid_url", "url")]),
    (
        "another model",
        jsonl(line("a"), line("b", body={"model": "gpt-4", "prompt": "x"})),
        [(2, "model_not_found", "body.model")],
    ),
    ("an empty file", b"", [(None, "empty_file", None)]),
    (
        "one line too many",
        jsonl(*(line(f"n{number}") for number in range(MAX_LINES + 1))),
        [(MAX_LINES + 1, "too_many_lines", None)],
    ),
    (
        "several at once, with a mark and CRLF",
        b"\xef\xbb\xbf" + jsonl(line("a"), "[]", line("a"), line("c")).replace(b"\n", b"\r\n"),
        [(2, "invalid_json_line", None), (3, "duplicate_custom_id", "custom_id")],
    ),
]


def test_op56_malformed_lines_fail_the_batch_by_one_rule_with_their_line_numbers(
    fake_stack: Baton, client: OpenAI
) -> None:
    ledger = Ledger(fake_stack)
    with beside(fake_stack):
        begun = [begin(client, data) for _, data, _ in MALFORMED]
        for (name, _, errors), batch in zip(MALFORMED, begun, strict=True):
            failed = end(client, batch)
            assert (name, failed.status, errors_of(failed)) == (name, "failed", errors)
            counts = failed.request_counts
            assert counts is not None
            assert counts.total == counts.completed + counts.failed == 0
    fake_stack.wait_idle()
    assert ledger.billed() == (0, 0, 0)


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbf" + jsonl(line("a"), line("b")),
        jsonl(line("a"), line("b")).replace(b"\n", b"\r\n"),
        jsonl(line("a"), line("b")).rstrip(b"\n"),
    ],
    ids=["mark", "CRLF", "no final newline"],
)
def test_op56_mark_crlf_and_a_missing_final_newline_are_fine(client: OpenAI, data: bytes) -> None:
    batch = end(client, begin(client, data))
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (2, 2, 0)
    assert Counter(found["custom_id"] for found in content(client, batch.output_file_id)) == Counter("ab")


def test_op57_cancel_in_mid_run_keeps_what_is_done_and_names_the_rest(fake_stack: Baton, client: OpenAI) -> None:
    ledger = Ledger(fake_stack)
    short, long = [f"short-{n}" for n in range(5)], [f"long-{n}" for n in range(20)]
    lines = [line(name) for name in short] + [line(name, 2000) for name in long]
    with beside(fake_stack):
        batch = begin(client, jsonl(*lines))

        def short_ones_done() -> bool:
            counts = client.batches.retrieve(batch.id).request_counts
            return counts is not None and counts.completed >= len(short)

        until(short_ones_done, 60)
        asked = time.monotonic()
        first = client.batches.cancel(batch.id)
        assert first.status in ("cancelling", "cancelled")
        assert first.cancelling_at
        done = end(client, batch)
        took_s = time.monotonic() - asked
    assert done.status == "cancelled"
    assert took_s < 10 + 20  # bounded at 10 s, with room for a loaded machine
    output, errors = content(client, done.output_file_id), content(client, done.error_file_id)
    # each custom_id exactly once over both files
    assert Counter(found["custom_id"] for found in output + errors) == Counter(short + long)
    assert set(short) <= {found["custom_id"] for found in output}
    assert {found["response"]["status_code"] for found in output} == {200}
    assert {found["error"]["code"] for found in errors} == {"batch_cancelled"}
    assert {found["response"] for found in errors} == {None}
    counts = done.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (25, len(output), len(errors))
    # only real tokens are billed: those the output file shows
    billed = tokens_in(output)
    assert done.usage is not None
    assert (done.usage.input_tokens, done.usage.output_tokens) == billed
    until(lambda: ledger.billed()[1:] == billed, 30, lambda: (ledger.billed(), billed))
    fake_stack.wait_idle(30)
    assert ledger.billed()[1:] == billed
