"""The C kernels against plain torch at odd sizes, between guards, on every level, with any number of threads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.activation import silu_mul
from kernels.native.abi import TO_ELEMENTS, TO_FLOATS, TO_GATED, TO_SUM
from kernels.native.compiler import NativeUnavailable
from kernels.native.library import Team
from kernels.native.model import GroupPlan, require_runnable
from kernels.native.packed import PackedLinear, linear
from kernels.norm import rms_norm
from kernels.rotary import rotary, rotary_table
from kernels.rotary.frequencies import plain
from shared.engine.native_check import NativeCheck
from shared.model.config import parse_config
from tests.native import DTYPES, LEVEL_NAMES, Guarded, library_at, team_of, token_at
from tests.native_models import make_model, make_plan, packed, rand
from tests.unit.test_model_config import PLAIN

# relative to the sum of the magnitudes of all products
TOLERANCE = {torch.bfloat16: 1e-6, torch.float32: 5e-7}
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-22}
LINEAR_SHAPES = [(1, 1), (2, 31), (3, 33), (63, 32), (64, 100), (385, 70), (577, 64), (1000, 17)]
HEADS = [(4, 2, 16), (3, 3, 32), (6, 2, 64), (7, 1, 48), (8, 1, 80), (2, 2, 128), (9, 3, 20), (2, 1, 256)]


@pytest.fixture(params=LEVEL_NAMES)
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def team(level: str) -> Team:
    return team_of(level, 2)


def product(team: Team, x: Tensor, weight: PackedLinear, kind: int = TO_FLOATS, before: float = 0.0) -> Tensor:
    """One product between guards."""
    width = weight.struct.out_features // 2 if kind == TO_GATED else weight.struct.out_features
    dtype = x.dtype if kind in (TO_ELEMENTS, TO_GATED) else torch.float32
    inputs, y = Guarded.of(x), Guarded(len(x), width, dtype=dtype, fill=before if kind == TO_SUM else float("nan"))
    linear(team, inputs.tensor, weight, kind, y.tensor)
    inputs.check()
    y.check()
    return y.tensor


# ------------------------------------------------------------------------------------------------------------- linear


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", LINEAR_SHAPES, ids=str)
def test_linear_is_the_exact_product(team: Team, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    in_features, out_features = shape
    first = rand(0, out_features // 2, in_features).to(dtype)
    second = rand(1, out_features - len(first), in_features).to(dtype)
    parts, biases = [first, second], [rand(2, len(first)), rand(3, len(second))]
    x = rand(4, 26, in_features).to(dtype)
    whole, bias = torch.cat(parts).double(), torch.cat(biases).double()
    exact = x.double() @ whole.T
    bound = TOLERANCE[dtype] * (x.double().abs() @ whole.abs().T + 1)
    assert ((product(team, x, packed(team, parts, [])) - exact).abs() <= bound).all()
    biased = packed(team, parts, biases)
    assert ((product(team, x, biased) - (exact + bias)).abs() <= 2 * bound).all()
    assert ((product(team, x, biased, TO_SUM, before=2.5) - (exact + bias + 2.5)).abs() <= 4 * bound).all()
    elements = product(team, x, biased, TO_ELEMENTS)
    assert torch.equal(elements, product(team, x, biased).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 15, 16, 17, 100])
def test_gated_products_are_silu_times_up(team: Team, dtype: torch.dtype, width: int) -> None:
    gate, up = rand(0, width, 70).to(dtype), rand(1, width, 70).to(dtype)
    biases = [rand(2, width), rand(3, width)]
    x = rand(4, 14, 70).to(dtype)
    result = product(team, x, packed(team, [gate, up], biases, gated=True), TO_GATED)
    sums = [x.double() @ w.double().T + b.double() for w, b in zip((gate, up), biases, strict=True)]
    expected = silu_mul(torch.cat(sums, dim=1))
    torch.testing.assert_close(result.double(), expected, rtol=ROUNDING[dtype], atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(576, 96), (385, 70)], ids=str)
def test_linear_rows_do_not_depend_on_their_company(level: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    in_features, out_features = shape
    weight = packed(team_of(level, 1), [rand(0, out_features, in_features).to(dtype)], [rand(1, out_features)])
    x = rand(2, 400, in_features).to(dtype)
    alone = torch.cat([product(team_of(level, 1), x[i : i + 1], weight) for i in range(400)])
    for threads in (1, 2, 3):
        for count in (*range(1, 28), 64, 191, 192, 193, 400):
            first = (count * 7) % (401 - count)
            rows = product(team_of(level, threads), x[first : first + count], weight)
            assert torch.equal(rows, alone[first : first + count]), (count, threads)


def test_neighbouring_nans_and_infinities_stay_where_they_are(team: Team) -> None:
    weight = packed(team, [torch.ones(40, 64, dtype=torch.bfloat16)], [])
    x = torch.ones(13, 64, dtype=torch.bfloat16)
    x[4, 63], x[7, 0] = float("nan"), float("inf")
    y = product(team, x, weight)
    assert y[4].isnan().all()
    assert y[7].isinf().all()
    assert (y[[i for i in range(13) if i not in (4, 7)]] == 64).all()


@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_rounding_to_bfloat16_is_to_nearest_even(level: str) -> None:
    bits = torch.tensor([0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800000], dtype=torch.int32)
    bits = torch.cat((bits, torch.randint(0x30000000, 0x4F000000, (500,), dtype=torch.int32)))
    values = torch.cat((bits.view(torch.float32), -bits.view(torch.float32), torch.tensor([float("nan"), 0.0, -0.0])))
    weight = packed(team_of(level, 1), [torch.zeros(len(values), 2, dtype=torch.bfloat16)], [values])
    result = product(team_of(level, 1), torch.zeros(1, 2, dtype=torch.bfloat16), weight, TO_ELEMENTS)[0]
    torch.testing.assert_close(result, values.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)


# ------------------------------------------------------------------------------------------------- norm, rotary, store


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 15, 16, 33, 576])
def test_norm(team: Team, dtype: torch.dtype, size: int) -> None:
    x, weight = Guarded.of(rand(0, 5, size) * 3), Guarded.of(rand(1, size))
    y = Guarded(5, size, dtype=dtype)
    pointers = (x.tensor.data_ptr(), weight.tensor.data_ptr(), y.tensor.data_ptr())
    team.call("baton_norm", dtype, *pointers, 5, size, 1e-5)
    for guarded in (x, weight, y):
        guarded.check()
    expected = rms_norm(x.tensor.double(), weight.tensor.double(), 1e-5)
    torch.testing.assert_close(y.tensor.double(), expected, rtol=2 * ROUNDING[dtype], atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_rotary_and_store(team: Team, dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    q_heads, kv_heads, head_dim = heads
    model = make_model(team, dtype, heads)
    pool = Guarded(5, 1, 2, kv_heads, 16, head_dim, dtype=dtype)
    qkv = Guarded.of(rand(0, 9, q_heads + 2 * kv_heads, head_dim).to(dtype))
    before = qkv.tensor.clone()
    plan = make_plan(model, pool.tensor, [(13, 6), (0, 3)], [[2, 4], [1]], unstored=1)
    model.rotate(qkv.tensor, plan)
    pool.check()
    qkv.check()
    positions = torch.tensor([13, 14, 15, 16, 17, 18, 0, 1, 2])
    rotated = before.float()
    rotary(rotated[:, : q_heads + kv_heads], rotary_table(plain(head_dim, 10000.0), 1200, dtype)[positions])
    expected = rotated.to(dtype)
    torch.testing.assert_close(qkv.tensor[:, :q_heads], expected[:, :q_heads], rtol=ROUNDING[dtype], atol=1e-6)
    written = torch.zeros(5, 16, dtype=torch.bool)
    for row, (block, offset) in enumerate([(2, 13), (2, 14), (2, 15), (4, 0), (4, 1), (4, 2), (1, 0), (1, 1), (1, 2)]):
        if row in (0, 6):
            continue
        written[block, offset] = True
        kv = torch.cat(token_at(pool.tensor, block, offset))
        torch.testing.assert_close(kv, expected[row, q_heads:], rtol=ROUNDING[dtype], atol=1e-6)
        assert torch.equal(kv[kv_heads:], before[row, q_heads + kv_heads :])
    for block, offset in (~written).nonzero().tolist():
        assert torch.cat(token_at(pool.tensor, block, offset)).isnan().all(), (block, offset)


# ---------------------------------------------------------------------------------------------------------- whole steps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(50, 70, 4, 2, 16), (96, 100, 6, 1, 20), (33, 17, 3, 3, 32)], ids=str)
def test_whole_steps_at_odd_sizes(level: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    raw = PLAIN | dict(zip(names, sizes, strict=True)) | {"vocab_size": 77}
    assert NativeCheck(parse_config(raw, Path("config.json")), dtype, library_at(level)).difference() is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sweep_needs_rows(team: Team, dtype: torch.dtype) -> None:
    model = make_model(team, dtype, (4, 2, 16))
    model.sweep(13, 0)
    model.sweep(200, 1)  # no head: not swept
    for rows, head_rows in ((0, 0), (1, 2), (-1, -1)):
        with pytest.raises(ValueError, match="lengths"):
            model.sweep(rows, head_rows)


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("lengths", "tables", "words"),
    [
        ([(0, 3)], [[9]], "block table"),
        ([(0, 3)], [[-1]], "block table"),
        ([(30, 3)], [[0]], "block table"),
        ([(1198, 3)], [[0] * 40], "position"),
    ],
    ids=["a block outside", "a negative block", "too few blocks", "beyond the context"],
)
def test_a_plan_that_reaches_outside_is_refused(
    team: Team, lengths: list[tuple[int, int]], tables: list[list[int]], words: str
) -> None:
    model = make_model(team, torch.bfloat16, (4, 2, 16))
    pool = torch.full((5, 1, 2, 2, 32, 16), 7.0, dtype=torch.bfloat16)
    positions = torch.arange(lengths[0][0], sum(lengths[0]))
    count = len(positions)
    nothing = torch.empty(0, dtype=torch.int64)
    with pytest.raises(ValueError, match=words):
        model.step(
            torch.zeros(count, dtype=torch.int64),
            positions,
            [0, count],
            [sum(lengths[0])],
            nothing,
            [GroupPlan(tables, [0] * count)],
            [pool],
        )
    assert (pool == 7.0).all()


@pytest.mark.parametrize(
    ("token", "slot", "row", "words"),
    [
        (8, 0, [], "token"),
        (-1, 0, [], "token"),
        (0, 160, [], "slot"),
        (0, -2, [], "slot"),
        (0, 0, [1], "no token"),
        (0, 0, [0], "without its head"),
    ],
)
def test_numbers_outside_are_refused(team: Team, token: int, slot: int, row: list[int], words: str) -> None:
    model = make_model(team, torch.bfloat16, (4, 2, 16))
    pool = torch.full((5, 1, 2, 2, 32, 16), 7.0, dtype=torch.bfloat16)
    tokens, rows = torch.tensor([token]), torch.tensor(row, dtype=torch.int64)
    with pytest.raises(ValueError, match=words):
        model.step(tokens, torch.tensor([0]), [0, 1], [1], rows, [GroupPlan([[0]], [slot])], [pool])
    assert (pool == 7.0).all()


def test_what_the_library_cannot_run_is_refused() -> None:
    with pytest.raises(NativeUnavailable, match="float64"):
        require_runnable(torch.float64, 16)
    with pytest.raises(NativeUnavailable, match="not 18"):
        require_runnable(torch.float32, 18)
