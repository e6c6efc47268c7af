"""What the processes of a stack write is their owner's alone, whatever the umask of who started it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli.child import Child
from tests.unit.test_supervisor import spec


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}


async def test_files_of_a_child_and_its_log_are_private(tmp_path: Path, open_umask: None) -> None:
    code = "import os; open('data', 'w').close(); os.mkdir('folder'); print('said')"
    child = Child(spec(tmp_path, "x", code))
    await child.ended.wait()
    assert modes(tmp_path) == {"data": 0o600, "folder": 0o700, "x.log": 0o600}
