"""The native library at every level this machine has, for tests; skips where it has none."""

from __future__ import annotations

import os
import platform
from functools import cache

import pytest
import torch
from torch import Tensor

from kernels.native.compiler import NativeUnavailable
from kernels.native.cpu import LEVELS, NEEDED, VARIABLE, machine_level
from kernels.native.library import NativeLibrary, Team, open_library
from kernels.store_kv.reference import dequantize, quantize
from kernels.tile_layouts import LANES16
from shared.kv.layout import LayerGroup, PoolLayout
from shared.kv.pool import pool_views
from shared.model.fetch import cache_dir

_BEST = machine_level({})
_OF_MACHINE = [level.name for level in LEVELS if level.machine == platform.machine()]
ALL_LEVELS = _OF_MACHINE[_OF_MACHINE.index(_BEST.name) :] if _BEST else ["none"]
"""The levels this machine can run, best first."""
LEVEL_NAMES = [
    pytest.param(name, id=name, marks=[] if i == 0 else pytest.mark.long)
    for i, name in enumerate(name for name in ALL_LEVELS if name != "avx512_vnni" or ALL_LEVELS[0] == name)
]
"""The best in every run, the others in the long one: tests/unit/test_native_levels.py compares them in every run.
`avx512_vnni` is `avx512` with another integer product."""
DTYPES = [torch.bfloat16, torch.float32]


@cache
def library_at(level: str) -> NativeLibrary:
    """The library for a level, or the test is skipped: the machine is below it, or has no compiler."""
    env = {**os.environ, VARIABLE: level}
    if _BEST is None:
        pytest.skip(NEEDED)
    try:
        return open_library(cache_dir(os.environ) / "kernels", env)
    except NativeUnavailable as exc:
        pytest.skip(f"the native kernels cannot be built: {exc}")


@cache
def team_of(level: str, threads: int) -> Team:
    return Team(library_at(level), threads)


def require_native() -> None:
    """Skip where `kernels = "native"` would fall back to torch."""
    best = machine_level(os.environ)
    if best is None:
        pytest.skip(NEEDED)
    library_at(best.name)


class Guarded:
    """A tensor with NaN before and behind it; `check` says that nobody wrote there.

    BATON_TEST_GUARD=0 leaves them out: a sanitizer then sees who reads there, too.
    """

    GUARD = int(os.environ.get("BATON_TEST_GUARD", "96"))

    def __init__(self, *shape: int, dtype: torch.dtype, fill: float = float("nan")) -> None:
        count = torch.Size(shape).numel()
        self._all = torch.full((count + 2 * self.GUARD,), float("nan"), dtype=dtype)
        self.tensor = self._all[self.GUARD : self.GUARD + count].view(shape)
        self.tensor.fill_(fill)

    @staticmethod
    def of(values: Tensor) -> Guarded:
        guarded = Guarded(*values.shape, dtype=values.dtype)
        guarded.tensor.copy_(values)
        return guarded

    def check(self) -> None:
        assert self._all[: self.GUARD].isnan().all()
        assert self._all[len(self._all) - self.GUARD :].isnan().all()


class GuardedIntegers:
    """A pool of 8-bit integers, one layer, that was never written, as `Guarded` is one of elements: scales are NaN.

    Args:
        shape: [num_blocks, 1, 2, kv_heads, block_size, head_dim].
    """

    def __init__(self, *shape: int) -> None:
        num_blocks, _, _, kv_heads, block_size, head_dim = shape
        group = LayerGroup("full", (0,), kv_heads, head_dim, block_size, "int8", LANES16)
        layout = PoolLayout((group,), (num_blocks,))
        guard = 4 * Guarded.GUARD
        self._all = torch.full((layout.total_bytes + 2 * guard,), 0xFF, dtype=torch.uint8)
        self._guards = (self._all[:guard], self._all[guard + layout.total_bytes :])
        (self.tensor,) = pool_views(self._all[guard : guard + layout.total_bytes], layout)

    def check(self) -> None:
        assert all(guard.eq(0xFF).all() for guard in self._guards)


def scales_of(pool: Tensor) -> Tensor:
    """The scales behind the blocks of a pool of integers: [num_blocks, num_layers, 2, kv_heads, block_size] float32."""
    num_blocks, layers, _, kv_heads, block_size, head_dim = pool.shape
    whole = torch.empty(0, dtype=torch.float32).set_(pool.untyped_storage())  # type: ignore[call-overload]
    vectors = layers * 2 * kv_heads * block_size
    shape = (num_blocks, layers, 2, kv_heads, block_size)
    strides = (pool.stride(0) // 4, 2 * kv_heads * block_size, kv_heads * block_size, block_size, 1)
    return whole.as_strided(shape, strides, (pool.storage_offset() + vectors * head_dim) // 4)


def put_token(pool: Tensor, block: int, offset: int, k: Tensor, v: Tensor) -> None:
    """One token's keys and values, [kv_heads, head_dim] each, into the first layer of a pool in `lanes16`."""
    keys, values = _token_of(pool, block, offset)
    if pool.dtype == torch.int8:
        (k, key_scales), (v, value_scales) = quantize(k), quantize(v)
        scales_of(pool)[block, 0, :, :, offset] = torch.stack((key_scales, value_scales))
        k = k ^ -128  # bytes less 128
    keys.copy_(k.view(keys.shape))
    values.copy_(v)


def token_at(pool: Tensor, block: int, offset: int) -> tuple[Tensor, Tensor]:
    """What `put_token` put there; of integers, what they stand for."""
    keys, values = _token_of(pool, block, offset)
    k, v = keys.reshape(values.shape).clone(), values.clone()
    if pool.dtype == torch.int8:
        scales = scales_of(pool)[block, 0, :, :, offset]
        return dequantize(k ^ -128, scales[0]), dequantize(v, scales[1])
    return k, v


def _token_of(pool: Tensor, block: int, offset: int) -> tuple[Tensor, Tensor]:
    """Views: [kv_heads, words, pack] of keys, [kv_heads, head_dim] of values."""
    kv_heads, block_size, head_dim = pool.shape[3:]
    pack = 1 if pool.dtype == torch.float16 else 4 // pool.itemsize
    keys = pool[block, 0, 0].view(kv_heads, block_size // 16, head_dim // pack, 16, pack)
    values = pool[block, 0, 1].view(kv_heads, block_size // pack, head_dim, pack)
    return keys[:, offset // 16, :, offset % 16], values[:, offset // pack, :, offset % pack]
