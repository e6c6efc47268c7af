"""One stack with the default model for the whole run, and stacks of their own for tests that break things."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack.running import OTHER_KEY, Baton, tenants_file

FAKE_MAX_FILE_BYTES = 2_000_000


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, default_model_dir: Path) -> Iterator[Baton]:
    """The real thing: default model, tenants `demo`, `admin` and `other`. At the end nothing of it may be left."""
    folder = tmp_path_factory.mktemp("stack")
    baton = Baton(folder / "state")
    others = tenants_file(folder / "tenants.json", [("other", OTHER_KEY)])
    try:
        baton.up("--set", f"policy.tenants={others}")
        yield baton
        traces = baton.traces_outside()
        assert len(traces.ports) >= 3
        assert len([path for path in traces.shared if path.endswith(".kvpool")]) == 2
        baton.down()
        baton.nothing_left(traces)
    finally:
        baton.kill_all()


@pytest.fixture(scope="session")
def fake_stack(tmp_path_factory: pytest.TempPathFactory, default_model_dir: Path) -> Iterator[Baton]:
    """Workers that make up tokens, for what no model is needed; tenants `demo`, `admin` and `other`."""
    folder = tmp_path_factory.mktemp("fake stack")  # with a space, as a home folder may have one
    baton = Baton(folder / "state")
    others = tenants_file(folder / "tenants.json", [("other", OTHER_KEY)])
    try:
        settings = (f"policy.tenants={others}", "batch.max_lines=1000", f"batch.max_file_bytes={FAKE_MAX_FILE_BYTES}")
        baton.up("--fake", *(flag for setting in settings for flag in ("--set", setting)))
        yield baton
        baton.down()
    finally:
        baton.kill_all()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Baton]:
    """A state folder of the test's own; the test starts and stops what it wants."""
    baton = Baton(tmp_path / "state")
    yield baton
    if baton.processes():
        baton.run("down")
        baton.kill_all()
