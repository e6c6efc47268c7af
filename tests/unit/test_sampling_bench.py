"""The sampling bench: the same tokens from both, or nothing."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from torch import Tensor

from kernels.sampling import ReferenceSampler, RowSampling
from loadtest.sampling import CELLS, Figure, measure, text_of


def test_both_draw_the_same_tokens_and_take_time() -> None:
    logits = torch.randn(2, 500, generator=torch.Generator().manual_seed(1))
    for cell in CELLS:
        assert all(seconds >= 0 for seconds in measure(cell, logits, [ReferenceSampler(), ReferenceSampler()], 2))


def test_other_tokens_are_no_figures() -> None:
    class Wrong(ReferenceSampler):
        def sample(self, logits: Tensor, rows: list[RowSampling]) -> list[int]:  # type: ignore[override]
            return [0] * len(rows)

    with pytest.raises(ValueError, match="greedy: the samplers draw different tokens"):
        measure(CELLS[0], torch.tensor([[0.0, 1.0]]), [ReferenceSampler(), Wrong()], 1)


def test_the_table_has_ratios() -> None:
    figures = [asdict(Figure("top-k 50", 49152, 2e-5, 5e-4))]
    text = text_of({"machine": {"cpu": "x", "date": "today"}, "level": "avx2", "figures": figures})
    assert text.splitlines()[-1].split() == ["49152", "top-k", "50", "20.0", "500.0", "25.0x"]
