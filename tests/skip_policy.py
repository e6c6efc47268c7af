"""In CI a test may be skipped only for a reason written down in `allowed_skips.txt`; any other skip is a failure."""

from __future__ import annotations

import os
from collections.abc import Generator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ALLOWED_FILE = Path(__file__).with_name("allowed_skips.txt")


def allowed_reasons(text: str) -> list[str]:
    """Patterns, one a line; `#` starts a comment."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def is_allowed(reason: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(reason.removeprefix("Skipped: "), pattern) for pattern in patterns)


def _judge(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not report.skipped or hasattr(report, "wasxfail") or os.environ.get("CI") != "true":
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not is_allowed(reason, allowed_reasons(ALLOWED_FILE.read_text())):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI for a reason that tests/allowed_skips.txt does not list: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _judge(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _judge(report)
    return report
