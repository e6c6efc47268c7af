"""The tensors of a Llama GGUF file as they are kept there: floats as floats, blocks of four bits as their own integers.

What is not a float or a block of four bits is dequantized to float32, which holds every value of 8-bit blocks exactly.
Needs numpy and gguf; neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from shared.contracts.errors import SettingsError
from shared.model.checkpoint import GROUP, INTEGERS, MINIMA, SCALES
from shared.model.convert_gguf import tensor_name, unpermute
from shared.model.gguf_reader import plain

_TYPES = gguf.GGMLQuantizationType
_FLOATS = {
    _TYPES.F32: ("float32", np.float32),
    _TYPES.F16: ("float16", np.float16),
    _TYPES.BF16: ("bfloat16", np.uint16),
}
_FOUR_BITS = {_TYPES.Q4_0: 18, _TYPES.Q4_1: 20}
"""Bytes of a block."""
READ = (*_FLOATS, *_FOUR_BITS, _TYPES.Q8_0)
_INTEGER_LAYERS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


@dataclass(frozen=True, slots=True)
class Stored:
    """An array with the name of its type in a safetensors file; bfloat16 is uint16."""

    dtype: str
    values: npt.NDArray[Any]


def stored_tensors(path: Path, reader: gguf.GGUFReader, fields: Mapping[str, Any]) -> Iterator[tuple[str, Stored]]:
    """(Hugging Face name, values) of every tensor; one of four bits comes as integers, scales and minima.

    Raises:
        SettingsError: a tensor is not of such a model, or of a type that is not read; names file, tensor and type.
    """
    try:
        count = int(fields["llama.attention.head_count"])
        heads = {"attn_q": count, "attn_k": int(fields.get("llama.attention.head_count_kv", count))}
    except (KeyError, TypeError, ValueError) as exc:
        field = "llama.attention.head_count"
        raise SettingsError(f"{path}: {field}: is missing, or differs from layer to layer", param=field) from exc
    for tensor in reader.tensors:
        told = f"{path}: {plain(tensor.name)}"
        try:
            name = tensor_name(tensor.name)
        except (KeyError, IndexError, ValueError) as exc:
            raise SettingsError(f"{told}: is not part of a Llama", param=plain(tensor.name)) from exc
        if tensor.tensor_type not in READ:
            kinds = ", ".join(kind.name for kind in READ)
            kind_told = f"type {tensor.tensor_type.name} is not supported, only {kinds}"
            raise SettingsError(f"{told}: {kind_told}", param=tensor.name)
        kind = tensor.name.split(".")[-2]
        try:
            parts = _parts(tensor, kind in _INTEGER_LAYERS)
            if kind in heads:
                parts = {end: Stored(part.dtype, unpermute(part.values, heads[kind])) for end, part in parts.items()}
        except (ValueError, ArithmeticError) as exc:
            shape = plain(tuple(int(size) for size in reversed(tensor.shape)))
            many = f" for {heads[kind]} heads" if kind in heads else ""
            raise SettingsError(f"{told}: is no matrix{many}, its shape is {shape}", param=tensor.name) from exc
        for part_name, stored in parts.items():
            yield name + part_name, stored


def _parts(tensor: gguf.ReaderTensor, may_be_integers: bool) -> dict[str, Stored]:
    """What a tensor is kept as, by what its name ends in."""
    if tensor.tensor_type in _FLOATS:
        dtype, view = _FLOATS[tensor.tensor_type]
        return {"": Stored(dtype, np.asarray(tensor.data).view(view))}
    if tensor.tensor_type in _FOUR_BITS and may_be_integers:
        blocks = np.asarray(tensor.data).reshape(len(tensor.data), -1, _FOUR_BITS[tensor.tensor_type])
        parts = _four_bits(blocks, tensor.tensor_type)
        if bool(np.isfinite(parts[MINIMA].values).all()):
            return parts
    # a table of tokens is looked up row by row, and a head has 8 bits at least
    return {"": Stored("float32", gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False))}


def _four_bits(blocks: npt.NDArray[np.uint8], kind: gguf.GGMLQuantizationType) -> dict[str, Stored]:
    """[out, groups, bytes] → integers two a byte, as `checkpoint` keeps them, float16 scales and minima.

    A block begins with its scale, then its minimum where it has one. Byte j holds weight j low and weight j + 16 high.
    """
    rows, groups, _ = blocks.shape
    scales = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)[:, :, 0]
    if kind == _TYPES.Q4_1:
        minima, packed = np.ascontiguousarray(blocks[:, :, 2:4]).view(np.float16)[:, :, 0], blocks[:, :, 4:]
    else:
        with np.errstate(over="ignore"):
            minima, packed = scales * np.float16(-8), blocks[:, :, 2:]  # exact: a power of two
    integers = np.concatenate((packed & 15, packed >> 4), axis=2).reshape(rows, groups * GROUP)
    return {
        INTEGERS: Stored("uint8", integers[:, 0::2] | integers[:, 1::2] << 4),
        SCALES: Stored("float16", scales),
        MINIMA: Stored("float16", minima),
    }
