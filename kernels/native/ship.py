"""`python -m kernels.native.ship FOLDER`: the libraries of all levels of this architecture, to be taken elsewhere.

For images: where `BATON_NATIVE_LIBRARIES` names the folder, no compiler is needed. Standard library only, so that it
runs before anything is installed. Levels this processor has are tried here; every library is tried where it is loaded.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kernels.native.build import build_library, source_digest
from kernels.native.compiler import (
    ZIG,
    ZIG_SIZE,
    Compiler,
    NativeUnavailable,
    NoCompiler,
    fetch_zig,
    find_compiler,
    missing_compiler,
)
from kernels.native.cpu import LEVELS, Level, machine_levels

Say = Callable[[str], None]


def ship(folder: Path, compiler: Compiler, levels: Sequence[Level], here: Sequence[Level], say: Say) -> list[Path]:
    """Compile the library of each of `levels` that the compiler can; what it cannot costs a line.

    Args:
        here: levels that this machine runs, and whose libraries must pass their trial.

    Raises:
        OSError: they cannot be kept.
    """
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    made = []
    for level in levels:
        path = folder / f"{source_digest()}-{level.name}-{compiler.id}.so"
        try:
            build_library(path, level, compiler, tried=level in here)
        except NativeUnavailable as exc:
            say(f"{level.name}: left out: {exc}")
            continue
        path.chmod(0o644)
        made.append(path)
        say(f"{level.name}: {'tried' if level in here else 'not tried, this processor is below it'}")
    return made


def have_compiler(env: Mapping[str, str], tools: Path, say: Say, fetch: Callable[[Path], None] = fetch_zig) -> Compiler:
    """The environment's compiler, or zig, fetched into `tools`.

    Raises:
        NativeUnavailable: `CC` names none, or zig cannot be had.
    """
    if found := find_compiler(env, tools):
        return found
    if not env.get("CC"):
        say(f"no C compiler: fetching zig {ZIG} ({ZIG_SIZE})")
        fetch(tools)
        if found := find_compiler(env, tools):
            return found
    raise NoCompiler(missing_compiler(env))


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m kernels.native.ship FOLDER", file=sys.stderr)
        return 2

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    levels = [level for level in LEVELS if level.machine == platform.machine()]
    try:
        with tempfile.TemporaryDirectory() as tools:
            compiler = have_compiler(os.environ, Path(tools), say)
            say(f"compiling the native kernels by {compiler.version}")
            made = ship(Path(argv[0]), compiler, levels, machine_levels({}), say)
    except (NativeUnavailable, OSError) as exc:
        say(f"native kernels: {exc}")
        return 1
    if not made:
        say("native kernels: no library could be compiled")
    return 0 if made else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
