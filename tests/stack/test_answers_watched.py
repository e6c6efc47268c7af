"""Answers of gateways in processes of their own are held to OpenAI's document whatever their clients are."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from shared.settings.load import ROOT
from tests import answer_files, openai_oracle
from tests.answer_tap import Answer
from tests.answer_watch import WATCH
from tests.stack.running import MODEL, Baton

HEAD = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
HEAD += "content-length: {size}\r\nconnection: close\r\n\r\n"


def ask(stack: Baton, sent: bytes) -> bytes:
    """What a client reads that is no HTTP library, until the gateway closes."""
    where = urlsplit(stack.url)
    with closing(socket.create_connection((where.hostname, where.port), timeout=30)) as client:
        client.sendall(sent)
        return b"".join(iter(lambda: client.recv(65536), b""))


@pytest.mark.model
def test_what_a_socket_and_a_process_read_is_watched(fake_stack: Baton) -> None:
    assert fake_stack.record is not None
    # Given what was judged before
    assert WATCH.faults() == []
    before, only_read = openai_oracle.answers.copy(), WATCH.only_read
    # When a stream is read from a socket, another client speaks no HTTP, and the command line is used
    body = json.dumps({"model": MODEL, "prompt": "Hi", "max_tokens": 2, "stream": True}).encode()
    head = HEAD.format(key=fake_stack.record.api_key, size=len(body)).encode()
    assert b"[DONE]" in ask(fake_stack, head + body)
    assert b"400 Bad Request" in ask(fake_stack, b"nonsense\r\n\r\n")
    assert fake_stack.run("chat", "--max-tokens", "2", "Hi").returncode == 0
    # Then all were judged, and none because a library of this process read it
    assert WATCH.faults() == []
    found = openai_oracle.answers - before
    wanted = ("CreateCompletionResponse stream", "CreateChatCompletionStreamResponse stream", "ErrorResponse")
    assert all(found[name] for name in wanted), found
    assert WATCH.only_read == only_read


WRITES = """
import os, sys, time
from pathlib import Path
from tests.answer_files import AnswerWriter

writer = AnswerWriter(Path(sys.argv[1]))
whole, stream = writer.take("GET", "/v1/models"), writer.take("POST", "/v1/completions")
whole.head(200, "application/json", "req-1")
stream.head(200, "text/event-stream", "req-2")
whole.body("{\\"ä\\": ".encode(), whole=False)
stream.body(b"data: 1\\n\\n", whole=False)
whole.body(b"1}", whole=True)
whole.over()
print("written", flush=True)
time.sleep(600)
"""


def test_what_a_killed_gateway_left_is_read(tmp_path: Path) -> None:
    # Given a process that gave one answer and a part of another
    reader = answer_files.AnswerReader(tmp_path)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    writing = subprocess.Popen([sys.executable, "-c", WRITES, str(tmp_path)], env=env, stdout=subprocess.PIPE)
    assert writing.stdout is not None
    assert writing.stdout.readline() == b"written\n"
    # Then the one is read, once, and the other when its process is gone
    (answer,) = reader.answers()
    assert (answer.method, answer.path, answer.status, answer.whole) == ("GET", "/v1/models", 200, True)
    assert json.loads(answer.content) == {"ä": 1}
    assert list(reader.answers()) == []
    assert reader.request_ids() == {"req-1", "req-2"}
    writing.send_signal(signal.SIGKILL)
    writing.communicate()
    (left,) = reader.answers()
    assert list(tmp_path.iterdir()) == []
    assert (left.path, bytes(left.content), left.whole, left.judged) == ("/v1/completions", b"data: 1\n\n", False, True)
    assert list(reader.answers()) == []


def test_a_line_that_is_being_written_is_left_for_later(tmp_path: Path) -> None:
    reader, file = answer_files.AnswerReader(tmp_path), tmp_path / f"{os.getpid()}-1"
    file.write_text('[0, "begin", "GET", "/v1/models"]\n[0, "ov')
    assert list(reader.answers()) == []
    with file.open("a") as more:
        more.write('er"]\n')
    assert list(reader.answers()) == [Answer("GET", "/v1/models")]


def test_a_batchs_output_is_held_too() -> None:
    line = {"id": "x", "custom_id": "a", "response": None, "error": {"code": "c", "message": "m"}}
    choice = {"index": 0, "text": "hi", "logprobs": None, "finish_reason": "stop"}
    whole = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
    response = {"status_code": 200, "request_id": "r", "body": whole}

    def faults(*lines: object) -> list[str]:
        body = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        return openai_oracle.all_faults("GET", "/v1/files/f/content", 200, "application/octet-stream", body)

    good = line | {"response": response, "error": None}
    assert faults(line, good) == []
    assert faults({"custom_id": "a", "method": "POST"}) == []
    assert faults(line | {"more": 1})
    assert faults(good | {"response": {"status_code": 200}})
    assert len(faults(good, good | {"response": response | {"body": whole | {"created": "1"}}})) == 1
