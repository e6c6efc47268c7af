"""The start-up check that results do not depend on batching, on this machine and in this dtype.

It computes the same rows in several company and compares bits. Exact mode is refused where it fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.activation import silu_mul
from kernels.attention import attention, plan_attention
from kernels.dispatch import KernelChoice
from kernels.linear import linear, pack
from kernels.linear.quantize import NONE, Quant
from kernels.norm import rms_norm
from shared.contracts.errors import SettingsError
from shared.engine.native_check import NativeCheck
from shared.model.config import ModelConfig

_ROWS = 40
_ROW_COUNTS = (1, 2, 3, 5, 8, 9, 16, 23, 33, 40)
_BLOCK_SIZE = 32
_SEQ_LEN = 600
_CHUNKS = ((600,), (1, 599), (512, 88), (130, 300, 169, 1))


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    passed: bool
    detail: str = ""  # what differed


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """The report: every check, and how long they took."""

    checks: tuple[Check, ...]
    duration_s: float

    @property
    def exact(self) -> bool:
        return all(check.passed for check in self.checks)

    def require_exact(self) -> None:
        """Raises SettingsError if results depend on batching here: exact mode cannot be kept."""
        failed = [f"{check.name} ({check.detail})" for check in self.checks if not check.passed]
        if failed:
            raise SettingsError(f"exact mode cannot be kept on this machine: {', '.join(failed)}", param="exact")


@torch.inference_mode()
def run_self_check(
    config: ModelConfig, dtype: torch.dtype, kernels: KernelChoice, quant: Quant = NONE, kv_dtype: str = ""
) -> SelfCheck:
    """Check the operations in the model's own shapes (the head's width shortened). Takes under two seconds.

    Args:
        kv_dtype: how KV is kept, if not as the model computes; of integers native kernels' alone.
    """
    start = time.perf_counter()
    if kernels.native is not None:
        difference = NativeCheck(config, dtype, kernels.native, quant, kv_dtype).difference()
        check = Check("native step", difference is None, difference or "")
        return SelfCheck((check,), time.perf_counter() - start)
    generator = torch.Generator().manual_seed(0)
    checks = [_check_linear(name, shape, dtype, kernels, generator) for name, shape in _linear_shapes(config).items()]
    checks.append(_check_rows("norm", _norm(config.hidden_size, dtype, generator)))
    checks.append(_check_rows("activation", _activation(config.intermediate_size, dtype, generator)))
    checks.append(_check_attention(config, dtype, generator, getattr(torch, kv_dtype) if kv_dtype else dtype))
    return SelfCheck(tuple(checks), time.perf_counter() - start)


def _linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Per linear layer (in_features, out_features)."""
    q, kv = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden = config.hidden_size
    return {
        "qkv": (hidden, q + 2 * kv),
        "o": (q, hidden),
        "gate_up": (hidden, 2 * config.intermediate_size),
        "down": (config.intermediate_size, hidden),
        "head": (hidden, min(config.vocab_size, 4096)),
    }


def _random(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def _check_linear(
    name: str, shape: tuple[int, int], dtype: torch.dtype, kernels: KernelChoice, generator: torch.Generator
) -> Check:
    in_features, out_features = shape
    weight = pack(_random(generator, dtype, out_features, in_features), kernels.linear)
    x = _random(generator, dtype, _ROWS, in_features)
    return _check_rows(f"linear {name}", (lambda rows: linear(rows, weight), x))


def _norm(size: int, dtype: torch.dtype, generator: torch.Generator) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    weight = _random(generator, dtype, size)
    return lambda rows: rms_norm(rows, weight, 1e-5), _random(generator, dtype, _ROWS, size)


def _activation(size: int, dtype: torch.dtype, generator: torch.Generator) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    return silu_mul, _random(generator, dtype, _ROWS, 2 * size)


def _check_rows(name: str, case: tuple[Callable[[Tensor], Tensor], Tensor]) -> Check:
    """Rows must be the same in any number, and at any place among any neighbours."""
    operation, x = case
    whole = operation(x)
    for count in _ROW_COUNTS:
        for first in (0, _ROWS - count):
            rows = x[first : first + count].flip(0).contiguous()
            if not torch.equal(operation(rows).flip(0), whole[first : first + count]):
                return Check(name, False, f"differs with {count} rows")
    return Check(name, True)


def _check_attention(
    config: ModelConfig, dtype: torch.dtype, generator: torch.Generator, kv_dtype: torch.dtype
) -> Check:
    """A sequence whole, in chunks, and by single tokens beside a neighbour must give the same bits."""
    heads, kv_heads, head_dim = config.num_q_heads, config.num_kv_heads, config.head_dim
    num_blocks = -(-_SEQ_LEN // _BLOCK_SIZE)
    pool = _random(generator, kv_dtype, 2 * num_blocks, 2, kv_heads, _BLOCK_SIZE, head_dim)
    table = tuple(range(num_blocks - 1, -1, -1))
    other = tuple(range(num_blocks, 2 * num_blocks))
    pool[0, :, :, _SEQ_LEN % _BLOCK_SIZE :] = float("nan")
    q = _random(generator, dtype, _SEQ_LEN, heads, head_dim)

    def attend(first: int, last: int) -> Tensor:
        plan = plan_attention([0, last - first], [last], [table], _BLOCK_SIZE, heads, kv_heads)
        return attention(q[first:last], pool, plan, config.scale)

    whole = attend(0, _SEQ_LEN)
    if not bool(torch.isfinite(whole).all()):
        return Check("attention", False, "reads slots that were never written")
    for chunks in _CHUNKS:
        if not torch.equal(torch.cat([attend(first, last) for first, last in _bounds(chunks)]), whole):
            return Check("attention", False, f"differs in chunks of {chunks}")
    for position in (0, 63, 64, 511, 512, _SEQ_LEN - 1):
        plan = plan_attention([0, 3, 4], [_SEQ_LEN - 1, position + 1], [other, table], _BLOCK_SIZE, heads, kv_heads)
        rows = torch.cat((q[:3], q[position : position + 1]))
        if not torch.equal(attention(rows, pool, plan, config.scale)[3], whole[position]):
            return Check("attention", False, f"differs at position {position} beside a neighbour")
    return Check("attention", True)


def _bounds(chunks: Sequence[int]) -> list[tuple[int, int]]:
    ends = [sum(chunks[: i + 1]) for i in range(len(chunks))]
    return list(zip([0, *ends[:-1]], ends, strict=True))
