"""Checkpoints whose matrices are small integers: what `quantization_config` says, and which tensors stand there.

Three formats, each in the words of its own files, of a matrix [out, in] in groups of inputs; bits lie lowest first:

    GPTQ                 qweight [in / per, out], qzeros [groups, out / per], scales [groups, out], g_idx [in]
    AWQ, version gemm    qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]
    compressed-tensors   weight_packed [out, in / per], weight_scale [out, groups], weight_shape [2], and where they are
                         there weight_zero_point [out / per, groups] and weight_g_idx [in]

`per` is how many integers an int32 has. A value is scale * (integer - zero). Without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shared.model.fields import Fields

FIELD = "quantization_config"
GROUPS = (32, 64, 128)
Method = Literal["gptq", "awq", "compressed-tensors"]
_INTEGERS, _FLOATS = ("I32",), ("F16", "BF16", "F32")
_INDICES = ("I32", "I64")
_ENDS = {
    "gptq": (".qweight", ".qzeros", ".scales", ".g_idx"),
    "awq": (".qweight", ".qzeros", ".scales"),
    "compressed-tensors": (".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx"),
}
ENDS = tuple(end for ends in _ENDS.values() for end in ends)
"""What names of parts end in, of all formats."""


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of a matrix: its shape, the types it may have, and whether it must be there."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    required: bool = True


@dataclass(frozen=True, slots=True)
class Packing:
    """How a checkpoint keeps the matrices that are integers; others may be floats.

    Attributes:
        bits: 4 or 8; of 8 every output has one scale, and zero is 128.
        group: inputs that share a scale and a zero: 32, 64 or 128; 0 for all of a row.
        less_one: zeros are stored less one: GPTQ's first version.
        symmetric: of compressed-tensors: no zeros are stored, they are the middle.
        ordered: inputs are grouped in an order of their own, which the files must tell; they may at any rate.
    """

    method: Method
    bits: int
    group: int
    less_one: bool = False
    symmetric: bool = False
    ordered: bool = False

    @property
    def name(self) -> str:
        """As settings and records of quality name what such a checkpoint is computed with: "gptq-int4-g128"."""
        return f"{self.method}-int{self.bits}" + (f"-g{self.group}" if self.group else "")

    @property
    def per(self) -> int:
        return 32 // self.bits

    def groups(self, in_features: int) -> int:
        """Groups of a row; the last may be short."""
        return -(-in_features // self.group) if self.group else 1

    def split(self, name: str) -> tuple[str, str]:
        """The matrix that a tensor is a part of, by the name its floats would have, and what the part's ends in.

        `("", "")` for a tensor that is no part.
        """
        for end in _ENDS[self.method]:
            if name.endswith(end):
                return name.removesuffix(end) + ".weight", end
        return "", ""

    def parts(self, shape: tuple[int, ...]) -> dict[str, Part]:
        """What a matrix [out, in] is kept as, by what the names end in."""
        out, inputs = shape
        groups = self.groups(inputs)
        if self.method == "compressed-tensors":
            found = [
                Part((out, -(-inputs // self.per)), _INTEGERS),
                Part((out, groups), _FLOATS),
                Part((2,), _INDICES),
                Part((-(-out // self.per), groups), _INTEGERS, required=not self.symmetric),
                Part((inputs,), _INDICES, required=self.ordered),
            ]
        else:
            words = (inputs, self._words(out)) if self.method == "awq" else (self._words(inputs), out)
            found = [
                Part(words, _INTEGERS),
                Part((groups, self._words(out)), _INTEGERS),
                Part((groups, out), _FLOATS),
                Part((inputs,), _INDICES, required=self.ordered),
            ]
        return dict(zip(_ENDS[self.method], found, strict=False))

    def _words(self, count: int) -> int:
        """Words of so many integers; -1, which no tensor has of anything, where they fill none."""
        return -1 if count % self.per else count // self.per


def parse_packing(fields: Fields) -> Packing | None:
    """What `config.json` says of its integers; None where it holds floats alone.

    Raises:
        SettingsError: they are of a kind that is not read; names the field.
    """
    raw = fields.raw.get(FIELD)
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise fields.error(FIELD, f"{raw!r} is not an object")
    inner = fields.within(FIELD, raw)
    told = _told(raw, "quant_method", "method")  # the second is GPTQModel's newer name
    method = raw.get(told)
    reader = _READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise inner.error(told, f"{method!r} is not supported, only {', '.join(_READERS)}")
    return reader(inner)


def _gptq(fields: Fields) -> Packing:
    raw = fields.raw
    told = _told(raw, "checkpoint_format", "format")
    written = raw.get(told) or "gptq"
    if written not in ("gptq", "gptq_v2"):
        raise fields.error(told, f"{written!r} is not supported, only gptq and gptq_v2")
    if raw.get("is_marlin_format"):
        raise fields.error("is_marlin_format", "weights in Marlin's order are not supported")
    if raw.get("lm_head"):
        raise fields.error("lm_head", "an output head of integers is not supported")
    bits = _bits(fields, "bits")
    group = _group(fields, "group_size", bits)
    return Packing("gptq", bits, group, less_one=written == "gptq", ordered=fields.flag("desc_act") and group > 0)


def _awq(fields: Fields) -> Packing:
    raw = fields.raw
    told = _told(raw, "version", "checkpoint_format", "format")
    version = raw.get(told) or "gemm"
    if not isinstance(version, str) or version.lower() != "gemm":
        raise fields.error(told, f"{version!r} is not supported, only gemm")
    if raw.get("zero_point", True) is not True:
        raise fields.error("zero_point", f"{raw['zero_point']!r} is not supported, only true")
    width = _told(raw, "bits", "w_bit")
    bits = _bits(fields, width)
    if bits != 4:
        raise fields.error(width, f"{bits} is not supported, only 4")
    return Packing("awq", bits, _group(fields, _told(raw, "group_size", "q_group_size"), bits))


def _compressed(fields: Fields) -> Packing:
    raw = fields.raw
    if raw.get("format") != "pack-quantized":
        raise fields.error("format", f"{raw.get('format')!r} is not supported, only pack-quantized")
    groups = raw.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise fields.error("config_groups", "only one group of layers, all alike, is supported")
    if raw.get("kv_cache_scheme") is not None:
        raise fields.error("kv_cache_scheme", "scales of KV are not supported; [kv] dtype says how KV is kept")
    ((name, group),) = groups.items()
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise fields.error("config_groups", f"{name} says nothing of its weights")
    inner = fields.within("config_groups", groups).within(name, group)
    for activations in ("input_activations", "output_activations"):
        if group.get(activations) is not None:
            raise inner.error(activations, "integers of activations are not supported")
    weights: dict[str, Any] = group["weights"]
    told = inner.within("weights", weights)
    if weights.get("type", "int") != "int":
        raise told.error("type", f"{weights['type']!r} is not supported, only int")
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "channel")
    if strategy not in ("group", "channel"):
        raise told.error("strategy", f"{strategy!r} is not supported, only group and channel")
    bits = _bits(told, "num_bits")
    size = _group(told, "group_size", bits) if strategy == "group" else 0
    symmetric = weights.get("symmetric", True)
    if not isinstance(symmetric, bool):
        raise told.error("symmetric", f"{symmetric!r} is not true or false")
    if bits == 8 and not symmetric:
        raise told.error("symmetric", "false is not supported with 8 bits")
    return Packing("compressed-tensors", bits, size, symmetric=symmetric, ordered=weights.get("actorder") == "group")


def _told(raw: Mapping[str, Any], *names: str) -> str:
    """The first of a field's names that says something; the first of all where none does."""
    return next((name for name in names if raw.get(name) is not None), names[0])


def _bits(fields: Fields, field: str) -> int:
    bits = fields.positive(field)
    if bits not in (4, 8):
        raise fields.error(field, f"{bits} is not supported, only 4 and 8")
    return bits


def _group(fields: Fields, field: str, bits: int) -> int:
    size = fields.raw.get(field, -1)
    if size == -1 and not isinstance(size, bool):
        return 0
    if bits == 8:
        raise fields.error(field, f"{size!r} is not supported with 8 bits, only -1: one scale for each output")
    if isinstance(size, bool) or size not in GROUPS:
        raise fields.error(field, f"{size!r} is not supported, only {', '.join(map(str, GROUPS))} and -1")
    return int(size)


_READERS: dict[str, Callable[[Fields], Packing]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
}
