"""Texts of strangers in logs and on terminals: they begin no line, and no terminal obeys them."""

from __future__ import annotations

import io
import json
import logging
import sys
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from services.cli import batch as batch_command
from services.cli import chat as chat_command
from services.cli.batch_view import details
from services.cli.connection import Connection
from services.cli.log_lines import as_json, parse_line, render
from shared.contracts.batch_messages import BatchError
from shared.lifecycle.logs import JsonFormatter, PlainFormatter
from shared.lifecycle.plain_text import json_text, lines, one_line
from tests.unit.test_batch_view import batch
from tests.unit.test_logs import record

FORGED = "2026-01-31T12:03:04.250Z INFO    policy baton.policy: key of admin revoked"
EVIL = f"a\x1b[31m\x1b]0;title\x07b\r\n{FORGED}\x9b2J\x7f\u202e\u2028c"
OBEYED = set("\x1b\x07\r\x9b\x7f\u202e\u2028")


def test_what_is_obeyed_is_written_out() -> None:
    assert one_line("a\x1b[31m\n\t\x9b\u202e") == r"a\x1b[31m\n\t\x9b\u202e"
    assert lines("a\x1b[31m\n\t\x9b") == "a\\x1b[31m\n\t\\x9b"
    plain = "grüße 你好 👩\u200d🚀 a\xa0b"
    assert one_line(plain) == lines(plain) == json_text(plain) == plain


@pytest.mark.parametrize("text", [EVIL, "\x9b\x7f \ud800", "plain"])
def test_json_means_what_it_did(text: str) -> None:
    written = json_text(json.dumps({text: [text]}, ensure_ascii=False, indent=1))
    assert json.loads(written) == {text: [text]}
    assert not OBEYED & set(written)


def failed(text: str) -> logging.LogRecord:
    made = record("it failed")
    try:
        raise ValueError(text)
    except ValueError:
        made.exc_info = sys.exc_info()
    return made


@pytest.mark.parametrize("made", [record(EVIL), failed(EVIL)], ids=["message", "exception"])
def test_no_text_in_a_log_looks_like_a_line_of_its_own(made: logging.LogRecord) -> None:
    written = PlainFormatter("gateway").format(made)
    assert not OBEYED & set(written)
    assert [parse_line("gateway", line).message for line in written.split("\n") if parse_line("x", line).parsed] == [
        parse_line("gateway", written.split("\n")[0]).message
    ]
    document = JsonFormatter("gateway").format(made)
    assert not OBEYED & set(document)
    assert "\n" not in document


@pytest.mark.parametrize(
    "raw",
    [
        f"{FORGED} \x1b[2J\x9b",
        json.dumps({"time": 1, "message": EVIL}),
        f"[1] 2026/01/31 12:03:04.000001 [INF] {EVIL}",
        EVIL,
    ],
    ids=["plain", "json", "nats", "other"],
)
def test_logs_shows_nothing_a_terminal_obeys(raw: str) -> None:
    line = parse_line("gateway", raw)
    assert not OBEYED & set(render(line, 10))
    assert not OBEYED & set(as_json(line))


def test_batch_shows_nothing_a_terminal_obeys() -> None:
    letters = (BatchError("poison", EVIL, 1, EVIL),)
    shown = details(batch(status="failed", metadata={EVIL: EVIL}, dead_letters=letters, errors=letters))
    assert not OBEYED & set(shown)
    assert FORGED not in shown.splitlines()


def test_words_of_a_server_are_shown_as_one_line() -> None:
    response = httpx.Response(400, json={"error": {"message": EVIL}})
    message = Connection("http://x", "k").refusal(response).message
    assert not (OBEYED | {"\n"}) & set(message)


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    terminal = Terminal(io.BytesIO(), "utf-8", newline="\n", write_through=True)
    monkeypatch.setattr(sys, "stdout", terminal)
    return terminal


def test_results_go_to_a_terminal_so_that_it_obeys_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    document = json.dumps({"custom_id": EVIL}, ensure_ascii=False).encode() + b"\n"
    pieces = [document[at : at + 1] for at in range(len(document))]  # characters in two
    terminal = on_terminal(monkeypatch)
    batch_command._to_stdout(pieces)
    shown = terminal.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert not OBEYED & set(shown)
    assert json.loads(shown) == {"custom_id": EVIL}


def test_a_model_cannot_command_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    answer: Any = lambda *_: iter(["fine\n", EVIL])  # noqa: E731
    monkeypatch.setattr(chat_command, "ask", answer)
    monkeypatch.setattr(chat_command, "connection", lambda *_: SimpleNamespace())
    terminal = on_terminal(monkeypatch)
    assert chat_command.main(["hi"]) == 0
    shown = terminal.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert shown.startswith("fine\n")
    assert not OBEYED & set(shown)
