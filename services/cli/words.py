"""Words the commands share, so that the same thing is said the same way everywhere. Pure; standard library only."""

from __future__ import annotations

from collections.abc import Iterable

NO_STACK = "no stack is running; start one with ./baton up"


def sentence(summary: str) -> str:
    """The one-line summary of a command in a list, as the first sentence of its own help."""
    return f"{summary[:1].upper()}{summary[1:]}."


def processes(name: str, known: Iterable[str]) -> list[str]:
    """The processes that a name on a command line means, in the order of `known`: the one that is called so, else those
    whose names go on with a number or a pool. `decode` means `decode-1` and `decode-large-2`."""
    found = list(known)
    return [name] if name in found else [process for process in found if process.startswith(f"{name}-")]
