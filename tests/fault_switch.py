"""Faults of a fake worker in a process of its own, switched by files: steps that hang or fail, pulls that wait."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from shared.engine.fake_runner import FakeRunner
from shared.engine.step_plan import StepOutput, StepPlan

FOLDER_VARIABLE = "FAULTS_FOLDER"
LOOK_S = 0.02


def blocks_step(folder: Path, pid: int) -> Path:
    """The file that keeps the step at which the worker of a process id is from ending."""
    return folder / f"step-{pid}"


def fails_step(folder: Path, pid: int) -> Path:
    """The file with which every step fails."""
    return folder / f"fail-{pid}"


def holds_pull(folder: Path, pid: int) -> Path:
    """The file that keeps a decode worker from pulling what a prefill worker has computed for it."""
    return folder / f"pull-{pid}"


def install(folder: Path) -> None:
    """In a worker: look for the files at each step."""
    run, blocked, failing = FakeRunner.run, blocks_step(folder, os.getpid()), fails_step(folder, os.getpid())

    def run_or_not(self: FakeRunner, plan: StepPlan) -> StepOutput:
        while blocked.exists():
            time.sleep(LOOK_S)
        if failing.exists():
            raise RuntimeError("the test wants it so")
        return run(self, plan)

    FakeRunner.run = run_or_not  # type: ignore[method-assign]


def install_in_decode(folder: Path) -> None:
    """In a decode worker besides: look for its file before each pull."""
    from services.decode.handoff_in import HandoffIn

    pull, held = HandoffIn._pull, holds_pull(folder, os.getpid())

    async def pull_later(self: HandoffIn, *arguments: Any) -> None:
        while held.exists():  # noqa: ASYNC110 - another process takes it away
            await asyncio.sleep(LOOK_S)
        await pull(self, *arguments)

    HandoffIn._pull = pull_later  # type: ignore[method-assign]
