"""Which device computes and which implementation each operation uses, chosen once at start.

Knows names and what the machine offers; knows nothing about models or settings files.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.linear import onednn
from kernels.native.compiler import NativeUnavailable
from kernels.native.library import NativeLibrary, open_library
from kernels.tile_layouts import LANES16, ROWS

log = logging.getLogger(__name__)

CHOICES = ("auto", "torch", "native", "reference", "triton")
DEVICES = ("auto", "cpu", "cuda")
OLDEST_CAPABILITY = (8, 0)
"""Of a card: bfloat16 products and asynchronous copies begin there."""


class UnknownKernels(ValueError):
    """The setting names no set of kernels of this build."""


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """One implementation name per operation that has more than one, or a library that does whole steps."""

    linear: str
    native: NativeLibrary | None = None
    triton: str = ""  # the build of the Triton kernels, which then compute all but plain matrix products

    @property
    def build(self) -> str:
        """Short id of this choice, part of the `numerics` id."""
        if self.triton:
            return f"triton-{self.triton}-{self.linear}"
        return f"native-{self.native.id}" if self.native else f"torch-{self.linear}"

    @property
    def tile_layout(self) -> str:
        """How these kernels lay out the tiles of a KV pool."""
        return LANES16 if self.native else ROWS


def choose(setting: str, folder: Path | None = None) -> KernelChoice:
    """The kernels for a setting.

    Args:
        setting: "reference" is plain torch, "torch" the fastest of torch's own, "native" and "auto" the C library, or
            "torch" with one line of warning where it cannot be had.
        folder: where the C library is kept; not needed for the others.

    Raises:
        UnknownKernels: `setting` is not one of `CHOICES`, or is "triton" where neither a card nor Triton's interpreter
            (TRITON_INTERPRET=1) can run it.
    """
    if setting not in CHOICES:
        raise UnknownKernels(f"no kernels named {setting!r}; this build has {', '.join(CHOICES)}")
    if setting == "triton":
        return _triton()
    if setting == "reference":
        return KernelChoice(linear="reference")
    linear = "onednn" if onednn.is_available() else "reference"
    if setting in ("auto", "native"):
        assert folder is not None, "native kernels need a folder to be kept in"
        try:
            return KernelChoice(linear, open_library(folder))
        except NativeUnavailable as exc:
            log.warning("%s; torch computes instead, more slowly", exc)
    return KernelChoice(linear)


def choose_device(setting: str) -> tuple[str, str]:
    """What computes, "cuda" or "cpu", and in a few words why not the GPU; "" where that was the choice.

    Args:
        setting: "cpu", "cuda", or "auto" for the GPU where there is one that these kernels run on.

    Raises:
        ValueError: `setting` is not one of `DEVICES`.
    """
    if setting not in DEVICES:
        raise ValueError(f"no device named {setting!r}; there are {', '.join(DEVICES)}")
    if setting == "cpu":
        return "cpu", ""
    why = _missing_for_cuda()
    return ("cpu", why) if why else ("cuda", "")


def _missing_for_cuda() -> str:
    if not torch.cuda.is_available():
        built = torch.version.cuda
        return "this build of torch has no CUDA" if built is None else "torch sees no CUDA card"
    capability, name = torch.cuda.get_device_capability(), torch.cuda.get_device_name()
    if capability < OLDEST_CAPABILITY:
        has, needs = ("sm_{}{}".format(*pair) for pair in (capability, OLDEST_CAPABILITY))
        return f"{name} is {has}, kernels need {needs} or newer"
    return "" if importlib.util.find_spec("triton") else "the package triton is not installed"


def _triton() -> KernelChoice:
    if importlib.util.find_spec("triton") is None:
        raise UnknownKernels("kernels 'triton': the package triton is not installed")
    import triton

    interpreted = bool(triton.knobs.runtime.interpret)
    if why := "" if interpreted else _missing_for_cuda():
        raise UnknownKernels(f"kernels 'triton': {why}")
    where = "interpreted" if interpreted else "sm_{}{}".format(*torch.cuda.get_device_capability())
    build = f"{triton.__version__}-{where}-{triton_digest()}"
    return KernelChoice("reference" if interpreted else "cublas", triton=build)


def triton_digest(folder: Path = Path(__file__).parent) -> str:
    """16 hex digits of all that decides what the Triton kernels under `folder` compute: sources, launches, tuning."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted([*folder.glob("*.py"), *folder.glob("*/triton_*.py"), *folder.glob("*/tuning_*.json")]):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
