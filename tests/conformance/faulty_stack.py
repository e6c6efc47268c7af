"""A stack of fake workers that a test can get into trouble, and what it says about it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from services.cli.state import StateFolder
from tests.fault_switch import FOLDER_VARIABLE
from tests.stack.running import MODEL, Baton, until

DRAIN_S = 10
STALL_S, HANG_S = 3, 25


def faulty_stack(folder: Path, *flags: str, **settings: Any) -> Iterator[Baton]:
    """One prefill and two decode workers of fake tokens, which `tests.fault_switch` gets into trouble."""
    faults = folder / "faults"
    faults.mkdir()
    baton = Baton(folder / "state", {FOLDER_VARIABLE: str(faults)})
    told = {
        "gateway.shutdown_s": DRAIN_S,
        "scheduler.worker_timeout_s": STALL_S,
        "lifecycle.hang_s": HANG_S,
        **settings,
    }
    try:
        baton.up("--fake", "--decode", "2", *flags, *(f"--set={name}={value}" for name, value in told.items()))
        yield baton
        baton.down()
    finally:
        baton.kill_all()


def faults_of(stack: Baton) -> Path:
    """Where its switches are."""
    return Path(stack.env[FOLDER_VARIABLE])


def readiness(stack: Baton) -> tuple[int, dict[str, bool]]:
    """The status of `/ready`, and its checks."""
    response = httpx.get(f"{stack.url}/ready", timeout=10)
    return response.status_code, response.json()["checks"]


def said(stack: Baton, words: str, process: str = "up") -> None:
    """The supervisor, or another process, has told of it in its log."""
    log = StateFolder(stack.folder).log(process)
    until(lambda: re.search(words, log.read_text()), 60, lambda: log.read_text()[-2000:])


def told_to_come_back(stack: Baton) -> None:
    """A request is refused with 503 and when to come again."""
    with pytest.raises(openai.APIStatusError) as refused:
        stack.openai().completions.create(model=MODEL, prompt="Hi", max_tokens=2)
    assert refused.value.status_code == 503
    assert int(refused.value.response.headers["retry-after"]) > 0
