"""What a figure was measured on, and how much of the machine others used meanwhile."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

IDLE_CORES = 0.2
"""Other processes' use above this marks a figure: it was not measured on an idle machine."""
_TICKS = os.sysconf("SC_CLK_TCK")
_PROCESS_CLOCK = 2
"""What Linux makes a process's clock id of, beside its number: the time its threads were scheduled."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine and the versions of what computes."""

    cpu: str
    cores: int
    memory_gib: float
    system: str
    python: str
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""

    def body(self) -> dict[str, Any]:
        return asdict(self)


def this_machine() -> Machine:
    """Read from this process's machine, now."""
    cpu = platform.machine()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    versions = {}
    for name in ("torch", "nats-py", "msgspec"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return Machine(
        cpu=cpu,
        cores=len(os.sched_getaffinity(0)),
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        versions=versions,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


class ForeignLoad:
    """Cores that processes other than this one, its children and `ours` keep busy, since it was made.

    Args:
        ours: process ids whose descendants count as ours too.
        children: False: of this process's children only those in `ours` are ours.
    """

    def __init__(self, *ours: int, children: bool = True) -> None:
        self._roots = {os.getpid(), *ours} if children else set(ours)
        self._at = time.monotonic()
        self._busy, self._own = _machine_busy_s(), self._own_s()

    def cores(self) -> float:
        """The mean since then. What ended meanwhile among ours counts as others': measure while they live."""
        seconds = max(1e-3, time.monotonic() - self._at)
        return max(0.0, (_machine_busy_s() - self._busy - (self._own_s() - self._own)) / seconds)

    def _own_s(self) -> float:
        parents, used = _processes()
        own = used.get(os.getpid(), 0.0)
        return own + sum(
            seconds for pid, seconds in used.items() if pid != os.getpid() and _descends(pid, parents, self._roots)
        )


def processor_s(*roots: int) -> float:
    """Processor seconds that these processes and their descendants have used, those that ended included."""
    return sum(processor_s_each(*roots).values())


def processor_s_each(*roots: int) -> dict[int, float]:
    """As `processor_s`, by process id."""
    parents, used = _processes()
    return {pid: seconds for pid, seconds in used.items() if _descends(pid, parents, set(roots))}


def foreign_cores(seconds: float) -> float:
    """Measure for so long, doing nothing."""
    load = ForeignLoad()
    time.sleep(seconds)
    return load.cores()


def _machine_busy_s() -> float:
    """Processor seconds all processes have used since the machine started."""
    fields = [int(part) for part in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields[:8]
    return (user + nice + system + irq + softirq + steal) / _TICKS


def _processes() -> tuple[dict[int, int], dict[int, float]]:
    """Parents by process id, and processor seconds used, those of children that ended among them."""
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            parents[int(entry.name)] = int(fields[1])
            used[int(entry.name)] = _clock_s(int(entry.name), fields) + sum(map(int, fields[13:15])) / _TICKS
    return parents, used


def _clock_s(pid: int, fields: Sequence[str]) -> float:
    """Of a process itself, to the nanosecond: `fields` of its stat count in hundredths of a second."""
    try:
        return time.clock_gettime(~pid << 3 | _PROCESS_CLOCK)
    except OSError:
        return sum(map(int, fields[11:13])) / _TICKS


def _descends(pid: int, parents: dict[int, int], roots: set[int]) -> bool:
    seen = set[int]()
    while pid and pid not in seen:
        if pid in roots:
            return True
        seen.add(pid)
        pid = parents.get(pid, 0)
    return False
