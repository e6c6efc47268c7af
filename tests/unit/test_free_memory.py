"""What memory is free: the machine's, or less where a control group allows less."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.engine.free_memory import free_in_groups, free_memory_bytes

OWN = "4:memory:/box\n2:cpu,cpuacct:/box\n0::/pods/one\n"


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_files_in_memory_are_free(tmp_path: Path) -> None:
    stat = "anon 100\ninactive_file 300\nactive_file 50\nshmem 200"
    group(tmp_path / "pods", memory__max=5000, memory__current=900, memory__stat=stat)
    group(tmp_path / "pods/one", memory__max="max", memory__current=800, memory__stat=stat)
    assert list(free_in_groups(tmp_path, OWN)) == [5000 - 900 + 350]
    group(tmp_path / "pods/one", memory__max=700)
    assert min(free_in_groups(tmp_path, OWN)) == 700 - 800 + 350


def test_the_old_hierarchy(tmp_path: Path) -> None:
    stat = "inactive_file 1\ntotal_inactive_file 300\ntotal_active_file 0"
    files = {"memory__limit_in_bytes": 4000, "memory__usage_in_bytes": 1000, "memory__stat": stat}
    group(tmp_path / "memory/box", **files)
    assert list(free_in_groups(tmp_path, OWN)) == [3300]


def test_the_least_counts_and_none_is_negative(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:       50 kB\n")
    assert free_memory_bytes(tmp_path, meminfo) == 50 * 1024
    group(tmp_path, memory__max=10, memory__current=30, memory__stat="inactive_file 5")
    assert list(free_in_groups(tmp_path, "0::/\n")) == [0]


@pytest.mark.parametrize("own", ["", "0::/\n", "3:cpuset:/box\n"])
def test_no_group_is_no_limit(tmp_path: Path, own: str) -> None:
    assert not list(free_in_groups(tmp_path, own))
