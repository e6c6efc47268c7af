"""How a pool file begins, under a temporary name, locked by its owner before anybody may take it for a leaving; and how
it ends where its owner died: whoever finds it overwrites it and removes it, and leaves a mark until policy was told."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from shared.contracts.errors import SettingsError
from shared.contracts.ids import WorkerId, is_id

SUFFIX = ".kvpool"
_MARK = ".wiped"
_TEMP_PREFIX = ".tmp-"
_TRIES = 8
_WIPE_BYTES = 1 << 20


def make_locked(folder: Path) -> tuple[int, Path]:
    """A new, empty, locked file in `folder`, which is made with mode 0700 if it is missing.

    A starting worker that sweeps the folder may find the file between its making and its lock, and remove it: then
    another one is made.

    Returns:
        Its file descriptor and temporary path, to be renamed when it is ready.

    Raises:
        SettingsError: the folder cannot be used.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for _ in range(_TRIES):
            path = folder / f"{_TEMP_PREFIX}{secrets.token_hex(8)}{SUFFIX}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_nlink > 0:
                    return fd, path
            os.close(fd)
    except OSError as exc:
        raise SettingsError(f"cannot make a KV pool in {folder}: {exc.strerror}", param="kv_dir") from exc
    raise SettingsError(f"cannot make a KV pool in {folder}: it is removed each time", param="kv_dir")


def sweep(folder: Path) -> list[Path]:
    """Overwrite and remove every pool file in `folder` that has no owner. Returns the paths removed."""
    return [path for path in sorted(folder.glob(f"*{SUFFIX}")) if _remove_unowned(path)]


def mark_wiped(folder: Path, worker: WorkerId) -> None:
    """Note that a worker's pool is gone, until `told`: a process that ends before that leaves it to the next."""
    (folder / f"{worker}{_MARK}").touch(mode=0o600)


def wiped(folder: Path) -> tuple[WorkerId, ...]:
    """Workers whose pools are gone, and of which policy was not told yet."""
    found = (path.name.removesuffix(_MARK) for path in sorted(folder.glob(f"*{_MARK}")))
    return tuple(WorkerId(name) for name in found if is_id(name))


def told(folder: Path, workers: Iterable[WorkerId]) -> None:
    """Policy knows of these."""
    for worker in workers:
        (folder / f"{worker}{_MARK}").unlink(missing_ok=True)


def _remove_unowned(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_nlink == 0:
            return False
        _wipe(fd)
        if is_id(worker := path.name.removesuffix(SUFFIX)):
            mark_wiped(path.parent, WorkerId(worker))
        path.unlink()
    except (BlockingIOError, FileNotFoundError):
        return False
    finally:
        os.close(fd)
    return True


def _wipe(fd: int) -> None:
    size = os.fstat(fd).st_size
    zeros = bytes(_WIPE_BYTES)
    for offset in range(0, size, _WIPE_BYTES):
        os.pwrite(fd, zeros[: size - offset], offset)
