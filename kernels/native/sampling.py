"""Rows of logits sampled by the library, and their log-probabilities: what `kernels.sampling` gives, in less time."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.native.abi import LogprobsStruct, RowStruct, SamplingStruct
from kernels.native.library import Team
from kernels.sampling import GREEDY_BELOW, Adjustment, RowLogprobs, RowSampling, WantedLogprobs

_ROW = np.dtype(RowStruct)
_NO_PENALTIES = (1.0, 0.0, 0.0)

EVERY_LOGIT = 2**31
LEAST_MIN_P = 0.02
"""Shares below it leave more logits than a quick head is of use for."""
MIN_P_LOGITS = 20
"""What a draw by min-p alone counts for: it takes about as many blocks of the real head."""


def logits_looked_at(row: RowSampling) -> int:
    """How many of its row's largest logits a draw can look at; EVERY_LOGIT where that is not known beforehand."""
    if row.adjustment is not None:
        return EVERY_LOGIT
    if row.temperature < GREEDY_BELOW:
        return 1
    if row.top_k > 0:
        return row.top_k
    return MIN_P_LOGITS if row.top_p >= 1.0 and row.min_p >= LEAST_MIN_P else EVERY_LOGIT


class NativeSampler:
    """As `kernels.sampling.ReferenceSampler`, on a team's threads; not while the team is in another call."""

    def __init__(self, team: Team) -> None:
        self._team = team

    def sample(self, logits: Tensor, rows: Sequence[RowSampling]) -> list[int]:
        """As `kernels.sampling.sample`, of float32 logits.

        Raises:
            ValueError: an adjustment names a token outside the vocabulary, or its mask is of another size. Nothing was
                drawn.
            MemoryError: there is no memory for it.
        """
        _check(logits)
        assert logits.shape[0] == len(rows), (logits.shape, len(rows))
        plan = _RowArrays(rows, logits.shape[1])
        tokens = np.empty(len(rows), dtype=np.int64)
        struct = SamplingStruct(
            logits.data_ptr(), plan.rows.ctypes.data, tokens.ctypes.data, len(rows), logits.shape[1]
        )
        self._team.call_plain("baton_sample", ctypes.byref(struct))
        return tokens.tolist()

    def logprobs(self, logits: Tensor, wanted: Sequence[WantedLogprobs]) -> list[RowLogprobs]:
        """As `kernels.sampling.tell_logprobs`, of float32 logits.

        Raises:
            ValueError: a row or a token that is not there. Nothing was computed.
            MemoryError: there is no memory for it.
        """
        _check(logits)
        num_rows, vocab = logits.shape
        asked = np.array([(row, token, min(top, vocab)) for row, token, top in wanted], dtype=np.int64).reshape(-1, 3)
        rows, tokens, tops = np.ascontiguousarray(asked.T)
        most = int(tops.max(initial=0))
        values = np.empty((len(wanted), 1 + most), dtype=np.float64)
        ids = np.empty((len(wanted), most), dtype=np.int64)
        arrays = (rows, tokens, tops, values, ids)
        addresses = [array.ctypes.data for array in arrays]
        struct = LogprobsStruct(logits.data_ptr(), *addresses, len(wanted), num_rows, vocab, most)
        self._team.call_plain("baton_logprobs_of", ctypes.byref(struct))
        told: list[RowLogprobs] = []
        for (own, *best), line, top, row in zip(
            values.tolist(), ids.tolist(), tops.tolist(), rows.tolist(), strict=True
        ):
            pairs = [pair for pair in zip(line[:top], best, strict=False) if pair[0] >= 0]
            told.append((own, pairs + _impossible(logits[row], top - len(pairs))))
        return told


def _impossible(row: Tensor, count: int) -> list[tuple[int, float]]:
    """The first `count` tokens that cannot be, which the library does not list; of them a row has at least so many."""
    if count == 0:
        return []
    return [(token_id, -math.inf) for token_id in np.flatnonzero(np.isneginf(row.numpy()))[:count].tolist()]


def _check(logits: Tensor) -> None:
    assert logits.ndim == 2
    assert logits.dtype == torch.float32, logits.dtype
    assert logits.is_contiguous()
    assert logits.device.type == "cpu", logits.device


def row_fields(
    row: RowSampling,
    pointers: tuple[int, int, int, int] = (0, 0, 0, 0),
    counts: tuple[int, int, int] = (0, 0, 0),
    penalties: tuple[float, float, float] = _NO_PENALTIES,
) -> tuple[float, ...]:
    """The fields of a RowStruct, in order; pointers, counts and penalties are of an adjustment's arrays."""
    return (
        row.seed & (2**64 - 1),
        row.position & (2**64 - 1),
        row.top_p,
        float(np.log(row.min_p)) if row.min_p > 0.0 else -math.inf,
        *pointers,
        *counts,
        row.top_k,
        row.temperature if row.temperature >= GREEDY_BELOW else 0.0,
        *penalties,
    )


class _RowArrays:
    """How rows are sampled, as the library reads it. Keeps what it points to."""

    def __init__(self, rows: Sequence[RowSampling], vocab: int) -> None:
        self._kept: list[NDArray[np.generic]] = []
        self._vocab = vocab
        self.rows = np.array([self._row(row) for row in rows], dtype=_ROW)

    def _row(self, row: RowSampling) -> tuple[float, ...]:
        if row.adjustment is None:
            return row_fields(row)
        return row_fields(row, *self._adjustment(row.adjustment))

    def _adjustment(
        self, given: Adjustment
    ) -> tuple[tuple[int, int, int, int], tuple[int, int, int], tuple[float, float, float]]:
        """Addresses of tokens said, biased, their biases and the mask; how many are said, of them in the prompt, and
        biased; penalties."""
        penalties = (given.repetition, given.presence, given.frequency)
        said: tuple[int, ...] = () if penalties == _NO_PENALTIES else (*given.prompt_ids, *given.output_ids)
        prompt = min(len(given.prompt_ids), len(said))
        biased = self._keep(np.array(tuple(given.bias), dtype=np.int64))
        biases = self._keep(np.array(tuple(given.bias.values()), dtype=np.float32))
        addresses = self._keep(np.array(said, dtype=np.int64)), biased, biases, self._mask(given)
        return addresses, (len(said), prompt, len(given.bias)), penalties

    def _mask(self, given: Adjustment) -> int:
        """The address of the tokens that may be drawn; 0: all."""
        words = -(-self._vocab // 32)
        mask = given.mask
        if mask is not None and (mask.shape != (words,) or mask.dtype != np.uint32):
            raise ValueError(f"a mask of {mask.shape} {mask.dtype} for {self._vocab} tokens")
        if given.allowed is not None:
            bits = np.zeros(words * 32, dtype=np.uint8)
            bits[list(given.allowed)] = 1
            allowed = np.packbits(bits, bitorder="little").view(np.uint32)
            mask = allowed if mask is None else allowed & mask
        return 0 if mask is None else self._keep(np.ascontiguousarray(mask))

    def _keep(self, array: NDArray[np.generic]) -> int:
        self._kept.append(array)
        return array.ctypes.data
