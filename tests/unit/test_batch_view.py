"""What the command line shows of batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.cli.batch_client import first_url
from services.cli.batch_view import details, error_lines, progress_line, table
from services.gateway.batches import batch_body
from shared.contracts.batch_messages import BatchError, BatchInfo
from shared.contracts.errors import InvalidInput
from shared.contracts.ids import BatchId, FileId


def batch(**more: Any) -> dict[str, Any]:
    given = {"status": "in_progress", "total": 200, "completed": 99, "failed": 1, "prompt_tokens": 10} | more
    return batch_body(
        BatchInfo(
            batch_id=BatchId("batch-1"),
            endpoint="/v1/completions",
            input_file_id=FileId("file-1"),
            completion_window="24h",
            created_s=1_700_000_000,
            expires_s=1_700_086_400,
            completion_tokens=5,
            **given,
        )
    )


def test_progress_is_one_line() -> None:
    half = "#" * 12 + " " * 12
    assert progress_line(batch()) == f"in_progress [{half}] 100 of 200 lines, 1 failed, 15 tokens"
    assert progress_line(batch(status="validating", total=0, completed=0, failed=0)) == "validating  batch-1"


def test_errors_name_file_and_line() -> None:
    errors = (BatchError("invalid_value", "too hot", 7, "body.temperature"), BatchError("empty_file", "no lines"))
    failed = batch(status="failed", errors=errors)
    assert error_lines(failed, "in.jsonl") == ["in.jsonl:7: too hot (body.temperature)", "in.jsonl: no lines"]
    assert error_lines(failed) == ["file-1:7: too hot (body.temperature)", "file-1: no lines"]
    assert details(failed, "in.jsonl").endswith("in.jsonl: no lines")
    assert error_lines(batch()) == []


def test_details_show_what_was_given_up() -> None:
    letters = tuple(BatchError("poison", "its worker died 3 times", number, f"c{number}") for number in range(1, 13))
    text = details(batch(dead_letters=letters, metadata={"run": "7"}, output_file_id=FileId("file-9")))
    assert "given up  line 1 (c1): poison, its worker died 3 times" in text
    assert "and 2 more" in text
    assert "run     7" in text
    assert "output    file-9" in text
    assert "given up" not in details(batch())


def test_the_table_has_a_row_a_batch() -> None:
    rows = table([batch(), batch(status="completed", completed=199)]).splitlines()
    assert len(rows) == 3
    assert rows[2].split()[1:4] == ["completed", "200/200", "1"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "file is empty"),
        (b"{oops\n", ":1: this line is not JSON"),
        (b"\xff\n", ":1: this line is not JSON"),
        (b"[1]\n", ":1: a line needs a url"),
        (b"{}\n", ":1: a line needs a url"),
        (b'{"url": 5}\n', ":1: url must be a string"),
    ],
)
def test_a_file_whose_first_line_tells_no_endpoint(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    with pytest.raises(InvalidInput) as caught:
        first_url(path)
    assert str(path) in caught.value.message
    assert told in caught.value.message


def test_the_endpoint_is_the_first_lines_url(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"url": "/v1/completions"}\r\n{oops')
    assert first_url(path) == "/v1/completions"
    with pytest.raises(InvalidInput, match="No such file"):
        first_url(tmp_path / "none.jsonl")
