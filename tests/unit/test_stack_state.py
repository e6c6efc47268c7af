"""What a stack keeps on disk: its lock beside commands that only look, and logs in bounded room."""

from __future__ import annotations

import fcntl
import threading
import time
from pathlib import Path

import pytest

from services.cli.logs import cut_long_logs, fresh_logs
from services.cli.probe import first_token
from services.cli.state import StateFolder
from shared.contracts.errors import Conflict, Unavailable


def test_who_looks_whether_a_stack_runs_keeps_none_from_starting(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    with (tmp_path / "lock").open("a+") as looking:
        fcntl.flock(looking, fcntl.LOCK_EX)
        letting_go = threading.Timer(0.05, fcntl.flock, (looking, fcntl.LOCK_UN))
        letting_go.start()
        state.lock().release()
        letting_go.join()


def test_a_second_stack_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    lock = state.lock()
    with pytest.raises(Conflict, match="already runs"):
        state.lock()
    lock.release()


def test_a_log_that_grew_too_long_is_begun_anew_under_its_writers_hands(tmp_path: Path) -> None:
    (tmp_path / "short.log").write_text("short")
    with (tmp_path / "long.log").open("ab") as writer:
        writer.write(b"x" * 101)
        writer.flush()
        cut_long_logs(tmp_path, 100)
        writer.write(b"next")
    assert (tmp_path / "long.log").read_bytes() == b"next"
    assert (tmp_path / "long.old").read_bytes() == b"x" * 101
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["long.log", "long.old", "short.log"]


def test_a_log_holds_one_run_but_that_of_the_supervisor(tmp_path: Path) -> None:
    for name in ("up", "policy"):
        (tmp_path / f"{name}.log").write_text(name)
    fresh_logs(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy.old", "up.log"]


def test_the_wait_for_the_first_token_ends_with_the_stack() -> None:
    over = threading.Event()
    threading.Timer(0.2, over.set).start()
    started = time.monotonic()
    with pytest.raises(Unavailable, match="no token"):
        first_token("http://127.0.0.1:1", "key", "model", 30.0, over)
    assert time.monotonic() - started < 5
