"""Attention over keys and values of halves: the sums of float32 over the same values, whatever the element type."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from kernels.native.library import Team
from kernels.store_kv.reference import to_halves
from shared.engine.native_check import NativeCheck
from shared.model.config import parse_config
from tests.native import DTYPES, LEVEL_NAMES, library_at, put_token, team_of, token_at
from tests.native_models import Cache, Shared, make_model, make_plan, rand
from tests.unit.test_model_config import PLAIN

HEADS = [(14, 2, 64), (9, 3, 20)]
MORE_HEADS = [pytest.param(heads, marks=pytest.mark.long) for heads in ((7, 1, 48), (5, 5, 96), (13, 1, 256))]
HALF = torch.float16


@pytest.fixture(params=LEVEL_NAMES)
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def team(level: str) -> Team:
    return team_of(level, 2)


def halves(team: Team, dtype: torch.dtype, heads: tuple[int, int, int], seq_len: int) -> Cache:
    return Cache(make_model(team, dtype, heads), seq_len, kv=HALF)


@pytest.mark.parametrize("heads", HEADS + MORE_HEADS, ids=str)
def test_attention_is_that_of_float32_over_the_same_values(team: Team, heads: tuple[int, int, int]) -> None:
    """Bit for bit, to one rounding of what comes out: of chunks, of verification rows and of decodes."""
    plain = Cache(make_model(team, torch.float32, heads), 530)
    for position, (k, v) in enumerate(zip(plain.k, plain.v, strict=True)):
        place = (plain.table[position // 32], position % 32)
        put_token(plain.pool, *place, k.half().float(), v.half().float())
    for dtype in DTYPES:
        cache = halves(team, dtype, heads, 530)
        torch.testing.assert_close(cache.attend(0, 530).float(), plain.attend(0, 530), rtol=2**-8, atol=1e-6)
        for first, last in ((0, 530), (0, 33), (505, 513), (510, 511), (529, 530)):
            assert torch.equal(cache.attend(first, last), plain.attend(first, last).to(dtype)), (first, last)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seq_len", [1, 33, 65, 513])
def test_attention_matches_the_textbook(team: Team, dtype: torch.dtype, seq_len: int) -> None:
    cache = halves(team, dtype, HEADS[0], seq_len)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 5e-6
    torch.testing.assert_close(cache.attend(0, seq_len).double(), cache.textbook(), rtol=0, atol=tolerance)


def test_any_chunking_gives_the_same_bits(level: str) -> None:
    cache = halves(team_of(level, 1), torch.bfloat16, (14, 2, 32), 1100)
    whole = cache.attend(0, 1100)
    model = make_model(team_of(level, 3), torch.bfloat16, (14, 2, 32))
    for chunks in ([1, 1099], [15, 16, 17, 1052], [700, 1, 2, 397]):
        ends = list(itertools.accumulate(chunks))
        parts = [cache.attend(end - chunk, end, model) for chunk, end in zip(chunks, ends, strict=True)]
        assert torch.equal(torch.cat(parts), whole), chunks
    for position in (*range(0, 1100, 97), 511, 512, 1099):
        assert torch.equal(cache.attend(position, position + 1, model)[0], whole[position]), position
    for first in (505, 1018):  # verification rows on both sides of a split
        assert torch.equal(cache.attend(first, first + 8, model), whole[first : first + 8])


def test_sharing_blocks_changes_no_bit(level: str) -> None:
    prefixes = [(0, 0, 1537), (1504, 0, 1505), (1504, 1, 1521), (1024, 2, 1100), (480, 0, 481)]
    shared = Shared(make_model(team_of(level, 1), torch.bfloat16, (7, 1, 64), 1600), prefixes, kv=HALF)
    steps = [(i, rows) for i in range(len(prefixes)) for rows in (1, 3)]
    alone = [shared.attend([step])[0] for step in steps]
    model = make_model(team_of(level, 3), torch.bfloat16, (7, 1, 64), 1600)
    for step, result, wanted in zip(steps, shared.attend(steps, model), alone, strict=True):
        assert torch.equal(result, wanted), step


@pytest.mark.parametrize("block_size", [16, 128])
def test_block_size_does_not_enter_the_result(team: Team, block_size: int) -> None:
    model = make_model(team, torch.bfloat16, (6, 2, 32))
    expected = Cache(model, 600, kv=HALF).attend(0, 600)
    assert torch.equal(Cache(model, 600, block_size, kv=HALF).attend(0, 600), expected)


def test_later_tokens_of_the_sequence_do_not_reach_an_earlier_step(team: Team) -> None:
    cache = halves(team, torch.bfloat16, (6, 2, 32), 600)
    expected = cache.attend(100, 130)
    for block in cache.table[5:]:
        cache.pool[block] = float("inf")
    assert torch.equal(cache.attend(100, 130), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 2, 64), (3, 1, 20)], ids=str)
def test_tokens_are_stored_as_the_reference_rounds_them(
    level: str, dtype: torch.dtype, heads: tuple[int, int, int]
) -> None:
    """What is too large for a half becomes the largest one; a NaN or an infinity a NaN."""
    q_heads, kv_heads, head_dim = heads
    model = make_model(team_of(level, 2), dtype, heads)
    cache, other = (Cache(model, 40, block_size=16, seed=seed, kv=HALF) for seed in (0, 1))
    other.table = cache.table  # of other contents, written over
    qkv = rand(0, 20, q_heads + 2 * kv_heads, head_dim) * torch.logspace(-9, 9, 20)[:, None, None]
    values = qkv[:, q_heads + kv_heads :]
    strange = [float("nan"), float("inf"), float("-inf"), 65504.0, 65519.9, 65520.0, -7e4, 1e30, -0.0, 2.0**-25]
    for row, value in enumerate(strange, start=5):
        values[row, 0, row % head_dim] = value
    model.rotate(qkv, make_plan(model, other.pool, [(13, 20)], [cache.table], unstored=1))
    other.guarded.check()
    for row in range(1, 20):
        position = 13 + row
        found = token_at(other.pool, cache.table[position // 16], position % 16)
        # keys as they left the rotation lie in qkv
        for got, wanted in zip(found, (qkv[row, q_heads : q_heads + kv_heads], values[row]), strict=True):
            assert torch.equal(got.isnan(), ~wanted.isfinite()), row
            bits = [half.nan_to_num(7.0).view(torch.int16) for half in (got, to_halves(wanted))]
            assert torch.equal(*bits), row
    assert float(to_halves(torch.tensor(-7e4))) == -65504


@pytest.mark.parametrize("what", ["query", "key", "value"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_finite_number_shows(team: Team, what: str, value: float) -> None:
    cache = halves(team, torch.bfloat16, (6, 2, 32), 100)
    if what == "query":
        cache.q[50, 3] = value
    else:
        vectors = cache.k if what == "key" else cache.v
        vectors[50, 1, 7] = value
        put_token(cache.pool, cache.table[50 // 32], 50 % 32, to_halves(cache.k[50]), to_halves(cache.v[50]))
    result = torch.cat([cache.attend(0, 50), cache.attend(50, 100)])
    seen = torch.zeros(100, 6, dtype=torch.bool)
    if what == "query":
        seen[50, 3] = True
    else:
        seen[50:, 3:] = True  # the heads of that KV head, from that token on
    assert torch.equal(~result.isfinite().all(2), seen)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whole_steps_at_odd_sizes(level: str, dtype: torch.dtype) -> None:
    sizes = {"hidden_size": 96, "intermediate_size": 100, "num_attention_heads": 6, "num_key_value_heads": 1}
    config = parse_config(PLAIN | sizes | {"head_dim": 20, "vocab_size": 77}, Path("config.json"))
    assert NativeCheck(config, dtype, library_at(level), kv_dtype="float16").difference() is None
