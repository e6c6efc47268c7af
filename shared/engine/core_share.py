"""Workers of a host share its cores: who computes at the same time as others takes a part of them.

    <folder>/<worker>.slot    locked by its owner as long as that lives; holds until when it computes

A worker counts as computing from the begin of a step until `LINGER_S` after its end, and looks at the others' slots
at the begin of each step, or of each call of several. That costs no call of the system; who is there is looked at once
a second.
"""

from __future__ import annotations

import fcntl
import logging
import math
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Self

from shared.contracts.ids import WorkerId

log = logging.getLogger("baton.worker")

LINGER_S = 0.02
"""Longer than the planner takes between two steps, so that a busy worker never looks idle."""
REFRESH_S = 1.0
_SUFFIX = ".slot"
_UNTIL = struct.Struct("<d")  # on the monotonic clock, which all processes of a host have in common
_TRIES = 8


def share_of(cores: int, computing: Iterable[str], own: str) -> int:
    """Threads of `own` beside the others that compute: an even part of the cores, at least one.

    What is left over goes to the first by name, so that all cores are used and none twice.
    """
    names = sorted({*computing, own})
    return max(1, cores // len(names) + (names.index(own) < cores % len(names)))


class CoreShare:
    """One worker's slot, and its view of the others'. Used by one thread.

    Args:
        folder: private, on one host, the same for all its workers; made if missing.
        cores: that this worker may use when it computes alone.

    Raises:
        OSError: the folder cannot be used.
    """

    def __init__(self, folder: Path, worker: WorkerId, cores: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._own, self._cores, self._clock = folder, worker, cores, clock
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = folder / f"{worker}{_SUFFIX}"
        self._fd = _make_locked(self._path)
        self._slot = mmap.mmap(self._fd, _UNTIL.size)
        self._others: dict[str, mmap.mmap] = {}
        self._refreshed = -math.inf

    def step(self) -> Self:
        """Around a step, `with share.step() as threads`: how many threads it may use."""
        return self

    def __enter__(self) -> int:
        now = self._clock()
        _UNTIL.pack_into(self._slot, 0, math.inf)
        if now - self._refreshed >= REFRESH_S:
            self._refreshed = now
            self._refresh()
        computing = [name for name, slot in self._others.items() if _UNTIL.unpack_from(slot)[0] >= now]
        return share_of(self._cores, computing, self._own) if computing else self._cores

    def __exit__(self, *_: object) -> None:
        _UNTIL.pack_into(self._slot, 0, self._clock() + LINGER_S)

    def close(self) -> None:
        """Give the slot up. Idempotent: a second close could hit a file that was opened meanwhile."""
        if self._fd < 0:
            return
        with suppress(OSError):
            self._path.unlink()
        os.close(self._fd)
        self._fd = -1

    def _refresh(self) -> None:
        """Map the slots of workers that came, forget those of workers that went."""
        try:
            names = {path.name.removesuffix(_SUFFIX): path for path in self._folder.glob(f"*{_SUFFIX}")}
        except OSError as exc:
            log.warning("cannot look at %s, where workers share cores: %s", self._folder, exc.strerror)
            return
        names.pop(self._own, None)
        for name in self._others.keys() - names.keys():
            del self._others[name]
        for name, path in names.items():
            with suppress(OSError, ValueError):  # it went meanwhile, or has no size yet
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    if _is_abandoned(fd):
                        path.unlink()
                        self._others.pop(name, None)
                    elif name not in self._others:
                        self._others[name] = mmap.mmap(fd, _UNTIL.size, prot=mmap.PROT_READ)
                finally:
                    os.close(fd)


def open_share(folder: Path, worker: WorkerId, cores: int) -> CoreShare | None:
    """A share of the cores, or None, with a line about it, where the folder cannot be used."""
    try:
        return CoreShare(folder, worker, cores)
    except OSError as exc:
        log.warning("cannot share cores with other workers through %s: %s", folder, exc.strerror)
        return None


def _make_locked(path: Path) -> int:
    """A new file with room for a slot. Another worker may take it for abandoned before it is locked, and remove it."""
    for _ in range(_TRIES):
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # not ftruncate: on a full tmpfs a write to the mapping would be a signal
            os.posix_fallocate(fd, 0, _UNTIL.size)
            if os.fstat(fd).st_nlink:
                return fd
        except BlockingIOError:
            pass
        except OSError:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise
        os.close(fd)
    raise BlockingIOError(0, "a slot is removed each time it is made")


def _is_abandoned(fd: int) -> bool:
    """Whether nobody holds the lock on it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
