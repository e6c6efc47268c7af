"""Log-probabilities of a row's tokens: of the logits as given, before penalties, temperature and filters."""

from __future__ import annotations

import numpy as np

from kernels.sampling.noise import Floats


def row_logprobs(logits: Floats, token_id: int, top: int) -> tuple[float, list[tuple[int, float]]]:
    """The log-probability of a token, and the `top` most likely (token id, log-probability), ties to the lowest id.

    None is above 0; a token that cannot be has minus infinity. Sums are float64 and single-threaded.

    Args:
        logits: [vocab_size] float32, the largest of them finite.
    """
    values = logits.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    count = min(top, len(values))
    if count < 1:
        return float(values[token_id]), []
    # of those at the threshold the lowest ids are wanted, and a partition would take any
    threshold = np.partition(logits, len(logits) - count)[len(logits) - count]
    ids = np.flatnonzero(logits >= threshold)
    best = ids[np.argsort(-logits[ids], kind="stable")][:count]
    return float(values[token_id]), [(int(i), float(values[i])) for i in best]
