"""Sampling of one row in numpy: single-threaded sums, so a draw does not depend on the thread count."""

from __future__ import annotations

import math

import numpy as np

from kernels.sampling.noise import NOISE_MAX, NOISE_MIN, Floats, Ids, gumbel, gumbel_all

NO_TOKEN = -1
"""Drawn from a row whose largest logit, as given, adjusted or over the temperature, is not finite."""
_FIRST_CANDIDATES = 256
_MAX_GAP = NOISE_MAX - NOISE_MIN
"""A token further than this below the best cannot win, whatever its noise."""


def greedy(logits: Floats) -> int:
    return int(np.argmax(logits))


def greedy_rows(logits: Floats) -> list[int]:
    """Per row the lowest id of the largest value; -1 where that is not finite. A NaN counts as the largest."""
    best = logits.argmax(axis=1)
    return [token if math.isfinite(logits[row, token]) else -1 for row, token in enumerate(best.tolist())]


def sample(
    logits: Floats, temperature: float, top_k: int, top_p: float, seed: int, position: int, min_p: float = 0.0
) -> int:
    with np.errstate(over="ignore"):
        scaled = logits / np.float32(temperature)
        if temperature < 1.0:  # which can take a value past float32
            np.minimum(scaled, np.finfo(np.float32).max, out=scaled)
        top = scaled.max()
        if top == -np.inf:
            return NO_TOKEN
        scaled -= top
    ids = survivors(scaled, top_k, top_p, min_p)
    if ids is None:
        ids = np.flatnonzero(scaled >= -_MAX_GAP)
        if len(ids) > len(scaled) // 4:
            return int(np.argmax(scaled + gumbel_all(seed, position, len(scaled))))
    return int(ids[np.argmax(scaled[ids] + gumbel(seed, position, ids))])


def survivors(scaled: Floats, top_k: int, top_p: float, min_p: float = 0.0) -> Ids | None:
    """Token ids left by top-k, then top-p, then min-p, ascending; None if none of them filters.

    Args:
        scaled: logits over temperature, minus their maximum.
    """
    kept = _largest_mass(scaled, top_k, top_p)
    if min_p <= 0.0:
        return kept
    ids = np.arange(len(scaled)) if kept is None else kept
    near = np.flatnonzero(scaled[ids].astype(np.float64) >= np.log(min_p))
    return np.take(ids, near)


def _largest_mass(scaled: Floats, top_k: int, top_p: float) -> Ids | None:
    """As `survivors`, without min-p."""
    k = top_k if 0 < top_k < len(scaled) else 0
    kept = _top_k(scaled, k) if k else None
    if top_p >= 1.0:
        return kept
    if kept is not None:
        return np.sort(kept[_nucleus(scaled[kept], top_p)])
    return np.sort(_nucleus(scaled, top_p))


def _top_k(scaled: Floats, k: int) -> Ids:
    """Exactly k ids, ascending: the largest values, ties at the k-th value to the lowest ids."""
    threshold = np.partition(scaled, len(scaled) - k)[len(scaled) - k]
    above = np.flatnonzero(scaled > threshold)
    tied = np.flatnonzero(scaled == threshold)[: k - len(above)]
    return np.sort(np.concatenate((above, tied)))


def _nucleus(scaled: Floats, top_p: float) -> Ids:
    """Indices of the smallest set of largest values whose probability reaches `top_p`, at least one."""
    weights = np.exp(scaled.astype(np.float64))
    target = top_p * weights.sum()
    count = min(_FIRST_CANDIDATES, len(scaled))
    while True:
        order = _largest(scaled, count)
        mass = np.cumsum(weights[order])
        if mass[-1] >= target or count == len(scaled):
            needed = int(np.searchsorted(mass, target, side="left")) + 1
            return order[: min(needed, len(order))]
        count = min(count * 8, len(scaled))


def _largest(scaled: Floats, count: int) -> Ids:
    """At least `count` indices of the largest values, in order of (value descending, index ascending)."""
    if count == len(scaled):
        return np.argsort(-scaled, kind="stable")
    threshold = np.partition(scaled, len(scaled) - count)[len(scaled) - count]
    ids = np.flatnonzero(scaled >= threshold)
    return ids[np.argsort(-scaled[ids], kind="stable")]
