"""`./baton logs`: lines of all kinds, merged, filtered, followed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from services.cli import log_reader
from services.cli.log_lines import LogLine, as_json, parse_line, render
from services.cli.log_reader import Tail, choose, duration_s, log_files, merged
from shared.settings.load import ROOT

TRACE = "0af7651916cd43dd8448eb211c80319c"
PLAIN = f"2026-01-31T12:03:04.250Z WARNING decode baton.decode: gone  request=req-ab12 trace={TRACE}"
JSON = json.dumps(
    {"time": 1769860984.5, "level": "error", "service": "decode", "logger": "baton.decode", "message": "bad",
     "trace_id": TRACE, "request_id": "req-ab12", "error": "Traceback\nValueError: odd"}
)  # fmt: skip


def everything(line: LogLine) -> bool:
    return True


def messages(lines: Iterable[LogLine]) -> list[str]:
    return [line.message for line in lines]


def test_our_two_formats_say_the_same() -> None:
    plain, parsed = parse_line("decode-1", PLAIN), parse_line("decode-1", JSON)
    assert (plain.time_s, parsed.time_s) == (1769860984.25, 1769860984.5)
    assert (plain.level, plain.logger, plain.message) == ("warning", "baton.decode", "gone")
    assert parsed.message == "bad\nTraceback\nValueError: odd"
    for line in (plain, parsed):
        assert (line.trace_id, line.request_id) == (TRACE, "req-ab12")
        assert line.about(TRACE[:8])
        assert line.about("req-ab12")
        assert line.about("ab12")
        assert not line.about("req-ff")
        assert not line.about("")


def test_the_servers_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    nats = parse_line("nats", "[13] 2026/01/31 12:03:04.250000 [WRN] slow consumer")
    redis = parse_line("redis", "13:M 31 Jan 2026 12:03:04.250 # Warning: no overcommit")
    monkeypatch.undo()
    time.tzset()
    assert nats.time_s == redis.time_s == 1769860984.25
    assert (nats.level, redis.level) == ("warning", "warning")
    assert (nats.message, redis.message) == ("slow consumer", "Warning: no overcommit")


@pytest.mark.parametrize(
    "raw",
    [
        "",
        "{",
        '{"time": "x"}',
        '{"time": 1e300}',
        '{"time": NaN}',
        "2026-13-41T99:99:99.000Z INFO a b: c",
        "[1] 2026/99/31 12:03:04.250000 [X] y",
    ],
)
def test_what_is_no_line_of_ours_goes_on_from_the_one_before(raw: str) -> None:
    assert parse_line("x", raw).time_s == 0
    before = parse_line("x", PLAIN)
    found = parse_line("x", raw, before)
    assert (found.time_s, found.level, found.raw, found.parsed) == (before.time_s, "warning", raw, False)
    assert found.about("ab12")


def test_lines_are_shown_with_names_of_one_width() -> None:
    assert render(parse_line("up", PLAIN), 8).endswith(" WARNING up        gone  req-ab12")
    assert render(parse_line("up", "  at line 3", parse_line("up", PLAIN)), 8).split() == ["up", "at", "line", "3"]
    assert json.loads(as_json(parse_line("up", PLAIN))) == {
        "time": 1769860984.25,
        "level": "warning",
        "process": "up",
        "logger": "baton.decode",
        "message": "gone",
        "request_id": "req-ab12",
        "trace_id": TRACE,
    }


def write(path: Path, *rows: tuple[float, str], mode: str = "a") -> None:
    with path.open(mode) as file:
        for time_s, message in rows:
            file.write(json.dumps({"time": time_s, "level": "info", "logger": "l", "message": message}) + "\n")


def test_files_are_merged_by_time_and_a_traceback_stays_whole(tmp_path: Path) -> None:
    write(tmp_path / "a.log", (1, "one"), (4, "four"))
    (tmp_path / "a.log").open("a").write("Traceback\n  odd\n")
    write(tmp_path / "a.log", (3, "late"))
    write(tmp_path / "b.log", (2, "two"), (5, "five"))
    tails = [Tail(name, paths) for name, paths in log_files(tmp_path, old=False).items()]
    found = merged([tail.read() for tail in tails], everything)
    assert messages(found) == ["one", "two", "four", "Traceback", "  odd", "late", "five"]


def test_a_tail_follows_growth_cutting_and_replacement(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    tail = Tail("a", [path])
    assert messages(tail.read()) == []
    write(path, (1, "one"))
    assert messages(tail.read()) == ["one"]
    # a line is given once it is whole
    with path.open("a") as file:
        file.write('{"time": 2, "message": "t')
        file.flush()
        assert messages(tail.read()) == []
        file.write('wo"}\n')
    assert messages(tail.read()) == ["two"]
    # cut in place, as a log that grew too long
    os.truncate(path, 0)
    write(path, (3, "three"))
    assert messages(tail.read()) == ["three"]
    # replaced, as by a new start; the end of the old one is not lost
    write(path, (4, "four"))
    path.rename(tmp_path / "a.old")
    write(path, (5, "five"))
    assert messages(tail.read()) == ["four", "five"]
    write(path, (6, "six"))
    assert messages(tail.read()) == ["six"]


def test_old_files_come_first(tmp_path: Path) -> None:
    write(tmp_path / "a.old", (1, "before"))
    write(tmp_path / "a.log", (2, "now"))
    (tail,) = [Tail(name, paths) for name, paths in log_files(tmp_path, old=True).items()]
    assert messages(tail.read()) == ["before", "now"]
    assert list(log_files(tmp_path, old=False)["a"]) == [tmp_path / "a.log"]


def test_a_service_stands_for_all_its_processes() -> None:
    known = ["decode-1", "decode-2", "gateway", "prefix-cache-index"]
    assert choose(known, []) == known
    assert choose(known, ["decode"]) == ["decode-1", "decode-2"]
    assert choose(known, ["decode-2", "gateway"]) == ["decode-2", "gateway"]
    assert choose(known, ["cache"]) == []
    assert choose(["decode-large-1", "decode-small-1"], ["decode"]) == ["decode-large-1", "decode-small-1"]
    assert choose(["decode-large-1", "decode-small-1"], ["decode-small"]) == ["decode-small-1"]


def test_durations() -> None:
    assert [duration_s(text) for text in ("30s", "5m", "1.5h", "1d")] == [30, 300, 5400, 86400]


def run(state: Path, *argv: str, **options: object) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"BATON_STATE": str(state)}
    return subprocess.run(
        [sys.executable, "-m", "services.cli", "logs", *argv], env=env, cwd=ROOT, capture_output=True, text=True
    )


def test_the_command(tmp_path: Path) -> None:
    assert run(tmp_path).returncode == 1
    logs, now = tmp_path / "logs", time.time()
    logs.mkdir()
    write(logs / "gateway.log", (now - 3600, "long ago"), (now - 5, "now"))
    (logs / "decode-1.log").write_text(PLAIN + "\n  more\n")
    done = run(tmp_path, "--json")
    assert [json.loads(line)["message"] for line in done.stdout.splitlines()] == ["gone", "  more", "long ago", "now"]
    assert [line.split()[-1] for line in run(tmp_path, "-n", "2").stdout.splitlines()] == ["ago", "now"]
    assert len(run(tmp_path, "--since", "5m").stdout.splitlines()) == 1
    assert len(run(tmp_path, "--level", "warning").stdout.splitlines()) == 2
    assert len(run(tmp_path, "--trace", "chatcmpl-req-ab12").stdout.splitlines()) == 2
    assert len(run(tmp_path, "decode").stdout.splitlines()) == 2
    nothing = run(tmp_path, "--trace", "feedbeef")
    assert (nothing.returncode, nothing.stdout, nothing.stderr) == (
        0,
        "",
        "baton logs: no line of these logs matches\n",
    )
    unknown = run(tmp_path, "nobody")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "there are decode-1, gateway" in unknown.stderr
    assert run(tmp_path, "-n", "-1").returncode == 2


def test_following_shows_new_lines_and_new_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    write(tmp_path / "logs" / "gateway.log", (1, "first"))
    env = os.environ | {"BATON_STATE": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "services.cli", "logs", "-f", "--json"]
    with subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert "first" in process.stdout.readline()
            write(tmp_path / "logs" / "gateway.log", (2, "second"))
            assert "second" in process.stdout.readline()
            write(tmp_path / "logs" / "decode-2.log", (3, "third"))
            assert "third" in process.stdout.readline()
        finally:
            process.terminate()


def test_the_command_line_is_registered() -> None:
    from services.cli.__main__ import COMMANDS

    assert COMMANDS["logs"][:2] == (log_reader.__name__, "main")
