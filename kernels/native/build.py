"""Builds the C kernels and keeps the library: once per source, level and compiler.

    <folder>/lock                                one builder at a time
    <folder>/<source>-<level>-<compiler>.so      a library that passed its trial
    <folder>/<source>-<level>-<compiler>.sum     its digest: a library that is not what was tried is built again

A library of other sources that nobody has loaded for 30 days goes when a new one is built.

A library is tried in a process of its own before it is kept, so that a bad one costs a line and never a signal.

Libraries that came with the installation, as in an image (kernels/native/ship.py), lie in the folder that
BATON_NATIVE_LIBRARIES names, under the same names: they are looked at first, and need no compiler.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kernels.native.compiler import (
    FETCH_S,
    FETCHING,
    Compiler,
    NativeUnavailable,
    NoCompiler,
    find_compiler,
    missing_compiler,
)
from kernels.native.cpu import NEEDED, Level, machine_levels

log = logging.getLogger(__name__)

SHIPPED = "BATON_NATIVE_LIBRARIES"
"""The folder of libraries that came with the installation; root's or the user's own."""
KERNELS = Path(__file__).resolve().parents[1]
UNITS = ("bfloat16.c", "float32.c", "sampling.c", "stretch.c", "threads.c", "check.c", "library.c")
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared", "-pthread")
"""Sums are written out in the source, fused where it says so: no compiler may join or reorder them."""
COMPILE_S = 300.0
TRIAL_S = 60.0
KEPT_S = 30 * 86400.0
"""How long a library of other sources outlives its last use: another installation may share the folder."""


@dataclass(frozen=True, slots=True)
class Built:
    """A library that passed its trial."""

    path: Path
    level: str
    id: str  # source, level and compiler: what decides its bits


def sources() -> list[Path]:
    """Every file the library is made of."""
    return sorted([*KERNELS.glob("native/*.[ch]"), *KERNELS.glob("*/cpu_*.h")])


def source_digest() -> str:
    digest = hashlib.blake2b(" ".join(FLAGS).encode(), digest_size=8)
    for path in sources():
        digest.update(f"\x00{path.relative_to(KERNELS)}\x00".encode() + path.read_bytes())
    return digest.hexdigest()


def library_for_machine(folder: Path, env: Mapping[str, str]) -> Built:
    """The best library that came with the installation and runs here; or else the one for the best level, built if
    need be. No level is above what the environment allows.

    Raises:
        NativeUnavailable: as `ensure_library`, and where the machine has no level.
    """
    try:
        levels = machine_levels(env)
    except ValueError as exc:
        raise NativeUnavailable(str(exc)) from exc
    if not levels:
        raise NativeUnavailable(NEEDED)
    shipped = Path(env[SHIPPED]) if env.get(SHIPPED) else None
    found = find_shipped(shipped, levels) if shipped else None
    return found or ensure_library(folder, levels[0], env)


def find_shipped(folder: Path, levels: Sequence[Level]) -> Built | None:
    """A library of these sources in `folder` for the first of `levels` that has one which passes its trial.

    One that is there and cannot be used costs a line.
    """
    digest, looked = source_digest(), False
    for level in levels:
        for path in sorted(folder.glob(f"{digest}-{level.name}-*.so")):
            looked = True
            try:
                _check_shipped(path)
            except NativeUnavailable as exc:
                log.warning("%s is not used: %s", path, exc)
            else:
                return Built(path, level.name, path.stem)
    if not looked:
        names = ", ".join(level.name for level in levels)
        log.warning("%s=%s: there is no library of these sources for %s", SHIPPED, folder, names)
    return None


def _check_shipped(path: Path) -> None:
    for one in (path.parent, path):
        try:
            status = one.stat()
        except OSError as exc:
            raise NativeUnavailable(f"{one}: {exc.strerror}") from exc
        if status.st_uid not in (0, os.geteuid()) or stat.S_IMODE(status.st_mode) & 0o022:
            raise NativeUnavailable(f"{one} is others' or can be written by them")
    if not _is_whole(path):
        raise NativeUnavailable("it is not what was compiled, by its digest")
    _try(path)


def ensure_library(folder: Path, level: Level, env: Mapping[str, str]) -> Built:
    """The library for `level`, built if `folder` has none that is whole.

    Raises:
        NativeUnavailable: there is no compiler, it fails, or what it makes does not run here.
    """
    with _locked(folder):
        compiler = find_compiler(env, folder)
        digest = source_digest()
        prefix = f"{digest}-{level.name}-"
        if compiler is None:
            path = next((path for path in sorted(folder.glob(f"{prefix}*.so")) if _is_whole(path)), None)
            if path is None:
                raise NoCompiler(missing_compiler(env))
        else:
            path = folder / f"{prefix}{compiler.id}.so"
            if not _is_whole(path):
                try:
                    build_library(path, level, compiler)
                except OSError as exc:
                    raise NativeUnavailable(f"cannot keep the native kernels in {folder}: {exc.strerror}") from exc
                _prune(folder, digest, time.time())
        with suppress(OSError):
            os.utime(path)
        return Built(path, level.name, path.stem)


def compile_library(target: Path, level: Level, compiler: Compiler) -> None:
    """Compile all units into `target`. Raises NativeUnavailable."""
    units = [str(KERNELS / "native" / name) for name in UNITS]
    command = [*compiler.command, *FLAGS, *level.flags, f"-I{KERNELS}", *units, "-o", str(target), "-lm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMPILE_S, check=False)
    except (OSError, subprocess.SubprocessError) as exc:
        raise NativeUnavailable(f"{compiler.name} does not run: {exc}") from exc
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"code {done.returncode}"]
        fault = next((line for line in said if "error" in line), said[-1])
        raise NativeUnavailable(f"{compiler.name} cannot build the native kernels: {fault}")


def build_library(path: Path, level: Level, compiler: Compiler, tried: bool = True) -> None:
    """Compile `path` and its digest, in place of what is there.

    Args:
        tried: it must pass its trial; False for a level that this machine cannot run.

    Raises:
        NativeUnavailable: it cannot be compiled, or fails the trial.
        OSError: it cannot be kept.
    """
    for old in (path, _sum_of(path)):
        old.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as name:
        made = Path(name) / path.name
        compile_library(made, level, compiler)
        if tried:
            _try(made)
        _sum_of(made).write_text(_digest(made))
        _sum_of(made).rename(_sum_of(path))
        made.rename(path)


def _prune(folder: Path, digest: str, now: float) -> None:
    """Remove what killed builds left, and libraries of other sources that were not used for long. The lock is held."""
    for left in folder.glob(".build-*"):
        shutil.rmtree(left, ignore_errors=True)
    for left in folder.glob(f"{FETCHING}*"):  # fetched without the lock
        with suppress(OSError):
            if now - left.stat().st_mtime > 2 * FETCH_S:
                shutil.rmtree(left, ignore_errors=True)
    for path in folder.glob("*.so"):
        with suppress(OSError):
            if not path.name.startswith(f"{digest}-") and now - path.stat().st_mtime > KEPT_S:
                path.unlink()
                _sum_of(path).unlink(missing_ok=True)


def _try(library: Path) -> None:
    """Let the library compute a little where a signal ends nobody else."""
    command = [sys.executable, "-m", "kernels.native.trial", str(library)]
    try:
        done = subprocess.run(command, cwd=KERNELS.parent, capture_output=True, text=True, timeout=TRIAL_S, check=False)
    except (OSError, subprocess.SubprocessError) as exc:
        raise NativeUnavailable(f"the trial of the native kernels did not run: {exc}") from exc
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        end = f"signal {-done.returncode}" if done.returncode < 0 else f"code {done.returncode}"
        raise NativeUnavailable(f"the native kernels failed their trial with {end}{': ' if last else ''}{last}")


def _sum_of(path: Path) -> Path:
    return path.with_suffix(".sum")


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _is_whole(path: Path) -> bool:
    try:
        return _sum_of(path).read_text() == _digest(path)
    except (OSError, UnicodeDecodeError):
        return False


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The folder, made if missing, of which nobody else may change what we load. One process at a time."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
            raise NativeUnavailable(f"{folder} is others' or can be written by them: no library is loaded from it")
        lock = (folder / "lock").open("w")
    except OSError as exc:
        raise NativeUnavailable(f"cannot keep the native kernels in {folder}: {exc.strerror}") from exc
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
