"""Files and batches by the official client and by `./baton batch`, on a stack of fake workers."""

from __future__ import annotations

import io
import json
import os
import secrets
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types import Batch

from tests.stack.batch_runs import stack_redis
from tests.stack.fixtures import FAKE_MAX_FILE_BYTES
from tests.stack.running import MODEL, OTHER_KEY, Baton, until

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture
def client(fake_stack: Baton) -> OpenAI:
    return fake_stack.openai()


@pytest.fixture
def other(fake_stack: Baton) -> OpenAI:
    return fake_stack.openai(OTHER_KEY)


def lines(count: int, **body: Any) -> bytes:
    whole = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4} | body
    texts = [
        json.dumps({"custom_id": f"c{number}", "method": "POST", "url": CHAT, "body": whole}) for number in range(count)
    ]
    return "\n".join(texts).encode()


def upload(client: OpenAI, data: bytes, **options: Any) -> Any:
    return client.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch", **options)


def begin(client: OpenAI, data: bytes, **options: Any) -> Batch:
    file = upload(client, data)
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", **options)


def end(client: OpenAI, batch: Batch) -> Batch:
    return until(lambda: (now := client.batches.retrieve(batch.id)) and now.status in ENDED and now, 60)


def refused(error: type[openai.APIStatusError], call: Any, param: str | None = None) -> openai.APIStatusError:
    """Assert that `call` is refused, naming `param`."""
    with pytest.raises(error) as caught:
        call()
    assert caught.value.param == param, caught.value
    return caught.value


# ---------------------------------------------------------------------------------------------- files


def test_a_file_of_several_chunks_is_uploaded_read_listed_and_deleted(fake_stack: Baton, client: OpenAI) -> None:
    data = secrets.token_bytes(600_000)
    before = int(time.time()) - 1
    file = upload(client, data, expires_after={"anchor": "created_at", "seconds": 7200})
    assert (file.bytes, file.filename, file.purpose, file.status) == (len(data), "in.jsonl", "batch", "processed")
    assert file.created_at >= before
    assert file.expires_at == file.created_at + 7200
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == data
    assert file in list(client.files.list(purpose="batch"))
    assert file not in list(client.files.list(purpose="batch_output"))
    assert client.files.delete(file.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        refused(openai.NotFoundError, lambda call=call: call(file.id), "file_id")
    # nothing was put on a disk of the gateway's
    assert not [path for path in fake_stack.temporary.rglob("*") if path.is_file()]


def test_lists_page_themselves_both_ways(other: OpenAI) -> None:
    ids = [upload(other, b"x").id for _ in range(5)]
    assert [file.id for file in other.files.list(limit=2)] == ids[::-1]
    assert [file.id for file in other.files.list(limit=2, order="asc")] == ids
    first = other.files.list(limit=4)
    assert (len(first.data), first.has_more) == (4, True)
    for file_id in ids:
        other.files.delete(file_id)
    assert list(other.files.list()) == []


def test_the_limit_on_files_holds_whether_or_not_the_size_is_told(fake_stack: Baton, client: OpenAI) -> None:
    fits = upload(client, b"x" * FAKE_MAX_FILE_BYTES)
    client.files.delete(fits.id)
    refused(openai.APIStatusError, lambda: upload(client, b"x" * (FAKE_MAX_FILE_BYTES + 1)), "file")

    def endless() -> Any:
        yield b'--cut\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(3 * FAKE_MAX_FILE_BYTES // 50_000):
            yield b"y" * 50_000

    headers = {"Authorization": f"Bearer {client.api_key}", "content-type": "multipart/form-data; boundary=cut"}
    answer = httpx.post(f"{fake_stack.url}/v1/files", content=endless(), headers=headers, timeout=30)
    assert answer.status_code == 413
    assert "2000000" in answer.json()["error"]["message"]
    until(lambda: uploads(fake_stack) == 0, 30)


def test_the_key_is_checked_before_the_body(fake_stack: Baton) -> None:
    stranger = fake_stack.openai("sk-wrong")
    with pytest.raises(openai.AuthenticationError):
        upload(stranger, b"x" * 1_500_000)
    with pytest.raises(openai.AuthenticationError):
        stranger.batches.create(input_file_id="file-x", endpoint=CHAT, completion_window="24h")


def test_a_client_that_leaves_amid_its_upload_leaves_nothing(fake_stack: Baton, client: OpenAI) -> None:
    host, _, port = fake_stack.url.removeprefix("http://").partition(":")
    head = (
        f"POST /v1/files HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {client.api_key}\r\n"
        "Content-Type: multipart/form-data; boundary=cut\r\nContent-Length: 1000000\r\n\r\n"
        '--cut\r\nContent-Disposition: form-data; name="file"; filename="left"\r\n\r\n'
    )
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + b"z" * 500_000)
        until(lambda: uploads(fake_stack) == 1, 30)
    until(lambda: uploads(fake_stack) == 0, 30)
    assert "left" not in [file.filename for file in client.files.list()]


