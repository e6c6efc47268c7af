"""Which implementation each operation uses, chosen once at start.

Knows names and what the machine offers; knows nothing about models or settings files.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.linear import onednn

CHOICES = ("auto", "reference")


class UnknownKernels(ValueError):
    """The setting names no set of kernels of this build."""


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """One implementation name per operation that has more than one."""

    linear: str

    @property
    def build(self) -> str:
        """Short id of this choice, part of the `numerics` id."""
        return f"torch-{self.linear}"


def choose(setting: str) -> KernelChoice:
    """The kernels for a setting: "reference" is plain torch, "auto" the fastest this machine has.

    Raises:
        UnknownKernels: `setting` is not one of `CHOICES`.
    """
    if setting not in CHOICES:
        raise UnknownKernels(f"no kernels named {setting!r}; this build has {', '.join(CHOICES)}")
    if setting == "auto" and onednn.is_available():
        return KernelChoice(linear="onednn")
    return KernelChoice(linear="reference")
