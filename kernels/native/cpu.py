"""Which instruction sets the C kernels may use on this machine. Pure but for `machine_level`."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "BATON_CPU_LEVEL"
"""Forces the level down, for tests: the name of a lower level, or "none"."""
_BASE = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma")


@dataclass(frozen=True, slots=True)
class Level:
    """A set of instructions the kernels are compiled for."""

    name: str
    needs: frozenset[str]  # as /proc/cpuinfo names them
    flags: tuple[str, ...]  # of the compiler


LEVELS = (
    Level("avx512_bf16", frozenset((*_BASE, "avx512_bf16")), (*(f"-m{name}" for name in _BASE), "-mavx512bf16")),
    Level("avx512", frozenset(_BASE), tuple(f"-m{name}" for name in _BASE)),
)
"""Best first."""


def best_level(cpu_flags: frozenset[str], forced: str = "") -> Level | None:
    """The best level a processor with these flags has, at most `forced`; None if it has none.

    Raises:
        ValueError: `forced` is neither empty, "none" nor the name of a level.
    """
    if forced and forced not in ("none", *(level.name for level in LEVELS)):
        raise ValueError(f"{VARIABLE}={forced}: known are none, {', '.join(level.name for level in LEVELS)}")
    if forced == "none":
        return None
    names = [level.name for level in LEVELS]
    allowed = LEVELS[names.index(forced) if forced else 0 :]
    return next((level for level in allowed if level.needs <= cpu_flags), None)


def parse_flags(cpuinfo: str) -> frozenset[str]:
    """The flags that all processors of a /proc/cpuinfo have; none where it lists none, as on ARM."""
    lines = [line.partition(":") for line in cpuinfo.splitlines()]
    each = [frozenset(value.split()) for name, _, value in lines if name.strip() == "flags"]
    return frozenset.intersection(*each) if each else frozenset()


def machine_level(env: Mapping[str, str]) -> Level | None:
    """The level of this machine, or the lower one the environment asks for."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    try:
        flags = parse_flags(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        return None
    return best_level(flags, env.get(VARIABLE, ""))
