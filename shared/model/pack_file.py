"""A file of packed weights: written whole or not at all, checked before it is used, mapped to be read.

    magic · length of the head, 8 bytes · head, JSON · zeros to a page · contents of the arena

The head says what was packed, where each piece lies, and the digest of the contents. Who uses a file holds a shared
lock on it as long as its mapping lives, so that nobody takes it for unused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import xxhash

from kernels.native.arena import Arena, aligned

MAGIC = b"baton packed weights 1\n\0"
TEMP_PREFIX = ".tmp-"
_LENGTH = struct.Struct("<Q")
_MOST_HEAD = 1 << 26
_CHUNK_BYTES = 1 << 30
_POPULATE_READ = 22
"""MADV_POPULATE_READ, which Python 3.11 has no name for: bring in all pages, and tell of faults instead of a signal."""


class Damaged(Exception):
    """A file that is not what was written; the message says in what."""


def write_pack(path: Path, what: Mapping[str, str], arena: Arena) -> None:
    """Write an arena's contents to `path`, durably, in place of what is there. Raises OSError: nothing has changed."""
    contents = arena.contents()
    digest = xxhash.xxh3_128_hexdigest(contents)
    head = json.dumps({"what": what, "pieces": arena.pieces, "size": len(contents), "digest": digest}).encode()
    begin = _begin(len(head))
    temp = path.with_name(f"{TEMP_PREFIX}{os.getpid()}")
    temp.unlink(missing_ok=True)
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
    try:
        with os.fdopen(fd, "wb", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, begin + len(contents))  # a full disk is an error here, not later
            _write(file, memoryview((MAGIC + _LENGTH.pack(len(head)) + head).ljust(begin, b"\0")))
            _write(file, contents)
            os.fsync(file.fileno())
            # what is read by a mapping comes in huge pages; what was written lies in whatever was free
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        temp.rename(path)
        _sync_folder(path.parent)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise


def open_pack(path: Path, what: Mapping[str, str], plan: Arena) -> Arena | None:
    """The arena kept at `path`, or None where there is no file.

    Args:
        plan: of the pieces the file must hold.

    Raises:
        Damaged: the file is not as it was written, or holds something else.
        OSError: it cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # whoever removes files holds it for a moment only
        status = os.fstat(file.fileno())
        if not status.st_nlink:
            return None
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
            raise Damaged("it is another user's, or can be written by others")
        begin, size, digest = _read_head(file, status.st_size, what, plan)
        if _digest(file, begin, size) != digest:
            raise Damaged("its digest differs")
        with contextlib.suppress(OSError):
            os.utime(file.fileno())  # when it was last used
        # the mapping keeps the file open, and with it the lock
        return Arena.over(_mapped(file, begin + size), begin)


def in_use(path: Path) -> bool:
    """Whether anybody has the file open as `open_pack` does. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _begin(head_bytes: int) -> int:
    return aligned(len(MAGIC) + _LENGTH.size + head_bytes)


def _read_head(file: BinaryIO, file_bytes: int, what: Mapping[str, str], plan: Arena) -> tuple[int, int, str]:
    """Where the contents begin, their size and digest."""
    start = _read(file, len(MAGIC) + _LENGTH.size)
    if not start.startswith(MAGIC):
        raise Damaged("it does not begin as one")
    (length,) = _LENGTH.unpack(start[len(MAGIC) :])
    if length > min(_MOST_HEAD, file_bytes):
        raise Damaged("its head is cut off")
    try:
        head = json.loads(_read(file, length))
        found, pieces, size, digest = head["what"], head["pieces"], head["size"], head["digest"]
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise Damaged("its head cannot be read") from exc
    if found != dict(what):
        raise Damaged("it holds other weights")
    if pieces != [list(piece) for piece in plan.pieces] or size != plan.used:
        raise Damaged("its pieces lie elsewhere")
    begin = _begin(length)
    if file_bytes != begin + size:
        raise Damaged(f"it has {file_bytes} bytes instead of {begin + size}")
    return begin, size, digest


def _digest(file: BinaryIO, begin: int, size: int) -> str:
    """Of the contents, through a mapping of its own: what a worker does not use stays out of its memory."""
    memory = _mapped(file, begin + size)
    try:
        memory.madvise(_POPULATE_READ)
    except OSError as exc:
        if exc.errno != errno.EINVAL:  # a kernel that cannot; reading brings the pages in as well
            raise Damaged(f"it cannot be read: {exc.strerror}") from exc
    with memory, memoryview(memory) as view:
        return str(xxhash.xxh3_128_hexdigest(view[begin:]))


def _mapped(file: BinaryIO, size: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except ValueError as exc:
        raise Damaged("it was cut off meanwhile") from exc
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _read(file: BinaryIO, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = file.read(count - len(data))
        if not part:
            raise Damaged("its head is cut off")
        data += part
    return bytes(data)


def _write(file: BinaryIO, data: memoryview) -> None:
    at = 0
    while at < len(data):
        at += file.write(data[at : at + _CHUNK_BYTES])


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
