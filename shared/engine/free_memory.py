"""How much memory this process may still take. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from shared.engine.cores import CGROUPS, groups_of

MEMINFO = Path("/proc/meminfo")
_V2, _V1 = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
_CACHES = ("inactive_file", "active_file")
_HIERARCHY = ("total_inactive_file", "total_active_file")
"""Pages of files, which the kernel takes back when memory is wanted; cgroup v1 counts those of groups below apart."""


def free_memory_bytes(root: Path = CGROUPS, meminfo: Path = MEMINFO) -> int:
    """Bytes: the kernel's MemAvailable, at most what the limits of its control groups leave."""
    own = ""
    with suppress(OSError):
        own = Path("/proc/self/cgroup").read_text()
    return min([_available(meminfo), *free_in_groups(root, own)])


def free_in_groups(root: Path, own: str) -> Iterator[int]:
    """What each control group with a limit leaves, of this process and above it.

    Args:
        root: where control groups are mounted.
        own: /proc/self/cgroup.
    """
    for group, version in groups_of(root, own, "memory"):
        (most, used), caches = (_V2, _CACHES) if version == 2 else (_V1, _HIERARCHY)
        with suppress(OSError, ValueError):  # "max" is no number: no limit
            limit = int((group / most).read_text())
            stats = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            taken = int((group / used).read_text()) - sum(int(stats.get(name, 0)) for name in caches)
            yield max(0, limit - max(0, taken))


def _available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
