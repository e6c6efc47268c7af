"""Sampling by the C kernels: the tokens of the reference, whatever the row, at every level.

This also runs under sanitizers (tests/unit/test_native_build.py).
"""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.native.sampling import NativeSampler
from kernels.sampling import NO_TOKEN, Adjustment, RowSampling, sample, tell_logprobs
from tests.native import ALL_LEVELS, Guarded, team_of

EVERY_RUN = {ALL_LEVELS[0], "avx2", "neon"}
LEVELS = [name for name in ALL_LEVELS if name in EVERY_RUN]
NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=LEVELS)
def sampler(request: pytest.FixtureRequest) -> NativeSampler:
    return sampler_of(str(request.param))


def sampler_of(level: str, threads: int = 2) -> NativeSampler:
    return NativeSampler(team_of(level, threads))


def rand(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def drawn(sampler: NativeSampler, logits: Tensor, rows: list[RowSampling]) -> list[int]:
    """Tokens of rows that lie between NaN."""
    guarded = Guarded.of(logits)
    return sampler.sample(guarded.tensor, rows)


SETTINGS = [
    RowSampling(temperature, top_k, top_p, 2**63 + 977, 4100, min_p)
    for temperature, top_k, top_p, min_p in [
        (0.0, 0, 1.0, 0.0),
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 1.0, 0.0),
        (2.5, 0, 1.0, 0.0),
        (1e-6, 0, 1.0, 0.0),
        (1.0, 1, 1.0, 0.0),
        (1.3, 5, 1.0, 0.0),
        (1.0, 50, 0.9, 0.0),
        (1.0, 1300, 0.999, 0.0),
        (1.0, 10**6, 1.0, 0.0),
        (1.0, 0, 1e-9, 0.0),
        (0.6, 0, 0.5, 0.0),
        (1.0, 0, 0.95, 0.02),
        (1.5, 0, 0.999, 0.0),
        (1.0, 0, 1.0, 1.0),
        (1.0, 40, 0.99, 0.1),
    ]
]


@cache
def kinds(vocab: int) -> dict[str, Tensor]:
    """Rows of many kinds, each [vocab]."""
    some = rand(1, vocab)
    steps = torch.arange(vocab, dtype=torch.float32)
    masked = some.clone()
    masked[::2] = -INF
    one = torch.full((vocab,), -INF)
    one[vocab // 2] = -3.0
    return {
        "flat": torch.zeros(vocab),
        "random": some * 3,
        "wide": some * 30,
        "narrow": some * 1e-3,
        "ties": (some * 2).round(),
        "huge ties": (some.sign() * 1e9) + steps % 3,
        "ascending": steps / 50,
        "descending": -steps / 50,
        "masked": masked,
        "one survivor": one,
        "far from zero": some + 1e6,
        "largest": (some * 1e38).clamp(-3e38, 3e38),
        "zeros of both signs": torch.where(steps % 2 == 0, 0.0, -0.0),
        "denormal": some * 1e-42,
        "peaked": torch.where(steps == vocab - 1, 40.0, some),
    }


@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 65, 1000, 4999])
def test_tokens_are_those_of_the_reference(sampler: NativeSampler, vocab: int) -> None:
    for name, row in kinds(vocab).items():
        logits = row.expand(len(SETTINGS), vocab).contiguous()
        assert drawn(sampler, logits, SETTINGS) == sample(logits, SETTINGS), name


def test_random_rows_and_seeds(sampler: NativeSampler) -> None:
    pick = np.random.default_rng(7)
    for vocab in (777, 20011):
        rows = [
            RowSampling(
                float(pick.choice([0.3, 0.8, 1.0, 1.7])),
                int(pick.choice([0, 0, 3, 64, 700])),
                float(pick.choice([1.0, 1.0, 0.3, 0.9, 0.97])),
                int(pick.integers(2**64, dtype=np.uint64)),
                int(pick.integers(2**40)),
                float(pick.choice([0.0, 0.0, 0.01, 0.3])),
            )
            for _ in range(60)
        ]
        logits = rand(vocab, 60, vocab) * torch.linspace(0.1, 9, 60)[:, None]
        assert drawn(sampler, logits, rows) == sample(logits, rows)


