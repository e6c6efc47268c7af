"""Memory that was freed goes back to the system.

The C library keeps what large bodies and prompts took, of each thread apart: hundreds of megabytes after a few prompts
of a megabyte.
"""

from __future__ import annotations

import asyncio
import ctypes
from contextlib import suppress

LARGE_BYTES = 256 * 1024
"""From this size on, what a request brought is worth the work."""
PAUSE_S = 1.0
"""Until then what is large has mostly been freed; and it is not done more often."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h


def keep_little() -> None:
    """Have the C library keep at most `LARGE_BYTES` at the end of each thread's memory, which `give_back` leaves alone.

    By itself it learns to keep up to 64 MiB there from whatever large was freed.
    """
    with suppress(AttributeError, OSError):  # only glibc has it
        for setting in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
            ctypes.CDLL(None).mallopt(setting, LARGE_BYTES)


def give_back() -> None:
    """Return what is free now. It may take some hundred milliseconds; others wait for the parts of it in turn."""
    with suppress(AttributeError, OSError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


class GiveBack:
    """Gives free memory back soon after something large was there, in a thread. Called on an event loop."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def after(self, size: int) -> None:
        """Something of so many bytes, or characters, is no longer needed, or will soon not be."""
        if size < LARGE_BYTES:
            return
        loop = asyncio.get_running_loop()
        if self._timer is None or self._loop is not loop:
            self._loop = loop
            self._timer = loop.call_later(PAUSE_S, self._begin, loop)

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        loop.run_in_executor(None, give_back)


GIVE_BACK = GiveBack()
"""The process's: its memory is one."""
