"""Attention over keys and values of 8-bit integers: against float64 of what they stand for, and the same bits."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from kernels.native.library import Team
from kernels.store_kv.reference import LEAST_TOP, dequantize, quantize
from shared.engine.native_check import NativeCheck
from shared.model.config import parse_config
from tests.native import DTYPES, LEVEL_NAMES, library_at, put_token, scales_of, team_of, token_at
from tests.native_models import Cache, Shared, make_model, make_plan, rand
from tests.unit.test_model_config import PLAIN

HEADS = [(14, 2, 64), (7, 1, 48), (5, 5, 96), (9, 3, 20), (13, 1, 256)]


@pytest.fixture(params=LEVEL_NAMES)
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def team(level: str) -> Team:
    return team_of(level, 2)


def integers(team: Team, dtype: torch.dtype, heads: tuple[int, int, int], seq_len: int, seed: int = 0) -> Cache:
    return Cache(make_model(team, dtype, heads), seq_len, seed=seed, kv=torch.int8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "seq_len"), [*((heads, 513) for heads in HEADS), *((HEADS[0], n) for n in (1, 33, 65))], ids=str
)
def test_attention_matches_the_textbook(
    team: Team, dtype: torch.dtype, heads: tuple[int, int, int], seq_len: int
) -> None:
    cache = integers(team, dtype, heads, seq_len)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-3
    torch.testing.assert_close(cache.attend(0, seq_len).double(), cache.textbook(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_chunking_gives_the_same_bits(level: str, dtype: torch.dtype) -> None:
    cache = integers(team_of(level, 1), dtype, (14, 2, 32), 1100)
    whole = cache.attend(0, 1100)
    model = make_model(team_of(level, 3), dtype, (14, 2, 32))
    for chunks in ([1, 1099], [15, 16, 17, 1052], [512, 512, 76], [700, 1, 2, 397]):
        ends = list(itertools.accumulate(chunks))
        parts = [cache.attend(end - chunk, end, model) for chunk, end in zip(chunks, ends, strict=True)]
        assert torch.equal(torch.cat(parts), whole), chunks
    for position in (*range(0, 1100, 97), 511, 512, 1099):
        assert torch.equal(cache.attend(position, position + 1, model)[0], whole[position]), position
    for first in (505, 1018):  # verification rows on both sides of a split
        assert torch.equal(cache.attend(first, first + 8, model), whole[first : first + 8])


PREFIXES = [
    (0, 0, 1537),
    (1504, 0, 1530),
    (1504, 0, 1505),
    (1504, 1, 1521),
    (1024, 2, 1100),
    (480, 0, 481),
    (0, 0, 700),
]


@pytest.mark.parametrize("heads", [(2, 2, 32), (7, 1, 64), (13, 1, 16)], ids=str)
def test_sharing_blocks_changes_no_bit(level: str, heads: tuple[int, int, int]) -> None:
    shared = Shared(make_model(team_of(level, 1), torch.bfloat16, heads, 1600), PREFIXES, kv=torch.int8)
    steps = [(i, rows) for i in range(len(PREFIXES)) for rows in (1, 3, 8)]
    alone = [shared.attend([step])[0] for step in steps]
    model = make_model(team_of(level, 3), torch.bfloat16, heads, 1600)
    for chosen in (range(len(steps)), range(0, len(steps), 3), range(len(steps) - 1, -1, -2)):
        together = shared.attend([steps[i] for i in chosen], model)
        for i, result in zip(chosen, together, strict=True):
            assert torch.equal(result, alone[i]), steps[i]


@pytest.mark.parametrize("block_size", [16, 128])
def test_block_size_does_not_enter_the_result(team: Team, block_size: int) -> None:
    model = make_model(team, torch.bfloat16, (6, 2, 32))
    expected = Cache(model, 600, kv=torch.int8).attend(0, 600)
    assert torch.equal(Cache(model, 600, block_size, kv=torch.int8).attend(0, 600), expected)


def test_later_tokens_of_the_sequence_do_not_reach_an_earlier_step(team: Team) -> None:
    cache = integers(team, torch.bfloat16, (6, 2, 32), 600)
    expected = cache.attend(100, 130)
    for block in cache.table[5:]:
        cache.pool[block] = -128
        scales_of(cache.pool)[block] = float("inf")
    assert torch.equal(cache.attend(100, 130), expected)


def test_very_unequal_scores_and_values(team: Team) -> None:
    cache = integers(team, torch.float32, (6, 2, 32), 300)
    cache.q *= 100
    for position in range(0, 300, 3):
        place = (cache.table[position // 32], position % 32)
        put_token(cache.pool, *place, cache.k[position], cache.v[position] * 1e-3)
    torch.testing.assert_close(cache.attend(0, 300).double(), cache.textbook(), rtol=0, atol=2e-2)


@pytest.mark.parametrize("what", ["query", "key", "value"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_finite_number_shows(team: Team, what: str, value: float) -> None:
    cache = integers(team, torch.bfloat16, (6, 2, 32), 100)
    if what == "query":
        cache.q[50, 3] = value
    else:
        vectors = cache.k if what == "key" else cache.v
        vectors[50, 1, 7] = value
        put_token(cache.pool, cache.table[50 // 32], 50 % 32, cache.k[50], cache.v[50])
    result = cache.attend(0, 100)
    seen = torch.zeros(100, 6, dtype=torch.bool)
    if what == "query":
        seen[50, 3] = True
    else:
        seen[50:, 3:] = True  # the heads of that KV head, from that token on
    assert torch.equal(~result.isfinite().all(2), seen)
    assert torch.equal(~result.isfinite().any(2), seen)


def test_vectors_of_zeros_and_of_tiny_numbers(team: Team) -> None:
    cache = integers(team, torch.float32, (6, 2, 32), 40)
    for position in range(40):
        k, v = (torch.full((2, 32), size) for size in ((0.0, 1e-38) if position % 2 else (1e-33, 0.0)))
        put_token(cache.pool, cache.table[position // 32], position % 32, k, v)
    assert torch.equal(cache.attend(0, 40), torch.zeros(40, 6, 32))


# ------------------------------------------------------------------------------------------------------------- storing


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 2, 64), (3, 1, 20)], ids=str)
def test_tokens_are_stored_as_the_reference_quantizes_them(
    level: str, dtype: torch.dtype, heads: tuple[int, int, int]
) -> None:
    q_heads, kv_heads, head_dim = heads
    model = make_model(team_of(level, 2), dtype, heads)
    cache = Cache(model, 40, block_size=16, kv=torch.int8)
    qkv = rand(0, 20, q_heads + 2 * kv_heads, head_dim).to(dtype)
    qkv[3, q_heads] = 0
    qkv[4, q_heads + kv_heads, 0] = float("nan")
    qkv[5, q_heads + kv_heads] = 1e30
    other = Cache(model, 40, block_size=16, seed=1, kv=torch.int8)  # of other contents, written over
    other.table = cache.table
    model.rotate(qkv, make_plan(model, other.pool, [(13, 20)], [cache.table], unstored=1))
    other.guarded.check()
    for row in range(1, 20):
        position = 13 + row
        place = (cache.table[position // 16], position % 16)
        # keys as they left the rotation lie in qkv: what is stored is compared bit for bit
        keys, values = qkv[row, q_heads : q_heads + kv_heads], qkv[row, q_heads + kv_heads :]
        for found, (whole, scales) in zip(
            token_at(other.pool, *place), (quantize(keys), quantize(values)), strict=True
        ):
            assert torch.equal(found.nan_to_num(7.0), dequantize(whole, scales).nan_to_num(7.0)), row


def test_rounding_is_to_half_a_unit_and_zeros_are_exact() -> None:
    x = rand(0, 50, 64) * torch.logspace(-30, 30, 50)[:, None]
    whole, scales = quantize(x)
    assert whole.abs().amax() == 127
    assert ((dequantize(whole, scales) - x).abs() <= scales[:, None] * 0.5001).all()
    whole, scales = quantize(torch.zeros(2, 8))
    assert not whole.any()
    assert scales.tolist() == pytest.approx([LEAST_TOP / 127] * 2)


# --------------------------------------------------------------------------------------------------------- whole steps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whole_steps_at_odd_sizes(level: str, dtype: torch.dtype) -> None:
    sizes = {"hidden_size": 96, "intermediate_size": 100, "num_attention_heads": 6, "num_key_value_heads": 1}
    config = parse_config(PLAIN | sizes | {"head_dim": 20, "vocab_size": 77}, Path("config.json"))
    assert NativeCheck(config, dtype, library_at(level), kv_dtype="int8").difference() is None


def test_a_head_whose_sums_would_not_fit_is_refused(team: Team) -> None:
    cache = integers(team, torch.float32, (1, 1, 516), 3)
    with pytest.raises(ValueError, match="pool"):
        cache.attend(0, 3)
