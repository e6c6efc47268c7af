"""From logits rows to tokens, sequence by sequence."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels.sampling import NO_TOKEN, Adjustment, ReferenceSampler, RowSampling, Sampler, WantedLogprobs, greedy_rows
from shared.contracts.logprobs import TokenLogprob
from shared.contracts.sampling import SamplingParams
from shared.engine.step_plan import ScheduledSequence
from shared.grammar.row_masks import NO_MASKS, ConstrainedRow

Masks = NDArray[np.uint32]
"""[rows, ceil(vocab_size / 32)]: bit i % 32 of word i // 32 is set for token i."""
Mask = NDArray[np.uint32]
"""One row of it."""
REFERENCE = ReferenceSampler()


def constrained_rows(
    sequences: Sequence[ScheduledSequence], tokens: Sequence[Sequence[int]], skip: frozenset[int]
) -> list[ConstrainedRow]:
    """The sequences of a step that sample under a grammar; arguments as of `sample_sequences`."""
    found = []
    for i, sequence in enumerate(sequences):
        params = sequence.sampling
        if params is None or not params.grammar or i in skip:
            continue
        prompt = sequence.num_prompt_tokens
        output = (*sequence.history[prompt:], *tokens[i][max(0, prompt - sequence.start) :])
        more = sequence.num_sampled - 1  # rows before the last
        outputs = tuple(output[: len(output) - more + j] for j in range(more + 1))
        found.append(ConstrainedRow(i, sequence.seq_id, params.grammar, outputs))
    return found


def row_sampling(params: SamplingParams, position: int, adjustment: Adjustment | None = None) -> RowSampling:
    """How the row that draws the token at absolute `position` is sampled."""
    return RowSampling(
        params.temperature,
        params.top_k,
        params.top_p,
        params.seed & (2**64 - 1),
        position,
        params.min_p,
        adjustment,
    )


def row_adjustment(sequence: ScheduledSequence, tokens: Sequence[int], mask: Mask | None = None) -> Adjustment | None:
    """What is done to the logits of a sequence's row; None: nothing.

    Args:
        tokens: those of the step up to the row, in-flight ones filled in.
        mask: what its grammar allows.
    """
    params = sequence.sampling
    if params is None or not (params.penalizes or params.logit_bias or sequence.banned or mask is not None):
        return None
    seen = (*sequence.history[:], *tokens) if params.penalizes else ()
    prompt = sequence.num_prompt_tokens
    bias = dict(params.logit_bias) | dict.fromkeys(sequence.banned, -math.inf)
    return Adjustment(
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        prompt_ids=seen[:prompt],
        output_ids=seen[prompt:],
        bias=bias,
        mask=mask,
    )


def sample_sequences(
    logits: Tensor,
    sequences: Sequence[ScheduledSequence],
    ranges: Sequence[range],
    skip: frozenset[int],
    tokens: Sequence[Sequence[int]],
    masks: Mapping[int, Masks] = NO_MASKS.bits,
    sampler: Sampler = REFERENCE,
) -> tuple[tuple[tuple[int, ...], ...], frozenset[int]]:
    """One token per row that a sequence samples from, and the indices of sequences that got () for a reason.

    Those are `skip` and the ones with a row that counts whose largest logit, as given or adjusted, is not finite. Rows
    behind a wrong guess do not count: see `ScheduledSequence.that_count`.

    Args:
        logits: [num_logit_rows, vocab_size] float32 or float64.
        ranges: per sequence its rows of `logits`, its last tokens' in order.
        skip: indices of sequences that get () whatever they ask for.
        tokens: per sequence those of the step, in-flight ones filled in.
        masks: of the rows of each sequence that samples under a grammar.
    """
    indices: list[int] = []
    rows: list[RowSampling] = []
    counts: list[int] = []
    for i, (sequence, span) in enumerate(zip(sequences, ranges, strict=True)):
        params = sequence.sampling
        if params is None or i in skip:
            counts.append(0)
            continue
        span = span[len(sequence.scored) :]
        # the row at position t draws the token at t + 1
        first = len(sequence.token_ids) - len(span) + 1
        indices.extend(span)
        row_masks: Sequence[Mask | None] = masks[i] if i in masks else [None] * len(span)  # type: ignore[assignment]
        for end, mask in zip(range(first, first + len(span)), row_masks, strict=True):
            adjustment = row_adjustment(sequence, tokens[i][:end], mask)
            rows.append(row_sampling(params, sequence.start + end, adjustment))
        counts.append(len(span))
    picked = logits if len(indices) == logits.shape[0] else logits[indices]
    drawn = iter(sampler.sample(picked, rows))
    sampled = [
        sequence.that_count(tuple(itertools.islice(drawn, count))) if count else ()
        for sequence, count in zip(sequences, counts, strict=True)
    ]
    bad = {i for i, found in enumerate(sampled) if NO_TOKEN in found}
    return tuple(() if i in bad else found for i, found in enumerate(sampled)), skip | bad


def logprobs_of(
    logits: Tensor,
    sequences: Sequence[ScheduledSequence],
    ranges: Sequence[range],
    sampled: Sequence[Sequence[int]],
    skip: frozenset[int],
    sampler: Sampler = REFERENCE,
) -> Mapping[int, tuple[TokenLogprob, ...]]:
    """Log-probabilities for the sequences that ask, as `StepOutput` wants them. Arguments as of `sample_sequences`."""
    wanted: list[WantedLogprobs] = []
    counts: dict[int, int] = {}
    for i, (sequence, span) in enumerate(zip(sequences, ranges, strict=True)):
        top = -1 if sequence.sampling is None else sequence.sampling.logprobs
        if i in skip or (top < 0 and not sequence.scored):
            continue
        asked = [(token, sequence.score_top) for token in sequence.scored]
        asked += [(token, top) for token in sampled[i]] if top >= 0 else []
        wanted.extend((span.start + row, token, count) for row, (token, count) in enumerate(asked))
        counts[i] = len(asked)
    if not wanted:
        return {}
    told = iter([TokenLogprob(own, tuple(best)) for own, best in sampler.logprobs(logits, wanted)])
    return {i: tuple(itertools.islice(told, count)) for i, count in counts.items()}


def sample_greedily(
    logits: Tensor, sequences: Sequence[ScheduledSequence], ranges: Sequence[range], skip: frozenset[int]
) -> tuple[tuple[tuple[int, ...], ...], frozenset[int]]:
    """As `sample_sequences` where all that sample are greedy, and the indices of sequences that got () for a reason.

    Those are `skip` and the ones with a row whose largest logit is not finite. Where minus infinity stands for what
    is not the largest, it is the largest that tells.
    """
    best = greedy_rows(logits)
    drawn = [
        sequence.that_count(tuple(best[span.start : span.stop]))
        for sequence, span in zip(sequences, ranges, strict=True)
    ]
    bad = skip
    if min(best, default=0) < 0:
        bad |= {i for i, tokens in enumerate(drawn) if min(tokens, default=0) < 0}
    tokens = tuple(
        () if sequence.sampling is None or i in bad else tokens
        for i, (sequence, tokens) in enumerate(zip(sequences, drawn, strict=True))
    )
    return tokens, bad
