"""Durations and sizes as people read them. Pure."""

from __future__ import annotations


def seconds(value: float) -> str:
    """A duration in at most 7 characters."""
    if value < 0.0995:
        return f"{value * 1000:.1f}ms"
    return f"{value * 1000:.0f}ms" if value < 0.9995 else f"{value:.2f}s" if value < 100 else f"{value:.0f}s"


def size(num_bytes: int) -> str:
    """A number of bytes in at most 9 characters."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f}{unit}"
    return f"{num_bytes}B"


def count(number: int, noun: str) -> str:
    """`1 block`, `3 blocks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
