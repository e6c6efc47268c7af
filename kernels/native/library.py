"""The loaded library and teams of its threads."""

from __future__ import annotations

import ctypes
import hashlib
import os
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.native.abi import FAULTS, NO_MEMORY, TO_FLOATS, LinearStruct, declare
from kernels.native.build import library_for_machine
from kernels.native.compiler import NativeUnavailable

NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The C kernels, built for this machine. Loaded once a process: `open_library`."""

    id: str  # source, level, compiler, and what this processor makes of sums: part of the `numerics` id
    functions: Any  # ctypes.CDLL
    level: str  # its instruction set, as kernels.native.cpu names it


class Team:
    """Threads that run a library's calls together; calls of one team must not overlap. The caller is one of them.

    Raises:
        NativeUnavailable: the system gives no more threads or memory.
    """

    def __init__(self, library: NativeLibrary, threads: int) -> None:
        self.library = library
        self.threads = threads
        self._called_s = 0.0
        before = _thread_ids()
        self._handle = library.functions.baton_open(threads)
        self._helpers = _thread_ids() - before
        if not self._handle:
            raise NativeUnavailable(f"cannot start {threads} compute threads")
        closing = weakref.finalize(self, library.functions.baton_close, self._handle)
        closing.atexit = False  # a thread may still be in a call when the interpreter ends

    def use(self, threads: int) -> None:
        """Let calls from now on use so many threads, at least one and at most all; results stay the same bits."""
        self.library.functions.baton_use(self._handle, max(0, min(threads, self.threads)))

    def call(self, name: str, dtype: torch.dtype, *arguments: object) -> None:
        """Call `name` for elements of `dtype`.

        Raises:
            ValueError: the call refused its arguments; nothing was computed.
            MemoryError: there is no memory for it.
        """
        self.call_plain(f"{name}_{NAMES[dtype]}", *arguments)

    def call_plain(self, name: str, *arguments: object) -> None:
        """As `call`, for a function that knows no elements."""
        self.prepared(name, *arguments)()

    def prepared(self, name: str, *arguments: object) -> Callable[[], None]:
        """As `call_plain`, to be called time and again: addresses must stay good, what they hold may change."""
        function, handle = getattr(self.library.functions, name), self._handle

        def call() -> None:
            before = time.thread_time()
            code = function(handle, *arguments)
            self._called_s += time.thread_time() - before
            if code:
                _raise(code)

        return call

    def cpu_s(self) -> float:
        """Processor seconds of all calls so far: of callers within them, and of the team's own threads."""
        return self._called_s + sum(map(_thread_cpu_s, self._helpers))


def _raise(code: int) -> None:
    if code == NO_MEMORY:
        raise MemoryError("no memory for the native kernels")
    raise ValueError(FAULTS[code])


def _thread_ids() -> frozenset[str]:
    """This process's threads as Linux numbers them; elsewhere none."""
    try:
        return frozenset(os.listdir("/proc/self/task"))
    except OSError:
        return frozenset()


def _thread_cpu_s(thread: str) -> float:
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):  # it has ended, or the kernel keeps no such account
        return 0.0


_loaded: dict[Path, NativeLibrary] = {}


def open_library(folder: Path, env: Mapping[str, str] | None = None) -> NativeLibrary:
    """Build, where need be, and load the library of this machine's level.

    Args:
        folder: where built libraries are kept.
        env: instead of the process's environment; `BATON_CPU_LEVEL` and `CC` are looked at.

    Raises:
        NativeUnavailable: with the reason.
    """
    env = os.environ if env is None else env
    built = library_for_machine(folder, env)
    if built.path not in _loaded:
        try:
            functions = declare(ctypes.CDLL(str(built.path)))
            _loaded[built.path] = NativeLibrary(f"{built.id}-{_rounding(functions)}", functions, built.level)
        except (OSError, ValueError, AttributeError) as exc:
            raise NativeUnavailable(f"the native kernels at {built.path} cannot be loaded: {exc}") from exc
    return _loaded[built.path]


def _rounding(functions: Any) -> str:
    """A digest of some bfloat16 sums: processors differ in how they round within a product of pairs."""
    inputs, outputs = 256, 32
    number = torch.arange(outputs * inputs)
    values = (number * 37 % 201 - 100) * torch.exp2((number * 7 % 23 - 11).float())
    plain, packed = values.to(torch.bfloat16), torch.zeros(outputs * inputs, dtype=torch.bfloat16)
    sums = torch.zeros(outputs)
    team = functions.baton_open(1)
    if not team:
        raise OSError("no memory for a thread team")
    struct = LinearStruct(packed.data_ptr(), None, inputs, outputs)
    functions.baton_pack_bfloat16(team, plain.data_ptr(), packed.data_ptr(), outputs, inputs, 0, outputs, outputs)
    functions.baton_linear_bfloat16(
        team, ctypes.byref(struct), plain[inputs:].data_ptr(), sums.data_ptr(), 1, inputs, outputs, TO_FLOATS
    )
    functions.baton_close(team)
    return hashlib.blake2b(sums.numpy().tobytes(), digest_size=3).hexdigest()
