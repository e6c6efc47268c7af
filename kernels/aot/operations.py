"""Launches compiled ahead of all operations but attention and the pool's, at shapes of an 8B model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.activation.triton_kernel import GATES, gate_mul
from kernels.embedding.triton_kernel import embed
from kernels.linear.triton_few_rows import few_rows_linear
from kernels.linear.triton_kernel import linear, quantize_rows
from kernels.linear.triton_weights import DeviceWeight, Kind, plain
from kernels.moe.triton_kernel import experts, route
from kernels.norm.triton_kernel import add_rms_norm, rms_norm, rms_norm_heads
from kernels.rotary.triton_kernel import HEAD_DIMS, HeadNorm, rotary_store_kv
from kernels.sampling.triton_kernel import sample
from kernels.sampling.triton_logprobs import top_logprobs
from kernels.sampling.triton_rows import MAX_BIASES, Bias, Mask, Penalties, SamplingRows
from kernels.sampling.triton_verify import verify

if TYPE_CHECKING:
    from kernels.aot.variants import Variant

Make = Callable[..., "Variant"]
HIDDEN, WIDTH, VOCAB, EXPERTS = 4096, 14336, 128256, 8
_BF16, _FP8 = torch.bfloat16, torch.float8_e4m3fn
FLOAT8 = ((8, 9), (9, 0))
"""Chips that have float8."""


def variants(make: Make) -> Iterator[Variant]:
    """All rows, made by `make(name, call, may_spill, chips)`."""
    yield from _small(make)
    yield from _rotary(make)
    yield from _linear(make)
    yield from _few_rows(make)
    yield from _experts(make)
    yield from _sampling(make)


def _small(make: Make) -> Iterator[Variant]:
    for dtype in (_BF16, torch.float16):
        name, x, weight = str(dtype)[6:], torch.empty(2, HIDDEN, dtype=dtype), torch.empty(HIDDEN, dtype=dtype)
        yield make(f"norm-{name}", lambda x=x, weight=weight: rms_norm(x, weight, 1e-5))
        yield make(f"norm-add-{name}", lambda x=x, weight=weight: add_rms_norm(x, x, weight, 1e-5))
    heads = torch.empty(2, 40, 128, dtype=_BF16)
    yield make("norm-heads", lambda: rms_norm_heads(heads, heads[0, 0], 1e-6, 1.0))
    for gate in GATES:
        yield make(f"activation-{gate}", lambda gate=gate: gate_mul(torch.empty(2, 2 * WIDTH, dtype=_BF16), gate))


def _rotary(make: Make) -> Iterator[Variant]:
    for head_dim in HEAD_DIMS:
        yield make(f"rotary-store-{head_dim}", lambda d=head_dim: _rotate(d, _BF16))
    yield make("rotary-store-128-norm", lambda: _rotate(128, _BF16, with_norm=True))
    yield make("rotary-store-128-int8", lambda: _rotate(128, torch.int8))
    yield make("rotary-store-128-float8_e4m3fn", lambda: _rotate(128, _FP8), chips=FLOAT8)


def _rotate(head_dim: int, kv_dtype: torch.dtype, with_norm: bool = False) -> None:
    weight, index = torch.empty(head_dim, dtype=_BF16), torch.zeros(2, dtype=torch.int64)
    rotary_store_kv(
        torch.empty(2, 48, head_dim, dtype=_BF16),
        torch.empty(16, 2, head_dim),
        index,
        # a layer of three, so that strides divide as a model's do
        torch.empty(1, 3, 2, 8, 16, head_dim, dtype=kv_dtype)[:, 1],
        index,
        32,
        HeadNorm(weight, weight, 1e-6) if with_norm else None,
        None if kv_dtype == _BF16 else torch.empty(1, 3, 2, 8, 16)[:, 1],
    )


def _linear(make: Make) -> Iterator[Variant]:
    """The product before attention (split for few rows) and the one that is never split."""
    for kind, group in _formats():
        chips = {"chips": FLOAT8} if kind == "fp8" else {}
        for rows in (1, 64, 512):
            for out_features in (6144, 2 * WIDTH):
                name = f"linear-{kind}{f'-{group}' if group else ''}-{rows}-{out_features}"
                weight, x = _weight(kind, group, out_features), torch.empty(rows, HIDDEN, dtype=_BF16)
                yield make(name, lambda x=x, weight=weight: linear(x, weight), _unpacks(kind), **chips)
    for dtype in (_BF16, torch.float32):
        x, name = torch.empty(2, WIDTH, dtype=dtype), str(dtype)[6:]
        yield make(f"quantize-rows-int8-{name}", lambda x=x: quantize_rows(x, torch.int8))
        yield make(f"quantize-rows-fp8-{name}", lambda x=x: quantize_rows(x, _FP8), chips=FLOAT8)
    yield from _linear_of_workers(make)


def _linear_of_workers(make: Make) -> Iterator[Variant]:
    """What a worker multiplies by beside those: exact pools of float32, float rows with integers, integers over a
    minimum, which is a zero that is no integer."""
    weights = {"plain": plain(torch.empty(6144, HIDDEN)), "int8": _weight("int8", 0, 6144), "int4-32": _minimum(6144)}
    for kind, weight in weights.items():
        for rows in (1, 64, 512):
            for dtype in (torch.float32, _BF16) if kind == "int4-32" else (torch.float32,):
                x = torch.empty(rows, HIDDEN, dtype=dtype)
                name = f"linear-{kind}-{str(dtype)[6:]}-{rows}-6144"
                # float32 is summed by threads, not by tensor cores, and may then want a register too many
                spills = dtype == torch.float32 or _unpacks(weight.kind)
                yield make(name, lambda x=x, weight=weight: linear(x, weight), spills)
    symmetric = replace(_weight("int4", 128, 6144), zeros=None)
    for rows in (1, 64, 512):
        x = torch.empty(rows, HIDDEN, dtype=_BF16)
        yield make(f"linear-int4-128-symmetric-{rows}-6144", lambda x=x: linear(x, symmetric), _unpacks("int4"))


def _minimum(out_features: int, in_features: int = HIDDEN) -> DeviceWeight:
    """As `from_minimum` packs groups of 32."""
    weight, shape = _weight("int4", 32, out_features, in_features), (in_features // 32, out_features)
    return replace(weight, scales=torch.empty(shape, dtype=torch.float16), zeros=torch.empty(shape))


def _few_rows(make: Make) -> Iterator[Variant]:
    """The products of a layer with what is fused into them, and the embedding they begin from."""
    x, norm, inner = torch.empty(1, HIDDEN, dtype=_BF16), torch.empty(HIDDEN, dtype=_BF16), torch.empty(1, WIDTH)
    up, down = (plain(torch.empty(*shape, dtype=_BF16)) for shape in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)))
    yield make("few-rows-norm", lambda: few_rows_linear(x, up, norm=norm, eps=1e-5))
    yield make("few-rows-norm-gate", lambda: few_rows_linear(x, up, norm=norm, eps=1e-5, gate="silu"))
    yield make("few-rows-add", lambda: few_rows_linear(inner.to(_BF16), down, residual=x))
    packed = {
        "int8": _weight("int8", 0, 2 * WIDTH),
        "fp8": _weight("fp8", 0, 2 * WIDTH),
        "int4-32": _minimum(2 * WIDTH),
    }
    packed["int4-64-symmetric"] = replace(_weight("int4", 64, 2 * WIDTH), zeros=None)
    packed |= {f"int4-{group}": _weight("int4", group, 2 * WIDTH) for group in (64, 128)}
    for name, weight in packed.items():
        chips = {"chips": FLOAT8} if name == "fp8" else {}
        call = functools.partial(few_rows_linear, x, weight, norm=norm, eps=1e-5, gate="silu")
        yield make(f"few-rows-{name}", call, **chips)
    four = _minimum(HIDDEN, WIDTH)
    yield make("few-rows-int4-32-add", lambda: few_rows_linear(inner.to(_BF16), four, residual=x))
    ids = torch.zeros(1, dtype=torch.int32)
    yield make("embedding", lambda: embed(ids, ids, ids, down.data, 2.0))


def _unpacks(kind: str) -> bool:
    """Large tiles of these spill a few registers and were still the fastest measured."""
    return kind in ("int8", "int4")


def _formats() -> Iterator[tuple[Kind, int]]:
    yield from (("plain", 0), ("int8", 0), ("int4", 32), ("int4", 128), ("w8a8", 0), ("fp8", 0))


def _weight(kind: Kind, group: int, out_features: int, in_features: int = HIDDEN, *stack: int) -> DeviceWeight:
    """A weight of which nothing is ever read: its memory is never touched."""
    dtypes = {"plain": _BF16, "int8": torch.int8, "int4": torch.uint8, "w8a8": torch.int8, "fp8": _FP8}
    shape: tuple[int, ...] = (out_features, in_features)
    scales, zeros = torch.empty(*stack, out_features), None
    if kind == "int4":
        groups = in_features // group
        shape = (groups, out_features, group // 2)
        scales = torch.empty(*stack, groups, out_features, dtype=_BF16)
        zeros = torch.empty(*stack, groups, out_features, dtype=torch.uint8)
    data = torch.empty(*stack, *shape, dtype=dtypes[kind])
    return DeviceWeight(kind, data, in_features, out_features, group, None if kind == "plain" else scales, zeros)


def _experts(make: Make) -> Iterator[Variant]:
    yield make("experts-route", lambda: route(torch.empty(2, EXPERTS), 2))
    for kind, group in (("plain", 0), ("int8", 0), ("int4", 128), ("w8a8", 0), ("fp8", 0)):
        chips = {"chips": FLOAT8} if kind == "fp8" else {}
        up = _weight(kind, group, 2 * WIDTH, HIDDEN, EXPERTS)  # type: ignore[arg-type]
        down = _weight(kind, group, HIDDEN, WIDTH, EXPERTS)  # type: ignore[arg-type]
        for tokens in (2, 100, 1000):
            yield make(
                f"experts-{kind}-{tokens}",
                lambda t=tokens, up=up, down=down: _mix(t, up, down),
                _unpacks(kind),
                **chips,
            )


def _mix(tokens: int, up: DeviceWeight, down: DeviceWeight) -> Tensor:
    ids, shares = torch.zeros(tokens, 2, dtype=torch.int32), torch.empty(tokens, 2)
    return experts(torch.empty(tokens, HIDDEN, dtype=_BF16), up, down, ids, shares)


def _sampling(make: Make) -> Iterator[Variant]:
    logits, one = torch.empty(1, VOCAB), torch.empty(1)
    rows = SamplingRows(
        one, one.int(), one.double(), one.double(), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    )
    words = torch.empty(1, VOCAB // 32, dtype=torch.int32)
    counts = torch.empty(1, VOCAB, dtype=torch.int32)
    line = one.int()
    biases = torch.zeros(1, MAX_BIASES, dtype=torch.int32)
    full = SamplingRows(
        *(rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed, rows.position),
        penalties=Penalties(one, one, one, line, counts, words),
        bias=Bias(line, biases, biases.float()),
        mask=Mask(line, words),
        scored=line,
    )
    yield make("sampling", lambda: sample(logits, rows))
    yield make("sampling-adjusted", lambda: sample(logits, full))
    yield make("sampling-adjusted-bfloat16", lambda: sample(logits.to(_BF16), full))
    yield make("sampling-top", lambda: top_logprobs(logits.to(_BF16), one, 20, line))
    cu_rows = torch.tensor([0, 1], dtype=torch.int32)
    yield make("sampling-verify", lambda: verify(logits, full, line, cu_rows))
