"""One kernel for one chip: its content's name, and what the compiled code takes."""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kernels.aot.assembly import Loop, product_loop, tool
from kernels.aot.launches import Recorded

_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True, slots=True)
class Resources:
    """What a thread or block of a compiled kernel takes."""

    registers: int  # per thread
    spilled: int  # bytes per thread that do not fit the registers
    shared: int  # bytes per block
    loop: Loop


def content_id(launch: Recorded, chip: tuple[int, int]) -> str:
    """32 hex digits of all that decides the compiled code: sources, types, constants, options, chip, compiler."""
    parts: list[Any] = [triton.__version__, chip, launch.signature, launch.constants, launch.attributes, launch.options]
    parts += sorted(_sources(launch.kernel, {}).items())
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _sources(kernel: Any, found: dict[str, str]) -> dict[str, str]:
    """The source of a kernel and of what it calls. Where in a file it stands does not matter."""
    found[kernel.fn.__qualname__] = kernel.src
    for name in kernel.fn.__code__.co_names:
        used = kernel.fn.__globals__.get(name)
        if isinstance(used, JITFunction) and used.fn.__qualname__ not in found:
            _sources(used, found)
        elif isinstance(used, triton.language.constexpr):
            found[name] = repr(used)
    return found


def compile_launch(launch: Recorded, chip: tuple[int, int]) -> Resources:
    """Compile for a chip that need not be there.

    Raises:
        RuntimeError: the compiled file says nothing of its resources.
    """
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    target = GPUTarget("cuda", chip[0] * 10 + chip[1], 32)
    compiled = triton.compile(source, target=target, options=launch.options)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(compiled.asm["cubin"])
        told = subprocess.run(
            [tool("cuobjdump"), "-res-usage", file], capture_output=True, text=True, check=True
        ).stdout
    match = _RESOURCES.search(told)
    if match is None:
        raise RuntimeError(f"cuobjdump says nothing of {source.name}'s resources: {told!r}")
    registers, stack, _, local = map(int, match.groups())
    return Resources(registers, stack + local, compiled.metadata.shared, product_loop(compiled.asm["cubin"]))
