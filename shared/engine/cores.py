"""How many cores this process may use: its affinity, and the quotas of its control groups. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

CGROUPS = Path("/sys/fs/cgroup")
_V1_CPU = ("cpu,cpuacct", "cpuacct,cpu")


def usable_cores(root: Path = CGROUPS) -> int:
    """Cores this process may run on at a time: those of its affinity, at most what quotas allow, at least one."""
    cores = len(os.sched_getaffinity(0))
    own = ""
    with suppress(OSError):
        own = Path("/proc/self/cgroup").read_text()
    return min(cores, quota_cores(root, own) or cores)


def quota_cores(root: Path, own: str) -> int | None:
    """The least whole number of cores that a control group of this process or one above it allows; None for no limit.

    Args:
        root: where control groups are mounted.
        own: /proc/self/cgroup.
    """
    found = [cores for text in _quotas(root, own) if (cores := parse_cpu_max(text)) is not None]
    return min(found, default=None)


def parse_cpu_max(text: str) -> int | None:
    """Whole cores that a cgroup v2 `cpu.max` allows, at least one; None for no limit.

    Rounded down: of threads that together have less than their number of cores, all are stopped at times, and those
    that wait for them waste what is left.
    """
    quota, _, period = text.strip().partition(" ")
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return None
    return max(1, int(quota) // int(period))


def groups_of(root: Path, own: str, controller: str) -> Iterator[tuple[Path, int]]:
    """The folders that may hold a controller's files for a process, its own group first, with the cgroup version.

    Args:
        root: where control groups are mounted.
        own: /proc/self/cgroup.
    """
    for line in own.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            yield from ((group, 2) for group in _upwards(root, path))
        elif controller in controllers.split(","):
            # mounted under one of its names, or together with others
            for name in dict.fromkeys((controller, controllers, *(_V1_CPU if controller == "cpu" else ()))):
                yield from ((group, 1) for group in _upwards(root / name, path))


def _quotas(root: Path, own: str) -> Iterator[str]:
    """The quotas of all groups on the way, as `cpu.max` has them."""
    for group, version in groups_of(root, own, "cpu"):
        with suppress(OSError):
            if version == 2:
                yield (group / "cpu.max").read_text()
            else:
                quota, period = ((group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
                yield f"{quota} {period}"


def _upwards(root: Path, path: str) -> Iterator[Path]:
    """A group and those above it. In a container the path may be the host's: then only the mount's own is there."""
    inner = PurePosixPath(path.lstrip("/"))
    yield from (root / group for group in (inner, *inner.parents))
