"""One line of the bench: an operation at a shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Case:
    """What is timed, made when its turn comes so that its memory is not held before.

    `make` returns the call and its peers by name, each a call of the same work.
    """

    operation: str
    shape: str
    bytes: float  # the fewest that must be read and written
    flops: float
    make: Callable[[], tuple[Callable[[], object], dict[str, Callable[[], object]]]]
    float8: bool = False  # some chips have none


@dataclass(frozen=True, slots=True)
class Measured:
    """A case's result."""

    operation: str
    shape: str
    seconds: float
    bytes: float
    flops: float
    share: float  # of the limit that binds
    bound: str  # "copy" or "matmul"
    peers: dict[str, float] = field(default_factory=dict)  # seconds
    failed: dict[str, str] = field(default_factory=dict)  # peers that do not run, and why
