"""Which implementation each operation uses, chosen once at start.

Knows names and what the machine offers; knows nothing about models or settings files.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from kernels.linear import onednn
from kernels.native.build import NativeUnavailable
from kernels.native.library import NativeLibrary, open_library

log = logging.getLogger(__name__)

CHOICES = ("auto", "torch", "native", "reference")


class UnknownKernels(ValueError):
    """The setting names no set of kernels of this build."""


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """One implementation name per operation that has more than one, or a library that does whole steps."""

    linear: str
    native: NativeLibrary | None = None

    @property
    def build(self) -> str:
        """Short id of this choice, part of the `numerics` id."""
        return f"native-{self.native.id}" if self.native else f"torch-{self.linear}"


def choose(setting: str, folder: Path | None = None) -> KernelChoice:
    """The kernels for a setting.

    Args:
        setting: "reference" is plain torch, "torch" the fastest of torch's own, "native" the C library, or "torch" with
            one line of warning where it cannot be had; "auto" is "torch".
        folder: where "native" keeps what it builds.

    Raises:
        UnknownKernels: `setting` is not one of `CHOICES`.
    """
    if setting not in CHOICES:
        raise UnknownKernels(f"no kernels named {setting!r}; this build has {', '.join(CHOICES)}")
    if setting == "reference":
        return KernelChoice(linear="reference")
    linear = "onednn" if onednn.is_available() else "reference"
    if setting == "native":
        assert folder is not None, "native kernels need a folder to be kept in"
        try:
            return KernelChoice(linear, open_library(folder))
        except NativeUnavailable as exc:
            log.warning("%s; torch computes instead, more slowly", exc)
    return KernelChoice(linear)
