"""A pool file mapped where huge pages can hold it, and asked into them: attention over small pages waits for the walks.

tmpfs gives none by itself unless its mount says so; what is allocated is collapsed into them instead (Linux 6.1).
Where the kernel refuses, nothing changes but speed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import time

HUGE_PAGE = 2 << 20
LONGEST_S = 2.0
"""No more is asked for after this long: a machine whose free memory lies in small pieces has to move others first."""
_MADV_COLLAPSE = 25
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_AT_ONCE = 8 * HUGE_PAGE


class HugeMapping:
    """`size` bytes of a file, shared and writable, from an address that is a multiple of a huge page where the system
    lets addresses be set aside.

    Raises:
        OSError: the file cannot be mapped.
    """

    def __init__(self, fd: int, size: int) -> None:
        self._size = size
        aside = _set_aside(size + HUGE_PAGE)
        # what is set aside owns the file's mapping, which takes the place of its middle
        self._map = aside if aside is not None else mmap.mmap(fd, size)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._first = -start % HUGE_PAGE if aside is not None else 0
        self._address = start + self._first
        if aside is not None:
            _map_over(self._address, size, fd)

    def view(self) -> memoryview:
        """The file's bytes. The mapping lives as long as anybody holds one of these."""
        return memoryview(self._map)[self._first : self._first + self._size]

    def collapse(self, longest_s: float = LONGEST_S) -> int:
        """Gather what is allocated into huge pages, part by part. Returns the bytes that lie in some now."""
        with contextlib.suppress(OSError):
            _advise(self._address, self._size, mmap.MADV_HUGEPAGE)
        gathered, end = 0, time.monotonic() + longest_s
        whole = self._size // HUGE_PAGE * HUGE_PAGE
        for offset in range(0, whole, _AT_ONCE):
            if time.monotonic() > end:
                break
            size = min(_AT_ONCE, whole - offset)
            try:
                _advise(self._address + offset, size, _MADV_COLLAPSE)
            except OSError as exc:
                if exc.errno == errno.EINVAL:  # not this kernel, or not this file system
                    break
                continue
            gathered += size
        return gathered

    def close(self) -> None:
        """Unmap, unless views handed out still need the memory: then it goes with the last of them."""
        with contextlib.suppress(BufferError):
            self._map.close()


def _set_aside(size: int) -> mmap.mmap | None:
    """Addresses that nothing lies at; None where the system counts them as memory and has not as much."""
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except OSError:
        return None


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def _map_over(address: int, size: int, fd: int) -> None:
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc().mmap(address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != address:
        raise _last_error()


def _advise(address: int, size: int, advice: int) -> None:
    if _libc().madvise(address, size, advice):
        raise _last_error()


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, errno.errorcode.get(number, str(number)))
