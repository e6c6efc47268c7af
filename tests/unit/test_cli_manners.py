"""What all commands have in common: exit codes, plain words, flags of the same name and form."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.cli import __main__ as cli
from services.cli import servers, words
from shared.settings.load import ROOT

SUBCOMMANDS = {
    "batch": ("submit", "status", "watch", "results", "cancel", "list"),
    "keys": ("show", "create", "revoke", "list", "limits", "nats"),
    "config": ("check", "show"),
}
WITH_JSON = ("up", "status", "top", "trace", "logs", "doctor")


def help_of(argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main([*argv, "--help"])
    assert caught.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", sorted(set(cli.COMMANDS) - {"bench"}))
def test_every_command_tells_its_use(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in [[command], *([command, sub] for sub in SUBCOMMANDS.get(command, ()))]:
        text = help_of(argv, capsys)
        assert text.startswith(f"usage: baton {' '.join(argv)} ")
        described = text.partition("\n\n")[2].partition("\n\n")[0]
        assert described[0].isupper(), described
        assert described.endswith("."), described
        if len(argv) == 2 or command in WITH_JSON:
            assert "--json" in text, argv


def test_an_unknown_command_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chatt"]) == cli.EXIT_USAGE
    assert "no command 'chatt'; did you mean chat?" in capsys.readouterr().err
    assert cli.main(["xyzzy"]) == cli.EXIT_USAGE
    assert "no command 'xyzzy'\n" in capsys.readouterr().err


def test_ctrl_c_is_quiet_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupted)
    assert cli.main(["status"]) == 128 + signal.SIGINT


def test_a_terminal_of_few_characters_shows_question_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr(cli, "_dispatch", lambda argv: print("a · b") or 0)
    assert cli.main(["top"]) == 0
    assert raw.getvalue() == b"a ? b\n"


@pytest.mark.parametrize(
    "argv",
    [
        ["top", "--interval", "x"],
        ["trace", "--limit", "0"],
        ["batch", "list", "--limit", "x"],
        ["keys", "limits", "a", "--tokens-per-minute", "-1"],
        ["keys", "limits", "a", "--parallel", "many"],
        ["keys", "create", "a", "--parallel", "default"],
        ["logs", "-n", "x"],
    ],
)
def test_a_wrong_number_is_told_in_words(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == cli.EXIT_USAGE
    told = capsys.readouterr().err
    assert "argument" in told
    assert " value: " not in told, "argparse's own words name our functions"


@pytest.mark.parametrize(
    "argv",
    [
        ["status"],
        ["top", "--once"],
        ["trace"],
        ["chat", "hi"],
        ["batch", "list"],
        ["keys", "list"],
        ["keys", "create", "acme"],
        ["restart", "all"],
    ],
)
def test_without_a_stack_a_command_says_so_and_leaves_nothing_behind(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BATON_URL", "BATON_API_KEY", "BATON_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BATON_STATE", str(tmp_path / "state"))
    assert cli.main(argv) == 1
    told = capsys.readouterr()
    assert told.err.startswith(f"baton {argv[0]}: no stack is running; start one with ./baton up")
    assert told.out == ""
    assert not (tmp_path / "state").exists()


def test_keys_of_a_stack_that_never_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", "keys", "show"],
        env={**os.environ, "BATON_STATE": str(tmp_path / "state")},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "no stack was started on state folder" in done.stderr
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/a b/c", '"/a b/c"'),
        ('/a"b\\c', '"/a\\x22b\\x5cc"'),
        ("/é\n", '"/é\\x0a"'),
        ("/\udcff", '"/\\xff"'),
    ],
)
def test_a_path_is_one_word_for_redis(path: str, word: str) -> None:
    assert servers.quoted(Path(path)) == word


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("decode", ["decode-1", "decode-large-1", "decode-large-2"]),
        ("decode-large", ["decode-large-1", "decode-large-2"]),
        ("decode-1", ["decode-1"]),
        ("scheduler", ["scheduler"]),
        ("large", []),
        ("dec", []),
    ],
)
def test_a_name_means_a_process_or_all_that_begin_so(name: str, meant: list[str]) -> None:
    known = ["scheduler", "scheduler-large", "decode-1", "decode-large-1", "decode-large-2"]
    assert words.processes(name, known) == meant
