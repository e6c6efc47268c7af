"""Integer weights of the C kernels against plain arithmetic, at odd sizes, between guards, on every level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.activation import silu_mul
from kernels.linear.quantize import (
    INT8_GROUP,
    NONE,
    QUANTS,
    Int4Weight,
    Quant,
    Unquantizable,
    quantized_linear,
    quantized_rows,
    spread,
    to_int4,
    to_int8,
)
from kernels.native.abi import TO_ELEMENTS, TO_FLOATS, TO_GATED, TO_SUM
from kernels.native.arena import Arena
from kernels.native.cpu import machine_level
from kernels.native.library import Team
from kernels.native.packed import PackedLinear, linear, pack_linear, packed_bytes
from shared.engine.native_check import NativeCheck
from shared.model.config import parse_config
from tests.native import ALL_LEVELS, DTYPES, LEVEL_NAMES, Guarded, library_at, team_of
from tests.unit.test_model_config import PLAIN

INTEGERS = [quant for quant in QUANTS.values() if quant.bits]
SHAPES = [(1, 1), (3, 33), (31, 2), (64, 100), (65, 32), (385, 70), (1000, 17)]
TOLERANCE = 2e-6  # relative to the sum of the magnitudes of all products


@pytest.fixture(params=LEVEL_NAMES)
def team(request: pytest.FixtureRequest) -> Team:
    return team_of(str(request.param), 2)


@pytest.fixture(params=INTEGERS, ids=lambda quant: quant.name)
def quant(request: pytest.FixtureRequest) -> Quant:
    value = request.param
    assert isinstance(value, Quant)
    return value


def rand(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(
    team: Team,
    parts: Sequence[Tensor | Int4Weight],
    biases: Sequence[Tensor],
    dtype: torch.dtype,
    quant: Quant,
    gated: bool = False,
) -> PackedLinear:
    out = sum(part.shape[0] for part in parts)
    size = packed_bytes(out, parts[0].shape[1], dtype, gated, bool(biases), quant)
    arena = Arena(size)
    made = pack_linear(team, arena, parts, biases, dtype, gated, quant)
    assert arena.used == size
    return made


def product(team: Team, x: Tensor, weight: PackedLinear, kind: int = TO_FLOATS, before: float = 0.0) -> Tensor:
    """One product between guards."""
    width = weight.struct.out_features // 2 if kind == TO_GATED else weight.struct.out_features
    dtype = x.dtype if kind in (TO_ELEMENTS, TO_GATED) else torch.float32
    inputs, y = Guarded.of(x), Guarded(len(x), width, dtype=dtype, fill=before if kind == TO_SUM else float("nan"))
    linear(team, inputs.tensor, weight, kind, y.tensor)
    inputs.check()
    y.check()
    return y.tensor


def exact(x: Tensor, parts: Sequence[Tensor], quant: Quant) -> tuple[Tensor, Tensor]:
    """The product of what is quantized, and the sum of the magnitudes of its products, float64."""
    whole = torch.cat(list(parts)).float()
    integers = to_int8(whole) if quant.bits == 8 else to_int4(whole, quant.group)
    magnitudes = integers.floats().abs()
    if isinstance(integers, Int4Weight):  # a value is a sum of two
        magnitudes += 2 * spread(integers.minima.float().abs(), quant.group, whole.shape[1])
    return quantized_linear(x, integers), x.double().abs() @ magnitudes.double().T


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_product_is_that_of_the_integers(
    team: Team, quant: Quant, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    in_features, out_features = shape
    first = rand(0, out_features // 2, in_features)
    parts = [first, rand(1, out_features - len(first), in_features)]
    biases = [rand(2, len(parts[0])), rand(3, len(parts[1]))]
    x = rand(4, 19, in_features).to(dtype)
    expected, size = exact(x, parts, quant)
    bound, bias = TOLERANCE * (size + 1), torch.cat(biases).double()
    assert ((product(team, x, packed(team, parts, [], dtype, quant)) - expected).abs() <= bound).all()
    biased = packed(team, parts, biases, dtype, quant)
    assert ((product(team, x, biased) - (expected + bias)).abs() <= 2 * bound).all()
    assert ((product(team, x, biased, TO_SUM, before=2.5) - (expected + bias + 2.5)).abs() <= 4 * bound).all()
    assert torch.equal(product(team, x, biased, TO_ELEMENTS), product(team, x, biased).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 17, 100])
def test_gated_products_are_silu_times_up(team: Team, quant: Quant, dtype: torch.dtype, width: int) -> None:
    parts, biases = [rand(0, width, 70), rand(1, width, 70)], [rand(2, width), rand(3, width)]
    x = rand(4, 14, 70).to(dtype)
    sums = exact(x, parts, quant)[0] + torch.cat(biases).double()
    result = product(team, x, packed(team, parts, biases, dtype, quant, gated=True), TO_GATED)
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-20
    torch.testing.assert_close(result.double(), silu_mul(sums), rtol=rounding, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_level_gives_the_same_bits(quant: Quant, dtype: torch.dtype) -> None:
    levels = ALL_LEVELS
    if len(levels) < 2:
        pytest.skip("this machine has one level, or none")
    parts, x = [rand(0, 70, 1000)], rand(1, 21, 1000).to(dtype) * torch.logspace(-8, 8, 21)[:, None].to(dtype)
    results = [product(team_of(level, 2), x, packed(team_of(level, 2), parts, [], dtype, quant)) for level in levels]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(576, 96), (2600, 33)], ids=str)
def test_rows_do_not_depend_on_their_company(quant: Quant, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    in_features, out_features = shape
    teams = [team_of(best_level(), threads) for threads in (1, 2, 3)]
    weight = packed(teams[0], [rand(0, out_features, in_features)], [rand(1, out_features)], dtype, quant)
    x = rand(2, 200, in_features).to(dtype)
    whole = product(teams[0], x, weight)
    for i in range(0, 200, 9):
        assert torch.equal(product(teams[0], x[i : i + 1], weight)[0], whole[i]), i
    for team in teams:
        # around tiles and panels
        for count in (*range(2, 14), 63, 185, 186, 187, 191, 192, 193):
            first = (count * 7) % (201 - count)
            rows = product(team, x[first : first + count], weight)
            assert torch.equal(rows, whole[first : first + count]), (count, team.threads)


def test_extreme_rows_and_weights(team: Team, quant: Quant) -> None:
    # corners of the integers: both ends everywhere, alternating, one giant, the smallest and the largest floats
    x = torch.ones(8, 4096)
    x[1], x[2, ::2], x[3] = -1, -1, 0
    x[4, 7], x[5], x[6], x[7] = 1e30, 1e-39, 3e38, -3e38
    parts = [torch.ones(5, 4096), -torch.ones(5, 4096), rand(0, 5, 4096)]
    result, (expected, size) = product(team, x, packed(team, parts, [], torch.float32, quant)), exact(x, parts, quant)
    assert (result[3] == 0).all()
    rows = [0, 1, 2, 4, 5]
    assert ((result[rows] - expected[rows]).abs() <= TOLERANCE * (size[rows] + 1)).all()
    assert not result[:6].isnan().any()
    # beyond float32, as the product of floats would be too
    assert result[6, :5].isinf().all()
    assert result[7, 5:10].isinf().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", [0, 63, 64, 511, 512, 599])
def test_what_is_not_finite_makes_its_row_nan_and_no_other(
    team: Team, quant: Quant, dtype: torch.dtype, place: int
) -> None:
    weight = packed(team, [rand(0, 40, 600)], [], dtype, quant)
    x = rand(1, 13, 600).to(dtype)
    sound = product(team, x, weight)
    for value in (float("nan"), float("inf"), float("-inf")):
        broken = x.clone()
        broken[4, place] = value
        y = product(team, broken, weight)
        assert y[4].isnan().all()
        others = [i for i in range(13) if i != 4]
        assert torch.equal(y[others], sound[others])


# ---------------------------------------------------------------------------------------------------------- quantizing


@pytest.mark.parametrize("group", [32, 64, 128])
def test_blocks_of_a_file_are_taken_exactly(team: Team, group: int) -> None:
    # float16 scales and minima as GGUF's Q4_1 keeps them: the product is that of the file's very values
    draw = torch.Generator().manual_seed(0)
    integers = torch.randint(0, 16, (70, 200), generator=draw, dtype=torch.uint8)
    groups = -(-200 // group)
    scales, minima = (rand(seed, 70, groups).mul(0.01).half() for seed in (1, 2))
    blocks = Int4Weight(integers, scales, minima, group)
    place = torch.arange(200) // group
    assert torch.equal(blocks.floats(), integers * scales.float()[:, place] + minima.float()[:, place])
    weight = packed(team, [blocks], [], torch.float32, Quant("", 4, group))
    x = rand(3, 9, 200)
    expected = quantized_linear(x, blocks)
    bound = TOLERANCE * (x.double().abs() @ blocks.floats().double().abs().T + 1)
    assert ((product(team, x, weight) - expected).abs() <= bound).all()
    # other formats quantize the values anew
    other = product(team, x, packed(team, [blocks], [], torch.float32, QUANTS["int8"]))
    assert torch.equal(other, product(team, x, packed(team, [blocks.floats()], [], torch.float32, QUANTS["int8"])))
    plain = product(team, x, packed(team, [blocks], [], torch.float32, NONE))
    torch.testing.assert_close(plain.double(), x.double() @ blocks.floats().double().T, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("group", "in_features"), [(32, 72), (64, 600), (128, 1100)])
def test_zeros_of_a_checkpoint_and_its_order_are_taken_exactly(
    team: Team, group: int, in_features: int, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(0)
    integers = torch.randint(0, 16, (70, in_features), generator=draw, dtype=torch.uint8)
    size = 70, -(-in_features // group)
    scales, zeros = rand(1, *size).mul(0.01).half(), torch.randint(0, 17, size, generator=draw)
    order = torch.randperm(in_features, generator=draw)
    kept = Int4Weight(integers, scales, -zeros.half(), group, in_steps=True, order=order)
    place = torch.arange(in_features) // group
    exact_values = torch.empty(70, in_features, dtype=torch.float64)
    exact_values[:, order] = scales.double()[:, place] * (integers.double() - zeros[:, place])
    assert torch.equal(kept.floats().double(), exact_values)
    as_kept = Quant("", 4, group, in_steps=True, as_kept=True)
    x, bias = rand(3, 19, in_features).to(dtype), rand(4, 70)
    arena = Arena(200_000)
    weight = pack_linear(team, arena, [kept[:33], kept[33:]], [bias[:33], bias[33:]], dtype, quant=as_kept)
    # rows are quantized in the order of the weights
    expected = quantized_linear(x[:, order], replace(kept, order=None))
    terms = (integers + zeros[:, place]) * scales.double().abs()[:, place]
    bound = TOLERANCE * (x[:, order].double().abs() @ terms.T + 1)
    assert ((product(team, x, weight) - expected - bias.double()).abs() <= bound).all()
    alone = torch.cat([product(team, x[i : i + 1], weight) for i in range(19)])
    assert torch.equal(product(team, x, weight), alone)


def test_integers_are_the_nearest() -> None:
    values = rand(0, 9, 333) * torch.logspace(-6, 4, 9)[:, None]
    eight = to_int8(values)
    assert int(eight.integers.abs().max()) == 127
    assert ((eight.floats() - values).abs() <= eight.scales[:, None] * 0.5001).all()
    for group in (32, 64, 128):
        four = to_int4(values, group)
        assert int(four.integers.max()) == 15
        place = torch.arange(333) // group
        steps = four.scales.float()[:, place] + four.minima.float().abs()[:, place] * 2.0**-10
        assert ((four.floats() - values).abs() <= steps * 0.51 + 6e-7).all(), group


def test_equal_values_have_no_step() -> None:
    for quant in INTEGERS:
        same = torch.full((3, 70), 0.25)
        weight = to_int8(same) if quant.bits == 8 else to_int4(same, quant.group)
        torch.testing.assert_close(weight.floats(), same, rtol=1e-6, atol=0)
        zero = torch.zeros(3, 70)
        assert torch.equal((to_int8(zero) if quant.bits == 8 else to_int4(zero, quant.group)).floats(), zero)


def test_rows_of_the_reference_are_quantized_within_half_a_step() -> None:
    x = rand(0, 5, 200) * torch.logspace(-20, 20, 5)[:, None]
    integers, scales = quantized_rows(x, INT8_GROUP)
    values = (integers * scales[:, :, None]).reshape(5, -1)[:, :200]
    steps = scales.repeat_interleave(INT8_GROUP, dim=1)[:, :200]
    assert ((values - x).abs() <= 0.5001 * steps).all()
    assert int(integers.abs().max()) == 127


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(quant: Quant, value: float) -> None:
    weight = torch.ones(4, 64)
    weight[1, 5] = value
    with pytest.raises(Unquantizable, match="not finite"):
        packed(team_of(best_level(), 1), [weight], [], torch.float32, quant)


def test_a_weight_outside_float16_is_refused() -> None:
    with pytest.raises(Unquantizable, match="too large for int4"):
        to_int4(torch.full((1, 32), 1e5), 32)


def best_level() -> str:
    best = machine_level({})
    if best is None:
        pytest.skip("no native kernels here")
    return best.name


# --------------------------------------------------------------------------------------------------------- whole steps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(50, 70, 4, 2, 16), (33, 17, 3, 3, 32)], ids=str)
def test_whole_steps_at_odd_sizes(quant: Quant, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = parse_config(PLAIN | dict(zip(names, sizes, strict=True)) | {"vocab_size": 77}, Path("config.json"))
    assert NativeCheck(config, dtype, library_at(best_level()), quant).difference() is None
