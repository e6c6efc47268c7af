"""Words the commands share, so that the same thing is said the same way everywhere. Pure; standard library only."""

from __future__ import annotations

NO_STACK = "no stack is running; start one with ./baton up"


def sentence(summary: str) -> str:
    """The one-line summary of a command in a list, as the first sentence of its own help."""
    return f"{summary[:1].upper()}{summary[1:]}."
