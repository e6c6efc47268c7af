"""The launches a host wrapper makes, recorded instead of run: what is compiled ahead is what would be launched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime.jit import JITFunction

_POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "launch_pdl")


@dataclass(frozen=True, slots=True)
class Recorded:
    """A kernel with the types and constants of one launch."""

    kernel: Any  # triton.JITFunction
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int], list[list[Any]]]
    options: dict[str, Any]


def record(call: Callable[[], object]) -> list[Recorded]:
    """Every launch `call` makes, in order. Nothing runs on a device, so what it returns is not a result."""
    recorded: list[Recorded] = []
    with _recording(recorded):
        call()
    return recorded


@contextmanager
def _recording(into: list[Recorded]) -> Iterator[None]:
    run = JITFunction.run

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        into.append(_typed(self, args, kwargs))

    JITFunction.run = note
    try:
        yield
    finally:
        JITFunction.run = run


def _typed(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recorded:
    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    bound = kernel.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for parameter in kernel.params:
        value = bound.arguments[parameter.name]
        kind, divisible = _kind(value, parameter)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[parameter.name] = value
        elif divisible:
            attributes[(parameter.num,)] = [["tt.divisibility", 16]]
    return Recorded(kernel, signature, constants, attributes, options)


def _kind(value: Any, parameter: Any) -> tuple[str, bool]:
    """Triton's own rules: an integer 1 is a constant, multiples of 16 are known to be such."""
    special = not parameter.do_not_specialize
    if parameter.is_constexpr or value is None:
        return "constexpr", False
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype], special and value.data_ptr() % 16 == 0
    if parameter.annotation_type:
        return parameter.annotation_type, special and isinstance(value, int) and value % 16 == 0
    if isinstance(value, bool):
        return "i1", False
    if isinstance(value, int):
        if special and value == 1:
            return "constexpr", False
        return "i32" if -(1 << 31) <= value < 1 << 31 else "i64", special and value % 16 == 0
    return "fp32", False
