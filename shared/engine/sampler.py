"""From logits rows to tokens, sequence by sequence."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kernels.sampling import RowSampling, greedy_rows, sample
from shared.contracts.sampling import SamplingParams
from shared.engine.step_plan import ScheduledSequence


def row_sampling(params: SamplingParams, position: int) -> RowSampling:
    """How the row that draws the token at absolute `position` is sampled."""
    return RowSampling(params.temperature, params.top_k, params.top_p, params.seed & (2**64 - 1), position)


def sample_sequences(
    logits: Tensor, sequences: Sequence[ScheduledSequence], ranges: Sequence[range], skip: frozenset[int]
) -> tuple[tuple[int, ...], ...]:
    """One token per logits row of every sequence that samples.

    Args:
        logits: [num_logit_rows, vocab_size] float32 or float64.
        ranges: per sequence its rows of `logits`, its last tokens' in order.
        skip: indices of sequences that get () whatever they ask for.
    """
    indices: list[int] = []
    rows: list[RowSampling] = []
    counts: list[int] = []
    for i, (sequence, span) in enumerate(zip(sequences, ranges, strict=True)):
        params = sequence.sampling
        if params is None or i in skip:
            counts.append(0)
            continue
        # the row at position t draws the token at t + 1
        first = sequence.start + len(sequence.token_ids) - len(span) + 1
        indices.extend(span)
        rows.extend(row_sampling(params, first + j) for j in range(len(span)))
        counts.append(len(span))
    picked = logits if len(indices) == logits.shape[0] else logits[indices]
    tokens = iter(sample(picked, rows))
    return tuple(tuple(next(tokens) for _ in range(count)) for count in counts)


def sample_greedily(
    logits: Tensor, sequences: Sequence[ScheduledSequence], ranges: Sequence[range], skip: frozenset[int]
) -> tuple[tuple[tuple[int, ...], ...], frozenset[int]]:
    """As `sample_sequences` where all that sample are greedy, and the indices of sequences that got () for a reason.

    Those are `skip` and the ones with a row whose largest logit is not finite. Where minus infinity stands for what
    is not the largest, it is the largest that tells.
    """
    best = greedy_rows(logits)
    bad = skip
    if min(best, default=0) < 0:
        bad |= {i for i, span in enumerate(ranges) if any(best[row] < 0 for row in span)}
    tokens = tuple(
        () if sequence.sampling is None or i in bad else tuple(best[span.start : span.stop])
        for i, (sequence, span) in enumerate(zip(sequences, ranges, strict=True))
    )
    return tokens, bad
