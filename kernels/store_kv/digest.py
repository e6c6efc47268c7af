"""The digest of a block's bytes that a GPU can take of its own pool: a sum, so that any order of adding gives it.

Every 4-byte word, with its place, goes through a bijection of 64 bits (the finalizer of SplitMix64: Steele et al.,
OOPSLA 2014) under two seeds, and the results are added. Not a secret and no proof against forgery: it catches a torn,
stale or misplaced copy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344)
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def span_sums(span: bytes | bytearray | memoryview) -> tuple[int, int]:
    """Two 64-bit sums of a span whose length is a multiple of 4: what `digest_blocks` says of it."""
    words = np.frombuffer(span, dtype="<u4").astype(np.uint64)
    places = np.arange(len(words), dtype=np.uint64) << np.uint64(32)
    first, second = (int(_mixed((places | words) ^ np.uint64(seed)).sum()) for seed in SEEDS)
    return first, second


def _mixed(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(SECOND)
    return z ^ (z >> np.uint64(31))
