"""Every operation of the C kernels once at odd sizes, on the best level and on AVX2: right, and the same bits.

This is also what runs under sanitizers (tests/unit/test_native_build.py). The other levels come in the long run.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from kernels.activation import silu_mul
from kernels.linear.quantize import NONE, QUANTS, Quant, quantized_linear, to_int4, to_int8
from kernels.native.abi import TO_ELEMENTS, TO_FLOATS, TO_GATED, TO_SUM
from kernels.native.arena import Arena
from kernels.native.library import Team
from kernels.native.packed import linear, pack_linear, packed_bytes
from kernels.norm import rms_norm
from kernels.rotary import rotary, rotary_table
from kernels.rotary.frequencies import plain
from kernels.store_kv.reference import dequantize, quantize
from tests.native import ALL_LEVELS, DTYPES, Guarded, GuardedIntegers, scales_of, team_of, token_at
from tests.native_models import Cache, make_model, make_plan, rand

EVERY_RUN = {ALL_LEVELS[0], "avx2", "neon"}
LEVELS = [
    pytest.param(name, id=name, marks=[] if name in EVERY_RUN else pytest.mark.long) for name in reversed(ALL_LEVELS)
]
INPUTS, WIDTH, ROWS = 145, 35, 13
HEADS = (7, 1, 48)
TOLERANCE = {torch.bfloat16: 2.0**-7, torch.float32: 2e-6}
KINDS = {"floats": TO_FLOATS, "elements": TO_ELEMENTS, "sum": TO_SUM, "gated": TO_GATED}


def inputs(dtype: torch.dtype) -> Tensor:
    return rand(4, ROWS, INPUTS).to(dtype)


def halves(dtype: torch.dtype) -> list[Tensor]:
    return [(rand(i, WIDTH, INPUTS) / INPUTS**0.5).to(dtype) for i in (0, 1)]


BIASES = [rand(2, WIDTH), rand(3, WIDTH)]


def products(team: Team, dtype: torch.dtype, quant: Quant) -> dict[str, Tensor]:
    results = {}
    for name, kind in KINDS.items():
        gated = kind == TO_GATED
        arena = Arena(packed_bytes(2 * WIDTH, INPUTS, dtype, gated, True, quant))
        weight = pack_linear(team, arena, halves(dtype), BIASES, dtype, gated, quant)
        x = Guarded.of(inputs(dtype))
        kept = dtype if kind in (TO_ELEMENTS, TO_GATED) else torch.float32
        y = Guarded(ROWS, WIDTH if gated else 2 * WIDTH, dtype=kept, fill=1.0)
        linear(team, x.tensor, weight, kind, y.tensor)
        x.check()
        y.check()
        results[f"{quant.name} {name}"] = y.tensor
    return results


def right_products(dtype: torch.dtype, quant: Quant) -> dict[str, Tensor]:
    x = inputs(dtype)
    if quant is NONE:
        sums = [x.double() @ weight.double().T for weight in halves(dtype)]
    else:
        whole = [to_int8(w.float()) if quant.bits == 8 else to_int4(w.float(), quant.group) for w in halves(dtype)]
        sums = [quantized_linear(x, weight).double() for weight in whole]
    both = torch.cat([part + bias for part, bias in zip(sums, BIASES, strict=True)], dim=1)
    named = {"floats": both, "elements": both, "sum": both + 1, "gated": silu_mul(both)}
    return {f"{quant.name} {name}": value for name, value in named.items()}


def norm(team: Team, dtype: torch.dtype) -> Tensor:
    x, weight, y = Guarded.of(rand(0, 5, 33)), Guarded.of(rand(1, 33)), Guarded(5, 33, dtype=dtype)
    pointers = (x.tensor.data_ptr(), weight.tensor.data_ptr(), y.tensor.data_ptr())
    team.call("baton_norm", dtype, *pointers, 5, 33, 1e-5)
    for guarded in (x, weight, y):
        guarded.check()
    return y.tensor


def right_norm() -> Tensor:
    return rms_norm(rand(0, 5, 33).double(), rand(1, 33).double(), 1e-5)


def stored_integers(team: Team, dtype: torch.dtype) -> Tensor:
    """Keys and values of the same five tokens as 8-bit integers."""
    q_heads, kv_heads, head_dim = HEADS
    model = make_model(team, dtype, HEADS)
    pool = GuardedIntegers(4, 1, 2, kv_heads, 16, head_dim)
    qkv = rand(0, 5, q_heads + 2 * kv_heads, head_dim).to(dtype)
    model.rotate(qkv, make_plan(model, pool.tensor, [(13, 5)], [[2, 1]]))
    pool.check()
    assert int(scales_of(pool.tensor).isnan().sum()) == 4 * 2 * kv_heads * 16 - 5 * 2 * kv_heads
    places = [(2, 13), (2, 14), (2, 15), (1, 0), (1, 1)]
    return torch.stack([torch.cat(token_at(pool.tensor, *place)) for place in places])


def stored_halves(team: Team, dtype: torch.dtype) -> Tensor:
    """Keys and values of the same five tokens, which come as float32, as halves."""
    q_heads, kv_heads, head_dim = HEADS
    model = make_model(team, dtype, HEADS)
    pool = Guarded(4, 1, 2, kv_heads, 16, head_dim, dtype=torch.float16)
    qkv = Guarded.of(rand(0, 5, q_heads + 2 * kv_heads, head_dim))
    model.rotate(qkv.tensor, make_plan(model, pool.tensor, [(13, 5)], [[2, 1]]))
    pool.check()
    qkv.check()
    assert int(pool.tensor.isnan().sum()) == pool.tensor.numel() - 5 * 2 * kv_heads * head_dim
    places = [(2, 13), (2, 14), (2, 15), (1, 0), (1, 1)]
    return torch.stack([torch.cat(token_at(pool.tensor, *place)) for place in places]).float()


def rotated(team: Team, dtype: torch.dtype) -> dict[str, Tensor]:
    """Queries of five tokens, and their keys and values in the pool, whose other tokens stay NaN."""
    q_heads, kv_heads, head_dim = HEADS
    model = make_model(team, dtype, HEADS)
    pool = Guarded(4, 1, 2, kv_heads, 16, head_dim, dtype=dtype)
    qkv = Guarded.of(rand(0, 5, q_heads + 2 * kv_heads, head_dim).to(dtype))
    model.rotate(qkv.tensor, make_plan(model, pool.tensor, [(13, 5)], [[2, 1]]))
    pool.check()
    qkv.check()
    places = [(2, 13), (2, 14), (2, 15), (1, 0), (1, 1)]
    tokens = [torch.cat(token_at(pool.tensor, *place)) for place in places]
    assert int(pool.tensor.isnan().sum()) == pool.tensor.numel() - 5 * 2 * kv_heads * head_dim
    return {"queries": qkv.tensor[:, :q_heads], "stored": torch.stack(tokens)}


def right_rotated(dtype: torch.dtype) -> dict[str, Tensor]:
    q_heads, kv_heads, head_dim = HEADS
    qkv = rand(0, 5, q_heads + 2 * kv_heads, head_dim).to(dtype).float()
    table = rotary_table(plain(head_dim, 10000.0), 1200, dtype)[torch.arange(13, 18)]
    rotary(qkv[:, : q_heads + kv_heads], table)
    return {"queries": qkv[:, :q_heads], "stored": qkv[:, q_heads:]}


def attended(team: Team, dtype: torch.dtype, kv: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """A prompt in one piece, then its last token alone, over a pool of NaN; and what a textbook says."""
    kept = Cache(make_model(team, dtype, HEADS), 131, kv=kv)
    whole = kept.attend(0, 131)
    assert torch.equal(kept.attend(130, 131)[0], whole[130])
    return whole, kept.textbook()


@cache
def results(level: str, dtype: torch.dtype) -> dict[str, Tensor]:
    team = team_of(level, 2)
    made = {"norm": norm(team, dtype), "attention": attended(team, dtype)[0]} | rotated(team, dtype)
    made |= {"int8 KV": stored_integers(team, dtype), "int8 KV attention": attended(team, dtype, torch.int8)[0]}
    made |= {"float16 KV": stored_halves(team, dtype), "float16 KV attention": attended(team, dtype, torch.float16)[0]}
    for quant in QUANTS.values():
        made |= products(team, dtype, quant)
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_every_operation_is_right(level: str, dtype: torch.dtype) -> None:
    expected = {"norm": right_norm(), "attention": attended(team_of(level, 2), dtype)[1]} | right_rotated(dtype)
    expected["int8 KV attention"] = attended(team_of(level, 2), dtype, torch.int8)[1]
    expected["float16 KV attention"] = attended(team_of(level, 2), dtype, torch.float16)[1]
    expected["float16 KV"] = right_rotated(torch.float32)["stored"].half().float()
    expected["int8 KV"] = dequantize(*quantize(expected["stored"].to(dtype)))
    for quant in QUANTS.values():
        expected |= right_products(dtype, quant)
    made = results(level, dtype)
    assert made.keys() == expected.keys()
    for name, value in made.items():
        tolerance = TOLERANCE[dtype] if value.dtype == dtype else TOLERANCE[torch.float32]
        if name == "float16 KV":  # one that rounds otherwise moves by a unit of the last of 11 bits
            tolerance = 2.0**-10
        if name.startswith("int8 KV"):  # a rotated element that rounds otherwise moves its integer by one
            tolerance = 2.0**-5
        difference = (value.double() - expected[name].double()).abs()
        assert (difference <= tolerance * (1 + expected[name].double().abs())).all(), (name, float(difference.max()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", [param for param in LEVELS if param.id != ALL_LEVELS[0]])
def test_levels_give_the_same_bits(level: str, dtype: torch.dtype) -> None:
    """Products of pairs of bfloat16 are avx512_bf16's own; all else is alike, integers and halves in particular."""
    others, made = results(ALL_LEVELS[0], dtype), results(level, dtype)
    own = ALL_LEVELS[0] == "avx512_bf16" and dtype == torch.bfloat16
    for name, value in made.items():
        if not (own and name.split()[0] in ("none", "attention")):
            assert torch.equal(value, others[name]), name