def test_noise_is_that_of_the_golden_vectors(sampler: NativeSampler) -> None:
    """Of two tokens alone, the logit of one decides just where their noise says."""
    cases = json.loads(Path(__file__).parents[1].joinpath("golden", "sampling_noise.json").read_text())
    for case in cases:
        seed, position, ids = int(case["seed"]), int(case["position"]), case["token_ids"]
        for (i, a), (j, b) in itertools.combinations(enumerate(ids), 2):
            lead = case["gumbel"][i] - case["gumbel"][j]
            for offset, winner in ((-2e-6, a), (2e-6, b)):
                logits = torch.full((1, max(ids) + 1), -INF)
                logits[0, a], logits[0, b] = 0.0, lead + offset * max(1.0, abs(lead))
                assert sampler.sample(logits, [RowSampling(1.0, 0, 1.0, seed, position)]) == [winner]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_largest_have_no_token(sampler: NativeSampler, temperature: float) -> None:
    bad = [[NAN, 0.0, 0.0], [0.0, 0.0, NAN], [INF, 0.0, 1.0], [-INF] * 3, [0.0, NAN, INF]]
    rows = [RowSampling(temperature, 0, 1.0, 1, 1)] * len(bad)
    for width in (3, 200):
        logits = torch.tensor([line + [-1.0] * (width - 3) for line in bad])
        logits[3] = -INF
        assert drawn(sampler, logits, rows) == [NO_TOKEN] * len(bad) == sample(logits, rows)
    if temperature:
        tiny = [RowSampling(1e-6, 0, 1.0, 1, 1)] * 2  # takes values past float32
        large = torch.tensor([[-1e35, -2e35, -INF], [1e35, 2e35, 0.0]])
        assert drawn(sampler, large, tiny) == sample(large, tiny) == [NO_TOKEN, 0]  # the two largest are level
    good = torch.tensor([[-INF, -1e30, -INF]])
    assert drawn(sampler, good, rows[:1]) == [1]
    nothing = RowSampling(temperature, 0, 1.0, 1, 1, adjustment=Adjustment(allowed=frozenset()))
    # what a grammar forbids does not hide a fault
    hidden = RowSampling(temperature, 0, 1.0, 1, 1, adjustment=Adjustment(allowed=frozenset({1})))
    logits = torch.tensor([[0.0, 1.0, 2.0], [NAN, 1.0, 2.0]])
    assert drawn(sampler, logits, [nothing, hidden]) == [NO_TOKEN] * 2 == sample(logits, [nothing, hidden])


