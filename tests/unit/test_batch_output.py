"""Lines of output and error files, and how they become chunks."""

from __future__ import annotations

import json

from services.batch.output_files import Chunks, result_line, unfinished
from services.batch.records import ItemResult
from shared.contracts.ids import BatchId

BATCH = BatchId("batch-1")


def test_a_success_has_its_answer_and_no_error() -> None:
    found = json.loads(result_line(BATCH, 1, ItemResult("a", 200, "req-1", b'{"x":"\xc3\xbc"}')))
    assert found.pop("id").startswith("batch_req_")
    response = {"status_code": 200, "request_id": "req-1", "body": {"x": "ü"}}
    assert found == {"custom_id": "a", "response": response, "error": None}


def test_a_refused_request_has_the_answer_and_the_error() -> None:
    result = ItemResult("a", 400, "req-1", b'{"error":{}}', "context_length_exceeded", "too long")
    found = json.loads(result_line(BATCH, 1, result))
    assert found["response"] == {"status_code": 400, "request_id": "req-1", "body": {"error": {}}}
    assert found["error"] == {"code": "context_length_exceeded", "message": "too long"}
    assert not result.ok


def test_an_item_without_an_answer_has_the_error_alone() -> None:
    for code in ("batch_cancelled", "batch_expired"):
        found = json.loads(result_line(BATCH, 1, unfinished("a", code)))
        assert (found["response"], found["error"]["code"]) == (None, code)
        assert found["error"]["message"]


def test_a_line_is_one_line_and_its_id_is_stable_and_its_own() -> None:
    result = ItemResult("a\nb", 200, "req-1", b'{"x":"a\\nb"}')
    lines = [result_line(BATCH, number, result) for number in (1, 1, 2)]
    assert all(b"\n" not in line for line in lines)
    assert lines[0] == lines[1]
    assert json.loads(lines[0])["id"] != json.loads(lines[2])["id"]


def test_a_line_holds_no_other_line_end_that_readers_of_lines_know() -> None:
    text = "a\u2028b\u2029c\u0085dü"
    line = result_line(BATCH, 1, ItemResult(text, 200, "req-1", f'{{"x":"{text}"}}'.encode())).decode()
    assert len(line.splitlines()) == 1
    found = json.loads(line)
    assert (found["custom_id"], found["response"]["body"]["x"]) == (text, text)


def test_chunks_are_full_but_for_the_last() -> None:
    chunks = Chunks(chunk_bytes=10)
    lines = [b"abc", b"x" * 35, b"", b"yy"]
    full = [chunk for line in lines for chunk in chunks.add(line)]
    assert [len(chunk) for chunk in full] == [10] * 4
    assert b"".join([*full, chunks.rest()]) == b"".join(line + b"\n" for line in lines)
    assert chunks.lines == 4
