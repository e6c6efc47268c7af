"""How much of a text may be the beginning of a marker that is still to come. Pure."""

from __future__ import annotations


def held_suffix(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker`, without being all of it."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0
