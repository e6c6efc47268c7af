"""The C kernels' attention against float64, in any chunks and company, with blocks of its own or shared."""

from __future__ import annotations

import itertools

import pytest
import torch

from kernels.native.library import Team
from tests.native import DTYPES, LEVEL_NAMES, team_of
from tests.native_models import Cache, Shared, make_model, make_plan

HEADS = [(4, 2, 16), (3, 3, 32), (14, 2, 64), (7, 1, 48), (8, 1, 80), (5, 5, 96), (2, 2, 128), (9, 3, 20), (13, 1, 256)]


@pytest.fixture(params=LEVEL_NAMES)
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def team(level: str) -> Team:
    return team_of(level, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "seq_len"), [*((heads, 513) for heads in HEADS), *((HEADS[2], n) for n in (1, 33, 64, 65))], ids=str
)
def test_attention_matches_the_textbook(
    team: Team, dtype: torch.dtype, heads: tuple[int, int, int], seq_len: int
) -> None:
    cache = Cache(make_model(team, dtype, heads), seq_len)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 5e-6
    torch.testing.assert_close(cache.attend(0, seq_len).double(), cache.textbook(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_chunking_gives_the_same_bits(level: str, dtype: torch.dtype, threads: int) -> None:
    cache = Cache(make_model(team_of(level, 1), dtype, (6, 2, 32)), 1100)
    whole = cache.attend(0, 1100)
    model = make_model(team_of(level, threads), dtype, (6, 2, 32))
    for chunks in ([1, 1099], [64] * 17 + [12], [15, 16, 17, 1052], [512, 512, 76], [130] * 8 + [60], [700, 1, 2, 397]):
        ends = list(itertools.accumulate(chunks))
        parts = [cache.attend(end - chunk, end, model) for chunk, end in zip(chunks, ends, strict=True)]
        assert torch.equal(torch.cat(parts), whole), chunks
    for position in (*range(0, 1100, 37), 1099):
        assert torch.equal(cache.attend(position, position + 1, model)[0], whole[position]), position
    for first in (505, 1018):  # verification rows on both sides of a split
        assert torch.equal(cache.attend(first, first + 8, model), whole[first : first + 8])


@pytest.mark.parametrize("group", [12, 100])
def test_many_query_heads_of_one_kv_head(level: str, group: int) -> None:
    cache = Cache(make_model(team_of(level, 2), torch.bfloat16, (group, 1, 16)), 600)
    whole = cache.attend(0, 600)
    torch.testing.assert_close(whole.double(), cache.textbook(), rtol=0, atol=2e-2)
    assert torch.equal(torch.cat([cache.attend(0, 593), cache.attend(593, 599), cache.attend(599, 600)]), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neighbours_change_nothing(team: Team, dtype: torch.dtype) -> None:
    model = make_model(team, dtype, (6, 2, 32))
    cache, other = Cache(model, 900), Cache(model, 900, seed=1)
    pool = torch.cat((cache.pool, other.pool))
    other_table = [block + len(cache.pool) for block in other.table]
    # (first row, rows): decodes, pieces and verification rows, all in one step
    mine = [(0, 1), (40, 1), (63, 2), (255, 1), (300, 3), (511, 1), (512, 1), (640, 200), (899, 1)]
    rows, lengths = [], []
    for i, (first, count) in enumerate(mine):
        rows += [cache.q[first : first + count], other.q[i * 90 : i * 90 + i + 1]]
        lengths += [(first, count), (i * 90, i + 1)]
    plan = make_plan(model, pool, lengths, [cache.table, other_table] * len(mine))
    result = model.attention(torch.cat(rows), plan)
    begin = 0
    for (first, count), (_, neighbours) in zip(mine, lengths[1::2], strict=True):
        assert torch.equal(result[begin : begin + count], cache.attend(first, first + count)), (first, count)
        begin += count + neighbours


@pytest.mark.parametrize("block_size", [16, 64, 128, 1024])
def test_block_size_does_not_enter_the_result(team: Team, block_size: int) -> None:
    model = make_model(team, torch.bfloat16, (6, 2, 32))
    expected = Cache(model, 600).attend(0, 600)
    assert torch.equal(Cache(model, 600, block_size).attend(0, 600), expected)


def test_later_tokens_of_the_sequence_do_not_reach_an_earlier_step(team: Team) -> None:
    cache = Cache(make_model(team, torch.bfloat16, (6, 2, 32)), 600)
    expected = cache.attend(100, 130)
    for block in cache.table[5:]:
        cache.pool[block] = float("inf")
    assert torch.equal(cache.attend(100, 130), expected)


def test_very_unequal_scores(team: Team) -> None:
    cache = Cache(make_model(team, torch.float32, (6, 2, 32)), 300)
    cache.q *= 100
    torch.testing.assert_close(cache.attend(0, 300).double(), cache.textbook(), rtol=0, atol=2e-4)


def test_a_query_that_is_not_a_number_gives_none(team: Team) -> None:
    cache = Cache(make_model(team, torch.bfloat16, (6, 2, 32)), 100)
    cache.q[50, 3] = float("nan")
    result = cache.attend(0, 100)
    assert result[50, 3].isnan().all()
    assert result.isnan().sum() == result.shape[2]


# ------------------------------------------------------------------------------------------------------ shared prefixes


PREFIXES = [
    [(0, 0, 1537), (1504, 0, 1530), (1504, 0, 1505), (1504, 1, 1521), (1024, 2, 1100), (480, 0, 481), (0, 0, 700)],
    [(0, 0, 600), (512, 0, 513), (512, 0, 600), (512, 1, 640), (544, 0, 560), (64, 3, 90), (32, 3, 33)],
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(2, 2, 32), (7, 1, 64), (13, 1, 16)], ids=str)
@pytest.mark.parametrize("prefixes", PREFIXES, ids=["three splits", "one split and some"])
def test_sharing_blocks_changes_no_bit(
    level: str, dtype: torch.dtype, heads: tuple[int, int, int], prefixes: list[tuple[int, int, int]]
) -> None:
    shared = Shared(make_model(team_of(level, 1), dtype, heads, 1600), prefixes)
    steps = [(i, rows) for i in range(len(prefixes)) for rows in (1, 1, 3, 8)]
    alone = [shared.attend([step])[0] for step in steps]
    for threads in (1, 3):
        model = make_model(team_of(level, threads), dtype, heads, 1600)
        for chosen in (range(len(steps)), range(0, len(steps), 4), range(len(steps) - 1, -1, -3)):
            together = shared.attend([steps[i] for i in chosen], model)
            for i, result in zip(chosen, together, strict=True):
                assert torch.equal(result, alone[i]), (steps[i], threads)


def test_what_is_shared_is_read_once() -> None:
    team = team_of("avx512_bf16", 1)
    model = make_model(team, torch.bfloat16, (14, 2, 64), 1600)
    shared = Shared(model, [(0, 0, 1537), *[(1504, 0, 1530)] * 7])
    everyone = [(i, 1) for i in range(8)]
    places = [(shared.lengths[i] - 1, 1) for i, _ in everyone]
    used = sum(shared.lengths)
    assert model.keys_read(make_plan(model, shared.pool, places, shared.tables)) == used - 7 * 1504
    own = [[j + 100 * i for j in range(49)] for i in range(8)]
    wide = torch.empty(800, 1, 2, 2, 32, 64, dtype=torch.bfloat16)
    assert model.keys_read(make_plan(model, wide, places, own)) == used
