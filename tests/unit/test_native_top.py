"""The quick head: the largest logits are found exactly, their equals too, and nothing larger is left out."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from kernels.linear.quantize import to_int8
from kernels.native.arena import Arena
from kernels.native.decode_step import DecodeStep
from kernels.native.library import Team
from kernels.native.model import QUICK_LOGITS, GroupPlan, NativeLayer, NativeModel, Shape
from kernels.native.packed import PackedLinear, pack_linear, pack_quick_head, packed_bytes
from kernels.native.sampling import EVERY_LOGIT, logits_looked_at
from kernels.rotary import rotary_table
from kernels.rotary.frequencies import plain
from kernels.sampling import Adjustment, RowSampling, sample
from tests.native import DTYPES, LEVEL_NAMES, team_of

HIDDEN, INNER, HEADS, SIZE = 96, 64, 4, 16


@pytest.fixture(params=LEVEL_NAMES)
def team(request: pytest.FixtureRequest) -> Team:
    return team_of(str(request.param), 2)


def rand(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(team: Team, dtype: torch.dtype, *parts: Tensor, gated: bool = False) -> PackedLinear:
    out = sum(len(part) for part in parts)
    arena = Arena(packed_bytes(out, parts[0].shape[1], dtype, gated))
    return pack_linear(team, arena, list(parts), [], dtype, gated)


class OneLayer:
    """A model of one random layer and the given head. Its tokens are rows of logits, computed in one step."""

    def __init__(
        self, team: Team, dtype: torch.dtype, head: Tensor, rows: int, quick: bool = True, final_norm: float = 1.0
    ) -> None:
        arena = Arena.plan()
        pack_quick_head(team, arena, head.to("meta"), dtype)
        found = pack_quick_head(team, Arena(arena.used), head, dtype) if quick else None
        width = HEADS * SIZE
        qkv, o = rand(1, 3 * width, HIDDEN), rand(2, HIDDEN, width)
        gate, up, down = rand(3, INNER, HIDDEN), rand(4, INNER, HIDDEN), rand(5, HIDDEN, INNER)
        layer = NativeLayer(
            torch.ones(HIDDEN),
            torch.ones(HIDDEN),
            packed(team, dtype, qkv),
            packed(team, dtype, o),
            packed(team, dtype, gate, up, gated=True),
            packed(team, dtype, down),
            0,
            0,
        )
        shape = Shape(HIDDEN, INNER, len(head), HEADS, HEADS, SIZE, 1e-5, SIZE**-0.5)
        table = rotary_table(plain(SIZE, 10000.0), 64, dtype)
        self.embedding = rand(6, len(head), HIDDEN)
        norm = torch.full((HIDDEN,), final_norm)
        self.model = NativeModel(
            team, dtype, shape, self.embedding, table, [layer], norm, packed(team, dtype, head), found
        )
        self.model.quick_rows = rows
        self.rows, self.dtype = rows, dtype

    def logits(self, top_only: bool, passing: bool = False) -> Tensor:
        rows = torch.arange(self.rows)
        pool = torch.zeros(2, 1, 2, HEADS, 32, SIZE, dtype=self.dtype)
        group = GroupPlan([[0, 1]], list(range(self.rows)))
        return self.model.step(rows, rows, [0, self.rows], [self.rows], rows, [group], [pool], top_only, passing)

    def draw(self, rows: list[RowSampling], looked_at: int) -> tuple[list[int], Tensor]:
        """The first tokens of so many sequences, and their logits."""
        pool = torch.zeros(len(rows), 1, 2, HEADS, 32, SIZE, dtype=self.dtype)
        step = DecodeStep(self.model, [pool], len(rows), 1)
        for i, row in enumerate(rows):
            step.sit(i, [[i]], row)
            step.place(i, i, row.position - 1, [[i]])
        return step.run(len(rows), looked_at), step.logits[: len(rows)].clone()


def check(found: Tensor, full: Tensor) -> Tensor:
    """What was computed has its very bits, and what was not is smaller than the largest. Returns what was computed."""
    computed = found != float("-inf")
    assert torch.equal(found[computed], full[computed])
    assert (full < full.amax(1, keepdim=True))[~computed].all()
    assert torch.equal(found.argmax(1), full.argmax(1))
    return computed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocab", "rows"), [(5003, 1), (5003, 13), (2048, 7), (31, 2)])
def test_the_largest_logit_is_exact(team: Team, dtype: torch.dtype, vocab: int, rows: int) -> None:
    for seed in range(3):
        model = OneLayer(team, dtype, rand(10 + seed, vocab, HIDDEN) / HIDDEN**0.5, rows)
        check(model.logits(top_only=True), model.logits(top_only=False))
        rechecks = model.model.rechecks
        assert rechecks.rows == rows
        assert 1 <= rechecks.blocks / rows <= -(-vocab // 32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_most_of_the_head_is_left_out(team: Team, dtype: torch.dtype) -> None:
    head = rand(0, 5003, HIDDEN) / HIDDEN**0.5
    head[::500] *= 3  # as a trained head: few tokens stand out
    model = OneLayer(team, dtype, head, 13)
    computed = check(model.logits(top_only=True), model.logits(top_only=False))
    assert computed.sum(1).float().mean() < 500
    assert model.model.rechecks.blocks * 32 >= int(computed.sum())
    assert model.model.rechecks.fallbacks == 0


def test_equal_logits_are_all_kept(team: Team) -> None:
    head = rand(0, 5003, HIDDEN) / HIDDEN**0.5
    plain_model = OneLayer(team, torch.bfloat16, head, 4)
    best = plain_model.logits(top_only=False).argmax(1)
    for row in range(4):
        head[5002 - row], head[40 + row] = head[best[row]], head[best[row]]
    model = OneLayer(team, torch.bfloat16, head, 4)
    model_full, found = model.logits(top_only=False), model.logits(top_only=True)
    check(found, model_full)
    for row in range(4):
        equal = model_full[row] == model_full[row].max()
        assert equal.sum() >= 2
        assert (found[row][equal] == model_full[row].max()).all()


def test_where_integers_cannot_tell_all_of_it_is_computed(team: Team) -> None:
    # outputs that differ by less than an integer's step: every one could be the largest
    head = rand(0, 1, HIDDEN).expand(3000, HIDDEN) + rand(1, 3000, HIDDEN) * 1e-3
    model = OneLayer(team, torch.float32, head.contiguous(), 5)
    full = model.logits(top_only=False)
    computed = check(model.logits(top_only=True), full)
    assert computed.all()
    assert model.model.rechecks.fallbacks == 5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e-19, 1e-24, 0.0])
def test_rows_whose_squares_vanish_have_bounds_too(team: Team, dtype: torch.dtype, scale: float) -> None:
    head = rand(0, 1, HIDDEN).expand(3000, HIDDEN) + rand(1, 3000, HIDDEN) * 1e-3
    model = OneLayer(team, dtype, head.contiguous(), 5, final_norm=scale)
    found, full = model.logits(top_only=True), model.logits(top_only=False)
    check(found, full)
    assert scale or torch.equal(found, full)


def test_a_weight_without_bound_is_not_left_out_of_a_row_of_zeros(team: Team) -> None:
    head = rand(0, 300, HIDDEN)
    head[200, 5] = float("inf")
    model = OneLayer(team, torch.float32, head, 2, final_norm=0.0)
    found, full = model.logits(top_only=True), model.logits(top_only=False)
    assert full[:, 200].isnan().all()
    assert torch.equal(found.isnan(), full.isnan())


def test_the_integers_alone_would_be_wrong() -> None:
    # were nothing computed again, these would choose otherwise: the recheck is what makes the result exact
    head, x = rand(0, 20000, HIDDEN), rand(1, 40, HIDDEN)
    wrong = (x @ to_int8(head).floats().T).argmax(1) != (x @ head.T).argmax(1)
    assert wrong.any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_never_left_out(team: Team, value: float) -> None:
    head = rand(0, 5003, HIDDEN) / HIDDEN**0.5
    head[3333, 5] = value
    model = OneLayer(team, torch.bfloat16, head, 3)
    full, found = model.logits(top_only=False), model.logits(top_only=True)
    assert not full[:, 3333].isfinite().any()
    torch.testing.assert_close(found[:, 3333], full[:, 3333], rtol=0, atol=0, equal_nan=True)


def test_a_row_that_is_not_finite_is_computed_whole(team: Team) -> None:
    head = rand(0, 5003, HIDDEN)
    head[::500] *= 3
    model = OneLayer(team, torch.bfloat16, head, 1)
    check(model.logits(top_only=True), model.logits(top_only=False))
    assert model.model.rechecks.fallbacks == 0
    model.embedding[0, 0] = float("nan")
    assert model.logits(top_only=True).isnan().all()
    assert model.model.rechecks.fallbacks == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_and_weights_whose_products_pass_float32_are_computed(team: Team, dtype: torch.dtype) -> None:
    head = rand(0, 2048, HIDDEN)
    head[500:1500] *= 1e20
    for scale in (1.0, 1e16, 1e19):
        model = OneLayer(team, dtype, head, 3, final_norm=scale)
        full, found = model.logits(top_only=False), model.logits(top_only=True)
        large = slice(0, 2048) if scale > 1 else slice(500, 1500)
        torch.testing.assert_close(found[:, large], full[:, large], rtol=0, atol=0, equal_nan=True)


def test_many_rows_are_computed_by_the_real_head(team: Team) -> None:
    model = OneLayer(team, torch.bfloat16, rand(0, 5003, HIDDEN), 7)
    model.model.quick_rows = 6
    assert torch.equal(model.logits(top_only=True), model.logits(top_only=False))
    assert model.model.rechecks.rows == 0


def test_without_a_quick_head_all_logits_are_there(team: Team) -> None:
    model = OneLayer(team, torch.bfloat16, rand(0, 5003, HIDDEN), 3, quick=False)
    assert torch.equal(model.logits(top_only=True), model.logits(top_only=False))
    assert model.model.rechecks.rows == 0


def test_only_passing_logits_are_overwritten_by_the_next(team: Team) -> None:
    model = OneLayer(team, torch.float32, rand(10, 700, HIDDEN), 3)
    kept, passing = model.logits(top_only=False), model.logits(top_only=False, passing=True)
    before = kept.clone()
    assert torch.equal(passing, kept)
    model.embedding.mul_(-1)
    model.rows = 2
    again = model.logits(top_only=False, passing=True)
    assert again.shape[0] == 2
    assert torch.equal(passing[:2], again)
    assert not torch.equal(again, before[:2])
    assert torch.equal(kept, before)


def rows_of(count: int, temperature: float, top_k: int, top_p: float = 1.0, min_p: float = 0.0) -> list[RowSampling]:
    return [RowSampling(temperature, top_k, top_p, 7 * i, 1, min_p) for i in range(count)]


def check_draws(model: OneLayer, rows: list[RowSampling]) -> int:
    """The same tokens with a quick head and without, and the same bits where it computed. Returns how many it left."""
    full_tokens, full = model.draw(rows, EVERY_LOGIT)
    before = model.model.rechecks.rows
    tokens, found = model.draw(rows, QUICK_LOGITS)
    assert model.model.rechecks.rows == before + len(rows)
    assert tokens == full_tokens == sample(full, rows)
    computed = found != float("-inf")
    assert torch.equal(found[computed], full[computed])
    return int((~computed).sum())


@cache
def some_stand_out(team: Team, dtype: torch.dtype) -> OneLayer:
    head = rand(0, 20011, HIDDEN) / HIDDEN**0.5
    head[::50] *= 3
    return OneLayer(team, dtype, head, 11)


DRAWS = [
    (1.0, 1),
    (0.7, 5),
    (1.0, 50),
    (1.9, 50, 0.8),
    (1.0, 0, 1.0, 0.1),
    (1.0, 50, 1.0, 0.3),
    (0.5, 20, 0.95, 0.2),
    (0.0, 0),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", DRAWS, ids=str)
def test_draws_that_look_at_few_logits_need_few(team: Team, dtype: torch.dtype, how: tuple[float, ...]) -> None:
    model, rows = some_stand_out(team, dtype), rows_of(11, how[0], int(how[1]), *how[2:])
    assert check_draws(model, rows) > 11 * 20011 / 2
    assert model.model.rechecks.fallbacks == 0


def test_a_share_of_the_largest_counts_all_of_them_though_some_are_no_draws(team: Team) -> None:
    """`top_p` is of the mass of all `top_k`, before `min_p` takes any of it: none of these may be left out."""
    model = some_stand_out(team, torch.bfloat16)
    for temperature in (1.0, 1.9):
        for top_p in (0.5, 0.7, 0.8, 0.9):
            for min_p in (0.1, 0.3, 0.5):
                check_draws(model, [RowSampling(temperature, 90, top_p, seed, 1, min_p) for seed in range(11)])


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_ties_at_the_last_of_the_largest_go_to_the_lowest_ids(team: Team, temperature: float) -> None:
    """Logits that are equal, and others that a division makes equal, stand around the k-th."""
    head = rand(0, 5003, HIDDEN) / HIDDEN**0.5
    ranked = OneLayer(team, torch.float32, head, 4).logits(top_only=False)[0].argsort(descending=True)
    for place in range(1, 60):
        head[ranked[place]] = head[ranked[place // 4]] * (1 + (place % 3) * 2.0**-23)
    model = OneLayer(team, torch.float32, head, 4)
    for top_k in (1, 2, 3, 5, 11, 40):
        for seed in range(8):
            check_draws(model, [RowSampling(temperature, top_k, 1.0, seed, 1)] * 4)


def test_draws_where_integers_cannot_tell_compute_all_of_it(team: Team) -> None:
    head = rand(0, 1, HIDDEN).expand(3000, HIDDEN) + rand(1, 3000, HIDDEN) * 1e-3
    model = OneLayer(team, torch.float32, head.contiguous(), 5)
    assert check_draws(model, rows_of(5, 1.0, 10)) == 0
    assert model.model.rechecks.fallbacks == 5


def test_more_largest_than_blocks_are_all(team: Team) -> None:
    model = OneLayer(team, torch.bfloat16, rand(0, 300, HIDDEN), 3)
    assert check_draws(model, rows_of(3, 1.0, 50)) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_draws_from_weights_that_are_not_finite_have_no_token(team: Team, value: float) -> None:
    head = rand(0, 5003, HIDDEN) / HIDDEN**0.5
    head[3333, 5] = value
    model = OneLayer(team, torch.bfloat16, head, 3)
    rows = rows_of(3, 1.0, 5)
    full = model.draw(rows, EVERY_LOGIT)[0]
    assert model.draw(rows, QUICK_LOGITS)[0] == full
    assert -1 in full


def test_many_looked_at_are_computed_by_the_real_head(team: Team) -> None:
    model = OneLayer(team, torch.bfloat16, rand(0, 5003, HIDDEN), 3)
    model.draw(rows_of(3, 1.0, 50), QUICK_LOGITS + 1)
    assert model.model.rechecks.rows == 0


def test_what_a_draw_looks_at() -> None:
    def looked_at(*how: float, adjustment: Adjustment | None = None) -> int:
        row = rows_of(1, *how)[0]  # type: ignore[arg-type]
        return logits_looked_at(RowSampling(row.temperature, row.top_k, row.top_p, 1, 1, row.min_p, adjustment))

    assert looked_at(0.0, 0) == looked_at(1e-9, 50, 0.5) == 1
    assert looked_at(1.0, 40, 0.9) == 40
    assert looked_at(1.0, 0, 1.0, 0.1) < QUICK_LOGITS
    for every in ((1.0, 0), (1.0, 0, 0.9), (1.0, 0, 0.9, 0.1), (1.0, 0, 1.0, 1e-6)):
        assert looked_at(*every) == EVERY_LOGIT > QUICK_LOGITS
    assert looked_at(0.0, 0, adjustment=Adjustment(presence=1.0)) == EVERY_LOGIT
