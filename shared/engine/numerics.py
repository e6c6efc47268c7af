"""The `numerics` id: two workers with the same id compute the same bits."""

from __future__ import annotations

import hashlib

import torch

from kernels.attention import KEY_TILE, QUERY_TILE, SPLIT
from kernels.dispatch import KernelChoice
from kernels.linear import ROW_TILE
from kernels.linear.quantize import NONE, RULE, Quant

FORMAT = 1
"""Raised when a kernel's accumulation order changes."""
_FEATURES = ("_is_avx2_supported", "_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported")


def numerics_id(dtype: str, kernels: KernelChoice, quant: Quant = NONE, kv_dtype: str = "") -> str:
    """Id of everything that decides the bits of a logit: kernel build, instruction set, dtype, integers of weights and
    of KV, tile constants, torch.

    Args:
        kv_dtype: of the pool; "" for the one that is computed in.

    The thread count is left out: rows do not depend on it, and the tests hold that.
    """
    tiles = f"r{ROW_TILE}q{QUERY_TILE}k{KEY_TILE}s{SPLIT}"
    kind = f"{dtype}-{quant.name}.{RULE}" if quant.bits else dtype
    if kv_dtype not in ("", dtype):
        kind += f"-kv.{kv_dtype}"
    where = _graphics() if kernels.triton else _instruction_set()
    return f"{FORMAT}-{kernels.build}-{where}-{kind}-{tiles}-torch{torch.__version__}"


def _graphics() -> str:
    """CUDA's version and the current card's architecture, whose tensor cores sum in an order of their own."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else ()
    return f"cuda{torch.version.cuda}" + (f"-sm{''.join(map(str, capability))}" if capability else "")


def _instruction_set() -> str:
    """torch's own dispatch level, and a digest of the processor features its libraries dispatch on by themselves."""
    features = [name for name in _FEATURES if _has(name)]
    digest = hashlib.blake2b("|".join(features).encode(), digest_size=3).hexdigest()
    return f"{torch.backends.cpu.get_cpu_capability().lower().replace(' ', '')}.{digest}"


def _has(name: str) -> bool:
    probe = getattr(torch.cpu, name, None)
    return bool(probe()) if probe is not None else False
