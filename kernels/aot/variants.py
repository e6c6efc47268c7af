"""Which launches are compiled ahead: rows of sample arguments, as real models have them.

An operation adds its rows here; each is a call of its host wrapper with small tensors. Attention of float32 has none:
its products are sums by threads and serve proofs only. With heads of 64, 80 and 96 in the default launch shapes, decode
and prefill, it was compiled for sm_80 and sm_90 and spilled each time; so did decode with 128 on sm_80.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kernels.aot import operations
from kernels.attention import triton_attention
from kernels.attention.triton_tuning import HEAD_DIMS
from kernels.store_kv import triton_blocks
from kernels.store_kv.triton_kernel import store_kv

CHIPS = ((8, 0), (9, 0))
_CPU = torch.device("cpu")
_FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Variant:
    """One row of the table, for every chip in `chips`."""

    name: str
    call: Callable[[], object]
    may_spill: bool = False
    chips: tuple[tuple[int, int], ...] = CHIPS


def variants() -> Iterator[Variant]:
    """All rows. Names are unique."""
    yield from _attention()
    yield Variant("attention-plan", _plan)
    yield Variant("attention-plan-window", lambda: _plan(4096))
    for dtype in (torch.bfloat16, torch.int8, _FP8):
        chips = operations.FLOAT8 if dtype == _FP8 else CHIPS
        yield Variant(f"store-kv-{str(dtype).removeprefix('torch.')}", functools.partial(_store, dtype), chips=chips)
    yield Variant("blocks", _blocks)
    yield from operations.variants(Variant)


def _attention() -> Iterator[Variant]:
    for head_dim in HEAD_DIMS:
        for prefill in (False, True):
            yield _attend(head_dim, torch.bfloat16, None, prefill)
    for prefill in (False, True):
        yield _attend(128, torch.float16, None, prefill)
        yield _attend(128, torch.bfloat16, None, prefill, block_size=64)
        yield _attend(128, torch.bfloat16, torch.int8, prefill)
        yield _attend(64, torch.bfloat16, torch.int8, prefill)
        yield _attend(128, torch.bfloat16, _FP8, prefill)
        yield _attend(64, torch.bfloat16, None, prefill, window=128, sinks=True)
        yield _attend(256, torch.bfloat16, None, prefill, window=4096, soft_cap=50.0)


def _attend(
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    prefill: bool,
    *,
    block_size: int = 16,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: bool = False,
) -> Variant:
    """A step of 32 query heads over 8 KV heads: one row, or one chunk."""
    words = [f"attention-{'prefill' if prefill else 'decode'}-{head_dim}", str(dtype).removeprefix("torch.")]
    words += [str(kv_dtype).removeprefix("torch.")] if kv_dtype else []
    words += [f"block{block_size}"] if block_size != 16 else []
    words += ["window"] * (window > 0) + ["cap"] * (soft_cap > 0) + ["sinks"] * sinks

    def call() -> object:
        rows, heads, kv_heads = (640 if prefill else 1), 32, 8
        # whole blocks of three layers, so that strides divide as a model's do
        pool = torch.empty(1, 3, 2, kv_heads, block_size, head_dim, dtype=kv_dtype or dtype)[:, 1]
        scales = torch.empty(1, 3, 2, kv_heads, block_size)[:, 1] if kv_dtype else None
        # a row after many splits, too
        length = 640 if prefill or block_size < 64 else 1 << 17
        table = [0] * (length // block_size)
        sizes = (block_size, heads, kv_heads, head_dim, _CPU, window, kv_dtype is not None)
        plan = triton_attention.plan_attention([0, rows], [length], [table], *sizes)
        q = torch.empty(rows, heads, head_dim, dtype=dtype)
        some = torch.empty(heads) if sinks else None
        return triton_attention.attend(q, pool, plan, head_dim**-0.5, soft_cap, some, scales)

    return Variant("-".join(words), call, chips=operations.FLOAT8 if kv_dtype == _FP8 else CHIPS)


def _plan(window: int = 0) -> object:
    cu, lens, tables = (torch.empty(*shape, dtype=torch.int32) for shape in ((9,), (8,), (8, 64)))
    return triton_attention.plan_on_device(cu, lens, tables, 32, 4, 1024, 16, 32, 8, 128, window)


def _store(dtype: torch.dtype) -> None:
    pool = torch.empty(1, 3, 2, 8, 16, 128, dtype=dtype)[:, 1]
    scales = None if dtype == torch.bfloat16 else torch.empty(1, 3, 2, 8, 16)[:, 1]
    store_kv(torch.empty(4, 2, 8, 128, dtype=torch.bfloat16), pool, torch.zeros(4, dtype=torch.int32), scales)


def _blocks() -> None:
    pool, ids = torch.empty(2, 64, 128, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64)
    triton_blocks.gather_blocks(pool, ids, pool[:1])
    triton_blocks.scatter_blocks(pool[:1], ids, pool)
    triton_blocks.move_blocks(pool, ids, pool, ids)
    triton_blocks.zero_blocks(pool, ids)
    triton_blocks.digest_blocks(pool, ids)