def bits(vocab: int, allowed: set[int]) -> np.ndarray:
    words = np.zeros(-(-vocab // 32), dtype=np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


@pytest.mark.parametrize("vocab", [45, 1000])
def test_adjustments_are_those_of_the_reference(sampler: NativeSampler, vocab: int) -> None:
    pick = np.random.default_rng(3)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(pick.integers(vocab, size=count).tolist())

    some = set(ids(20))
    adjustments = [
        Adjustment(repetition=1.3, prompt_ids=ids(30), output_ids=ids(40)),
        Adjustment(repetition=0.7, presence=-0.5, frequency=0.3, prompt_ids=ids(5), output_ids=ids(90)),
        Adjustment(frequency=1.7, output_ids=(vocab - 1,) * 7),
        Adjustment(presence=0.4),
        Adjustment(bias=dict.fromkeys(ids(9), -INF) | {0: 5.0, vocab - 1: -0.25}),
        Adjustment(allowed=frozenset(some)),
        Adjustment(mask=bits(vocab, some)),
        Adjustment(mask=bits(vocab, some), allowed=frozenset(list(some)[:3])),
        Adjustment(mask=bits(vocab, {vocab - 1})),
        Adjustment(2.0, 0.1, 0.2, ids(20), ids(20), {3: 1.0}, mask=bits(vocab, some | {3})),
    ]
    for seed, how in enumerate([(0.0, 0, 1.0), (1.0, 0, 1.0), (0.8, 10, 0.9), (1.0, 0, 0.7)]):
        rows = [RowSampling(*how, seed, 5 + i, 0.0, given) for i, given in enumerate(adjustments)]
        logits = rand(seed, len(rows), vocab) * 2
        before = logits.clone()
        assert drawn(sampler, logits, rows) == sample(logits, rows)
        assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "wrong",
    [
        Adjustment(bias={100: 1.0}),
        Adjustment(bias={-1: 1.0}),
        Adjustment(presence=1.0, output_ids=(100,)),
        Adjustment(presence=1.0, prompt_ids=(-1,)),
        Adjustment(mask=np.zeros(3, dtype=np.uint32)),
        Adjustment(mask=np.zeros(4, dtype=np.int64)),
    ],
)
def test_what_is_outside_of_the_vocabulary_is_refused(sampler: NativeSampler, wrong: Adjustment) -> None:
    rows = [RowSampling(1.0, 0, 1.0, 1, 1), RowSampling(1.0, 0, 1.0, 1, 1, 0.0, wrong)]
    with pytest.raises(ValueError, match=r"outside the vocabulary|a mask of"):
        sampler.sample(torch.zeros(2, 100), rows)


def test_a_row_depends_on_nothing_beside_it(sampler: NativeSampler) -> None:
    logits = rand(5, len(SETTINGS), 3001) * 4
    together = sampler.sample(logits, SETTINGS)
    assert together == [sampler.sample(logits[i : i + 1], [row])[0] for i, row in enumerate(SETTINGS)]
    assert sampler.sample(torch.empty(0, 50), []) == []
    # memory of a row serves the next, of another size
    assert sampler.sample(logits[:, :7].contiguous(), SETTINGS) == sample(logits[:, :7].contiguous(), SETTINGS)


def test_top_p_at_its_very_edge(sampler: NativeSampler) -> None:
    """Equal tokens reach the share exactly: what is not summed well enough is summed again."""
    for count in (4, 8, 512, 2048):
        logits = torch.full((1, 5000), -INF)
        logits[0, 100 : 100 + count] = 1.5
        for kept in (count // 4, count // 2, 3 * count // 4):
            rows = [RowSampling(1.0, 0, kept / count, 9, i) for i in range(40)]
            tokens = sampler.sample(logits.expand(40, 5000).contiguous(), rows)
            assert tokens == sample(logits.expand(40, 5000).contiguous(), rows)
            assert max(tokens) < 100 + kept


@pytest.mark.parametrize(("vocab", "top"), [(1, 1), (40, 0), (40, 5), (40, 90), (3000, 20), (3000, 2999)])
def test_logprobs_are_those_of_the_reference(sampler: NativeSampler, vocab: int, top: int) -> None:
    for name, row in kinds(vocab).items():
        if not row.max().isfinite():
            continue
        logits = torch.stack([row, row.flip(0)])
        wanted = [(1, 0, top), (0, vocab - 1, 0), (0, vocab // 2, top)]
        right, told = tell_logprobs(logits, wanted), sampler.logprobs(Guarded.of(logits).tensor, wanted)
        for (own, best), (right_own, right_best) in zip(told, right, strict=True):
            assert [token for token, _ in best] == [token for token, _ in right_best], name
            values = np.array([own, *(value for _, value in best)])
            np.testing.assert_allclose(values, [right_own, *(x for _, x in right_best)], rtol=1e-11, atol=1e-12)


def test_tokens_that_cannot_be_are_told_where_no_others_are_left(sampler: NativeSampler) -> None:
    logits = torch.full((2, 40), -INF)
    logits[0, 7], logits[1, :39] = 2.0, 1.0
    (own, best), (_, rest) = sampler.logprobs(logits, [(0, 7, 3), (1, 39, 40)])
    assert (own, best) == (0.0, [(7, 0.0), (0, -INF), (1, -INF)])
    assert len(rest) == 40
    assert rest[-1] == (39, -INF)


def test_logprobs_of_what_is_not_there_are_refused(sampler: NativeSampler) -> None:
    for wanted in ((2, 0, 1), (-1, 0, 1)):
        with pytest.raises(ValueError, match="no token"):
            sampler.logprobs(torch.zeros(2, 10), [wanted])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        sampler.logprobs(torch.zeros(2, 10), [(0, 10, 1)])
    assert sampler.logprobs(torch.zeros(2, 10), []) == []


@pytest.mark.parametrize(
    "level", [pytest.param(name, marks=[] if name in EVERY_RUN else pytest.mark.long) for name in ALL_LEVELS[1:]]
)
def test_levels_give_the_same_bits(level: str) -> None:
    logits = torch.stack([*kinds(4999).values()])
    wanted = [(i, 77, 30) for i in range(len(logits))]
    best, other = (sampler_of(name, 1) for name in (ALL_LEVELS[0], level))
    assert best.logprobs(logits, wanted) == other.logprobs(logits, wanted)
    for row in logits:
        rows = row.expand(len(SETTINGS), -1).contiguous()
        assert best.sample(rows, SETTINGS) == other.sample(rows, SETTINGS)


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0]])
    p, n = torch.softmax(logits[0].double(), 0).numpy(), 20000
    rows = [RowSampling(1.0, 0, 1.0, 5, i) for i in range(n)]
    counts = np.bincount(sampler_of(ALL_LEVELS[0]).sample(logits.expand(n, 8).contiguous(), rows), minlength=8)
    # the 99.99 % quantile of chi-square with 7 degrees of freedom; the draw is fixed, so this cannot flake
    assert float((((counts - n * p) ** 2) / (n * p)).sum()) < 29.9
    assert counts.sum() == n
