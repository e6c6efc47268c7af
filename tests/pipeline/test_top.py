"""`./baton top` in a terminal, in a pipe, with and without a gateway."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from services.cli.top import ENTER, LEAVE
from shared.settings.load import ROOT
from tests.pipeline.gateway_thread import scripted_gateway

WAIT_S = 30.0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with scripted_gateway() as url:
        yield url


def command(url: str, *more: str, key: str = "key-admin") -> list[str]:
    return [sys.executable, "-m", "services.cli", "top", "--url", url, "--api-key", key, *more]


def run(url: str, *more: str, key: str = "key-admin") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(url, *more, key=key), cwd=ROOT, capture_output=True, text=True, timeout=60)


class Terminal:
    """A command in a terminal of 100 × 30."""

    def __init__(self, argv: list[str]) -> None:
        self.master, slave = pty.openpty()
        self.resize(30, 100)
        kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(argv, cwd=ROOT, env=kept, stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)
        self.seen = ""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until(self, pattern: str) -> str:
        """Read until `pattern` has come; what came since the last call."""
        deadline = time.monotonic() + WAIT_S
        while not re.search(pattern, self.seen):
            assert time.monotonic() < deadline, f"{pattern!r} did not come: {self.seen[-800:]!r}"
            if select.select([self.master], [], [], 0.2)[0]:
                with suppress(OSError):  # the other side is closed
                    self.seen += os.read(self.master, 65536).decode()
        seen, self.seen = self.seen, ""
        return seen

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)


@pytest.mark.parametrize(("stopped_by", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_terminal_is_redrawn_resized_and_given_back(url: str, stopped_by: signal.Signals, code: int) -> None:
    # Given a terminal
    terminal = Terminal(command(url, "--interval", "30"))
    try:
        first = terminal.until("no requests yet")
        assert first.startswith(ENTER)
        assert "gateway-1 holds 0 requests" in first
        # When it gets narrower, then it is drawn again long before the next look
        terminal.resize(30, 32)
        terminal.process.send_signal(signal.SIGWINCH)
        again = terminal.until("…")
        assert all(len(line) <= 32 for line in re.sub(r"\x1b\[[?0-9]*[A-Za-z]", "", again).split("\r\n"))
        # When it is told to stop, then the terminal is as it was
        terminal.process.send_signal(stopped_by)
        terminal.until(re.escape(LEAVE))
        assert terminal.process.wait(WAIT_S) == code
    finally:
        terminal.close()


def test_without_a_terminal_frames_follow_each_other_as_plain_text(url: str, tmp_path: Path) -> None:
    path = tmp_path / "out"
    with path.open("w") as out:
        process = subprocess.Popen(command(url, "--interval", "0.2"), cwd=ROOT, stdout=out)
        try:
            deadline = time.monotonic() + WAIT_S
            while path.read_text().count("baton top") < 2:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT_S) == 0
    assert "\x1b" not in path.read_text()


def test_once_and_json(url: str) -> None:
    plain = run(url, "--once")
    assert (plain.returncode, plain.stderr) == (0, "")
    assert plain.stdout.count("baton top") == 1
    as_json = run(url, "--once", "--json")
    assert as_json.returncode == 0
    (line,) = as_json.stdout.splitlines()
    found = json.loads(line)
    assert found["cluster"]["gateway"]["id"] == "gateway-1"
    assert found["requests"] == []


def test_a_gateway_that_is_away_is_said_and_waited_for(url: str) -> None:
    nobody = "http://127.0.0.1:9"
    once = run(nobody, "--once")
    assert (once.returncode, once.stdout) == (1, "")
    assert f"no gateway of Baton answers at {nobody}" in once.stderr
    terminal = Terminal(command(nobody, "--interval", "0.2"))
    try:
        terminal.until("! no gateway of Baton answers")
        terminal.until("! no gateway of Baton answers")
        assert terminal.process.poll() is None
    finally:
        terminal.close()


@pytest.mark.parametrize(("key", "words"), [("key-a", "admin key"), ("wrong", "key is not valid")])
def test_a_key_that_may_not_is_refused_at_once(url: str, key: str, words: str) -> None:
    done = run(url, key=key)
    assert done.returncode == 1
    assert words in done.stderr


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "x"])
def test_an_interval_must_make_sense(url: str, interval: str) -> None:
    assert run(url, "--interval", interval).returncode == 2
