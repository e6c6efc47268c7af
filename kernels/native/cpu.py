"""Which instruction sets the C kernels may use on this machine. Pure but for `machine_level(s)`."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "BATON_CPU_LEVEL"
"""Forces the level down, for tests: the name of a lower level, or "none"."""
NEEDED = "the native kernels need a processor with AVX-512, with AVX2, FMA and F16C, or with 64-bit NEON"
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma")
_AVX2 = ("avx2", "fma", "f16c")


@dataclass(frozen=True, slots=True)
class Level:
    """A set of instructions the kernels are compiled for."""

    name: str
    machine: str  # as `uname -m` says
    needs: frozenset[str]  # as /proc/cpuinfo names them
    flags: tuple[str, ...]  # of the compiler


def _x86(name: str, *needs: str) -> Level:
    return Level(name, "x86_64", frozenset(needs), tuple(f"-m{need.replace('512_', '512')}" for need in needs))


LEVELS = (
    _x86("avx512_bf16", *_AVX512, "avx512_vnni", "avx512_bf16"),
    _x86("avx512_vnni", *_AVX512, "avx512_vnni"),
    _x86("avx512", *_AVX512),
    _x86("avx2", *_AVX2),
    Level("neon_dotprod", "aarch64", frozenset(("asimd", "asimddp")), ("-mcpu=generic+dotprod",)),
    Level("neon", "aarch64", frozenset(("asimd",)), ("-mcpu=generic",)),
)
"""Best first within a machine. All give the same bits but `avx512_bf16`, whose products of bfloat16 round otherwise."""


def best_level(cpu_flags: frozenset[str], forced: str = "", machine: str = "x86_64") -> Level | None:
    """The first of `levels_of`; None if there is none. Raises ValueError as that does."""
    return next(iter(levels_of(cpu_flags, forced, machine)), None)


def levels_of(cpu_flags: frozenset[str], forced: str = "", machine: str = "x86_64") -> tuple[Level, ...]:
    """The levels a processor with these flags has, at most `forced`, best first.

    Raises:
        ValueError: `forced` is neither empty, "none" nor the name of a level of the machine.
    """
    levels = [level for level in LEVELS if level.machine == machine]
    names = [level.name for level in levels]
    if forced == "none":
        return ()
    if forced and forced not in names:
        raise ValueError(f"{VARIABLE}={forced}: known are {', '.join(('none', *names))}")
    allowed = levels[names.index(forced) if forced else 0 :]
    return tuple(level for level in allowed if level.needs <= cpu_flags)


def parse_flags(cpuinfo: str) -> frozenset[str]:
    """The flags that all processors of a /proc/cpuinfo have ("Features" on ARM); none where it lists none."""
    lines = [line.partition(":") for line in cpuinfo.splitlines()]
    each = [frozenset(value.split()) for name, _, value in lines if name.strip() in ("flags", "Features")]
    return frozenset.intersection(*each) if each else frozenset()


def machine_level(env: Mapping[str, str]) -> Level | None:
    """The level of this machine, or the lower one the environment asks for. Raises ValueError as `levels_of`."""
    return next(iter(machine_levels(env)), None)


def machine_levels(env: Mapping[str, str]) -> tuple[Level, ...]:
    """That level and those below it. Raises ValueError as `levels_of`."""
    try:
        flags = parse_flags(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        return ()
    return levels_of(flags, env.get(VARIABLE, ""), platform.machine())