def uploads(stack: Baton) -> int:
    """Uploads of the tenant `demo` that have begun and not ended."""
    return int(stack_redis(stack).zcard("baton:batch:{demo}:uploads"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({}, "purpose"),
        ({"purpose": "batch", "colour": "red"}, "colour"),
        ({"purpose": "batch", "expires_after[anchor]": "created_at"}, "expires_after[seconds]"),
        ({"purpose": "batch", "expires_after[anchor]": "x", "expires_after[seconds]": "3600"}, "expires_after[anchor]"),
    ],
)
def test_a_wrong_upload_is_refused_by_name(fake_stack: Baton, client: OpenAI, fields: Any, param: str) -> None:
    headers = {"Authorization": f"Bearer {client.api_key}"}
    files = {"file": ("a", b"x" * 400_000)}
    answer = httpx.post(f"{fake_stack.url}/v1/files", data=fields, files=files, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    until(lambda: uploads(fake_stack) == 0, 30)


# ---------------------------------------------------------------------------------------------- batches


def test_a_batch_from_upload_to_output(client: OpenAI) -> None:
    expiry: Any = {"anchor": "created_at", "seconds": 3600}
    batch = begin(client, lines(30), metadata={"run": "7"}, output_expires_after=expiry)
    assert batch.id.startswith("batch-")
    assert (batch.object, batch.status, batch.endpoint) == ("batch", "validating", CHAT)
    assert (batch.metadata, batch.completion_window) == ({"run": "7"}, "24h")
    assert batch.expires_at == batch.created_at + 86400
    done = end(client, batch)
    assert (done.status, done.model, done.error_file_id, done.errors) == ("completed", MODEL, None, None)
    counts = done.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (30, 30, 0)
    assert done.output_file_id
    output = [json.loads(text) for text in client.files.content(done.output_file_id).text.splitlines()]
    assert Counter(line["custom_id"] for line in output) == Counter(f"c{number}" for number in range(30))
    for line in output:
        assert set(line) == {"id", "custom_id", "response", "error"}
        assert line["error"] is None
        assert set(line["response"]) == {"status_code", "request_id", "body"}
        assert line["response"]["body"]["object"] == "chat.completion"
    usage = done.usage
    assert usage is not None
    assert usage.output_tokens == sum(line["response"]["body"]["usage"]["completion_tokens"] for line in output)
    file = client.files.retrieve(done.output_file_id)
    assert (file.purpose, file.expires_at) == ("batch_output", file.created_at + 3600)
    assert batch.id in [found.id for found in client.batches.list(limit=1)]
    error = refused(openai.ConflictError, lambda: client.batches.cancel(batch.id), "batch_id")
    assert "completed" in str(error)


def test_lines_that_fail_by_themselves_are_in_the_error_file(client: OpenAI) -> None:
    batch = end(client, begin(client, lines(2, max_tokens=1_000_000)))
    assert (batch.status, batch.output_file_id) == ("completed", None)
    assert batch.error_file_id
    for text in client.files.content(batch.error_file_id).text.splitlines():
        line = json.loads(text)
        assert line["response"]["status_code"] == 400
        assert line["response"]["body"]["error"]["code"] == line["error"]["code"] == "context_length_exceeded"


def test_the_input_of_a_running_batch_stays(client: OpenAI) -> None:
    batch = begin(client, lines(50, max_tokens=2000))
    refused(openai.ConflictError, lambda: client.files.delete(batch.input_file_id), "file_id")
    client.batches.cancel(batch.id)
    assert end(client, batch).status == "cancelled"
    client.files.delete(batch.input_file_id)


def test_another_tenants_ids_do_not_exist(client: OpenAI, other: OpenAI) -> None:
    batch = end(client, begin(client, lines(1)))
    assert batch.output_file_id
    for call in (other.batches.retrieve, other.batches.cancel):
        refused(openai.NotFoundError, lambda call=call: call(batch.id), "batch_id")
    for file_id in (batch.input_file_id, batch.output_file_id):
        for call in (other.files.retrieve, other.files.content, other.files.delete):
            refused(openai.NotFoundError, lambda call=call, file_id=file_id: call(file_id), "file_id")
    refused(openai.NotFoundError, lambda: list(other.batches.list(after=batch.id)), "batch_id")
    refused(
        openai.NotFoundError,
        lambda: other.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),
        "input_file_id",
    )
    assert batch.id not in [found.id for found in other.batches.list()]


