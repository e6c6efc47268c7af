"""The C compiler the kernels are built with: the system's or, without one, zig of the `ziglang` wheel.

<folder>/zig-<version>     the wheel, fetched once by `./baton up` where there is no compiler
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

COMPILERS = ("cc", "gcc", "clang")
ZIG = "0.15.2"
ZIG_SIZE = "93 MB, 380 MB unpacked"
FETCH_S = 600.0
FETCHING = ".zig-"


class NativeUnavailable(Exception):
    """The native kernels cannot be used here; the message says why, in one line."""


class NoCompiler(NativeUnavailable):
    """There is no C compiler. `fetch_zig` would help, unless `CC` names one."""


@dataclass(frozen=True, slots=True)
class Compiler:
    command: tuple[str, ...]
    version: str  # first line of what it says about itself

    @property
    def name(self) -> str:
        return shlex.join(self.command)

    @property
    def id(self) -> str:
        """Of what decides the bits of a library: the version, and arguments that `CC` adds."""
        return hashlib.blake2b(shlex.join((self.version, *self.command[1:])).encode(), digest_size=4).hexdigest()


def find_compiler(env: Mapping[str, str], folder: Path | None = None) -> Compiler | None:
    """The compiler `CC` names, arguments allowed; or else the first of `COMPILERS` on the path that answers, or zig.

    Args:
        folder: where `fetch_zig` may have put one.
    """
    if env.get("CC"):
        return _answering(_words(env["CC"]), env)
    for name in COMPILERS:
        if found := _answering([name], env):
            return found
    zig = find_zig(folder)
    return None if zig is None else zig_compiler(zig, f"{platform.machine()}-linux-gnu", env)


def missing_compiler(env: Mapping[str, str]) -> str:
    """Why `find_compiler` found none, in a line."""
    if env.get("CC"):
        return f"CC={env['CC']} is no C compiler that runs: the native kernels cannot be built"
    return f"no C compiler ({', '.join(COMPILERS[:-1])} or {COMPILERS[-1]}) to build the native kernels with"


def find_zig(folder: Path | None) -> Path | None:
    """zig of the `ziglang` wheel: of this environment, or fetched into `folder`."""
    spec = importlib.util.find_spec("ziglang")
    roots = [Path(spec.origin).parent] if spec and spec.origin else []
    if folder is not None:
        roots.append(_zig_home(folder) / "ziglang")
    return next((root / "zig" for root in roots if os.access(root / "zig", os.X_OK)), None)


def zig_compiler(zig: Path, target: str, env: Mapping[str, str]) -> Compiler | None:
    """zig for a target such as "aarch64-linux-gnu". A named target has no instructions but those the flags ask for."""
    # clang itself takes AVX-512 for leave to use its wide registers; zig wants to be told
    wide = ["-mevex512"] if target.startswith("x86_64") else []
    return _answering([str(zig), "cc", "-target", target, *wide, "-g0"], env)


def fetch_zig(folder: Path) -> None:
    """Put the `ziglang` wheel into `folder`, by pip. For set-ups: nothing else downloads.

    Raises:
        NativeUnavailable: it cannot be had, in one line.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-input", "--no-deps"]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=FETCHING, ignore_cleanup_errors=True) as made:
            command = [*pip, "--no-compile", "--target", made, f"ziglang=={ZIG}"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S, check=False)
            if done.returncode:
                said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
                raise NativeUnavailable(f"no C compiler, and zig cannot be fetched: {said[-1]}")
            _keep(Path(made), _zig_home(folder))
    except (OSError, subprocess.SubprocessError) as exc:
        raise NativeUnavailable(f"no C compiler, and zig cannot be fetched: {exc}") from exc


def _keep(made: Path, home: Path) -> None:
    try:
        made.rename(home)
    except OSError:
        if not (home / "ziglang").exists():  # else somebody else was faster
            raise


def _zig_home(folder: Path) -> Path:
    return folder / f"zig-{ZIG}"


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:
        return []


def _answering(command: list[str], env: Mapping[str, str]) -> Compiler | None:
    path = shutil.which(command[0], path=env.get("PATH")) if command else None
    if path is None:
        return None
    whole = (path, *command[1:])
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(
            [*whole, "--version"], capture_output=True, text=True, errors="replace", timeout=30, check=True
        ).stdout
        return Compiler(whole, said.partition("\n")[0].strip())
    return None
