"""`./baton test` runs the tests in two processes and loses the verdict of neither."""

from __future__ import annotations

import sys

import pytest

from services.cli import check


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    ("computing", "others", "code"), [(0, 0, 0), (1, 0, 1), (0, 1, 1), (2, 1, 2)], ids=["green", "one", "other", "both"]
)
def test_a_run_that_fails_is_not_hidden_by_the_other(
    computing: int, others: int, code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def command(rest: list[str], long: bool) -> list[str]:
        ours = tuple(rest) == check.COMPUTING
        return python(f"print('computing' if {ours} else 'others'); raise SystemExit({computing if ours else others})")

    monkeypatch.setattr(check, "pytest_command", command)
    assert check.run_tests([], long=False) == code
    said = capfd.readouterr().out
    assert said.index("others") < said.index("run at the same time") < said.index("computing\n")


def test_chosen_tests_run_alone(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "pytest_command", lambda rest, long: python(f"print({rest!r}, {long})"))
    assert check.run_tests(["tests/unit/test_ids.py"], long=False) == 0
    assert check.run_tests([], long=True) == 0
    assert capfd.readouterr().out == "['tests/unit/test_ids.py'] False\n[] True\n"


def test_an_interrupted_run_leaves_nothing_behind() -> None:
    with pytest.raises(KeyboardInterrupt), check.beside(python("import time; time.sleep(60)")) as running:
        raise KeyboardInterrupt
    assert not running.runs