GOOD: dict[str, Any] = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h"}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input_file_id": None}, "input_file_id"),
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"colour": "red"}, "colour"),
        ({"metadata": {f"k{number}": "v" for number in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {"k": 7}}, "metadata.k"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3599}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 2592001}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after.anchor"),
        ({"output_expires_after": {"seconds": 3600}}, "output_expires_after.anchor"),
    ],
)
def test_a_wrong_batch_is_refused_by_name(fake_stack: Baton, client: OpenAI, changes: Any, param: str) -> None:
    headers = {"Authorization": f"Bearer {client.api_key}"}
    answer = httpx.post(f"{fake_stack.url}/v1/batches", json=GOOD | changes, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("batches?limit=0", "limit"),
        ("batches?limit=101", "limit"),
        ("batches?order=asc", "order"),
        ("files?limit=10001", "limit"),
        ("files?order=up", "order"),
        ("files?colour=red", "colour"),
    ],
)
def test_a_wrong_query_is_refused_by_name(fake_stack: Baton, client: OpenAI, path: str, param: str) -> None:
    answer = httpx.get(f"{fake_stack.url}/v1/{path}", headers={"Authorization": f"Bearer {client.api_key}"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_batches_page_themselves(other: OpenAI) -> None:
    ids = [begin(other, lines(1)).id for _ in range(3)]
    found = [batch.id for batch in other.batches.list(limit=2)]
    assert found[:3] == ids[::-1]


# ---------------------------------------------------------------------------------------------- the command line


def test_the_command_line_submits_watches_and_fetches(fake_stack: Baton, tmp_path: Path) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_bytes(lines(20))
    done = fake_stack.run("batch", "submit", str(path), "--watch", "--metadata", "run=7")
    assert done.returncode == 0, done.stderr
    assert "20 of 20 done" in done.stdout
    assert "completed" in done.stderr
    batch_id = next(row.split()[1] for row in done.stdout.splitlines() if row.startswith("batch "))
    assert fake_stack.run("batch", "results", batch_id, "-o", str(out)).returncode == 0
    assert len(out.read_text().splitlines()) == 20
    shown = fake_stack.run("batch", "results", batch_id, "--only", "output")
    assert shown.stdout == out.read_text()
    assert json.loads(fake_stack.run("batch", "status", batch_id, "--json").stdout)["metadata"] == {"run": "7"}
    assert batch_id in fake_stack.run("batch", "list").stdout
    ended = fake_stack.run("batch", "cancel", batch_id)
    assert (ended.returncode, ended.stderr) == (1, "baton batch: HTTP 409: the batch has ended: it is completed\n")


def test_the_command_line_cancels_and_says_so(fake_stack: Baton, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(lines(50, max_tokens=2000))
    done = fake_stack.run("batch", "submit", str(path), "--json")
    assert done.returncode == 0, done.stderr
    batch_id = json.loads(done.stdout)["id"]
    early = fake_stack.run("batch", "results", batch_id)
    assert early.returncode == 1
    assert "its files come when it ends" in early.stderr
    assert fake_stack.run("batch", "cancel", batch_id).returncode == 0
    watched = fake_stack.run("batch", "watch", batch_id)
    assert watched.returncode == 1
    assert "cancelled" in watched.stdout


def test_the_command_line_names_file_and_line_of_what_is_wrong(fake_stack: Baton, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(lines(1) + b"\n{oops\n" + lines(1, temperature=9).replace(b"c0", b"c1"))
    done = fake_stack.run("batch", "submit", str(path))
    assert done.returncode == 1
    assert f"{path}:2: this line is not a JSON object" in done.stderr
    assert f"{path}:3: temperature" in done.stderr
    assert "nothing of it was run" in done.stderr
    missing = fake_stack.run("batch", "submit", str(tmp_path / "none.jsonl"))
    assert (missing.returncode, missing.stderr.count("No such file")) == (1, 1)
    unknown = fake_stack.run("batch", "status", "batch-none")
    assert (unknown.returncode, "there is no batch" in unknown.stderr) == (1, True)
    if os.geteuid():
        path.chmod(0)
        assert fake_stack.run("batch", "submit", str(path)).returncode == 1
