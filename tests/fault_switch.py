"""Faults of a fake worker in a process of its own, switched by files: a step that does not end while one is there."""

from __future__ import annotations

import os
import time
from pathlib import Path

from shared.engine.fake_runner import FakeRunner
from shared.engine.step_plan import StepOutput, StepPlan

FOLDER_VARIABLE = "FAULTS_FOLDER"
LOOK_S = 0.02


def blocks_step(folder: Path, pid: int) -> Path:
    """The file that keeps the step at which the worker of a process id is from ending."""
    return folder / f"step-{pid}"


def install(folder: Path) -> None:
    """In a worker: look for the file at each step."""
    run, switch = FakeRunner.run, blocks_step(folder, os.getpid())

    def run_or_block(self: FakeRunner, plan: StepPlan) -> StepOutput:
        while switch.exists():
            time.sleep(LOOK_S)
        return run(self, plan)

    FakeRunner.run = run_or_block  # type: ignore[method-assign]
