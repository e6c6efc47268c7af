"""GPTQ, AWQ and compressed-tensors checkpoints of a model of floats, written from the formats' public descriptions.

Straightforward loops that share nothing with what reads such files.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
MATRICES = ("_proj.weight", "w1.weight", "w2.weight", "w3.weight")


@dataclass(frozen=True)
class Form:
    """What is written. `act_order`: groups are of inputs that do not lie together."""

    method: str = "gptq"
    bits: int = 4
    group: int = 32  # -1: a row
    sym: bool = False
    act_order: bool = False
    version: str = "gptq"  # checkpoint_format of GPTQ
    floats: tuple[str, ...] = ()  # parts of names of matrices that stay as they are


@dataclass(frozen=True)
class Integers:
    """q [out, in], each input's group [in], zeros and scales [out, groups]."""

    q: npt.NDArray[np.int64]
    group_of: npt.NDArray[np.int64]
    zeros: npt.NDArray[np.int64]
    scales: npt.NDArray[np.float16]

    def values(self) -> npt.NDArray[np.float64]:
        scales = self.scales.astype(np.float64)
        return scales[:, self.group_of] * (self.q - self.zeros[:, self.group_of])


def quantized(weight: Tensor, form: Form, seed: int = 0) -> Integers:
    values, most = weight.double().numpy(), 2**form.bits - 1
    out, inputs = values.shape
    group = inputs if form.group == -1 else form.group
    group_of = np.arange(inputs) // group
    if form.act_order:
        group_of = np.random.default_rng(seed).permutation(group_of)
    groups = int(group_of.max()) + 1
    zeros, scales = np.zeros((out, groups), np.int64), np.zeros((out, groups), np.float16)
    q = np.zeros((out, inputs), np.int64)
    for g in range(groups):
        mine = values[:, group_of == g]
        if form.sym:
            scale = 2 * np.abs(mine).max(1) / most
            zeros[:, g] = (most + 1) // 2
        else:
            low, high = np.minimum(mine.min(1), 0), np.maximum(mine.max(1), 0)
            scale = (high - low) / most
            zeros[:, g] = np.clip(np.round(-low / scale), 0, most)
        scales[:, g] = scale.astype(np.float16)
        steps = mine / scales[:, g].astype(np.float64)[:, None]
        q[:, group_of == g] = np.clip(np.round(steps) + zeros[:, g][:, None], 0, most)
    return Integers(q, group_of, zeros, scales)


def words(numbers: npt.NDArray[np.int64], bits: int, order: tuple[int, ...] = ()) -> npt.NDArray[np.int64]:
    """[rows, n] → [rows, n * bits / 32]: number `order[i]` of a word's in its i-th lowest bits."""
    per = 32 // bits
    rows, count = numbers.shape
    made = np.zeros((rows, -(-count // per)), np.int64)
    for first in range(0, count, per):
        for i in range(per):
            if first + (order[i] if order else i) < count:
                made[:, first // per] |= numbers[:, first + (order[i] if order else i)] << (bits * i)
    return made


def int32(numbers: npt.NDArray[np.int64]) -> Tensor:
    return torch.from_numpy((numbers % 2**32).astype(np.uint32).view(np.int32).copy())


def tensors(found: Integers, form: Form) -> dict[str, Tensor]:
    """By what their names end in."""
    scales = torch.from_numpy(found.scales.copy())
    if form.method == "awq":
        return {
            "qweight": int32(words(found.q.T, 4, AWQ_ORDER)),
            "qzeros": int32(words(found.zeros.T, 4, AWQ_ORDER)),
            "scales": scales.T.contiguous(),
        }
    if form.method == "gptq":
        zeros = words(found.zeros.T, form.bits)
        if form.version == "gptq":
            zeros -= 0x11111111 if form.bits == 4 else 0x01010101
        return {
            "qweight": int32(words(found.q, form.bits).T),
            "qzeros": int32(zeros),
            "scales": scales.T.contiguous(),
            "g_idx": torch.from_numpy(found.group_of.astype(np.int32)),
        }
    made = {
        "weight_packed": int32(words(found.q, form.bits)),
        "weight_scale": scales,
        "weight_shape": torch.tensor(found.q.shape),
    }
    if not form.sym:
        made["weight_zero_point"] = int32(words(found.zeros.T, form.bits).T)
    if form.act_order:
        made["weight_g_idx"] = torch.from_numpy(found.group_of.astype(np.int32))
    return made


def configuration(form: Form) -> dict[str, Any]:
    if form.method == "awq":
        told = {"bits": form.bits, "group_size": form.group, "zero_point": True, "version": "gemm"}
        return {"quant_method": "awq", **told}
    if form.method == "gptq":
        told = {"bits": form.bits, "group_size": form.group, "sym": form.sym, "desc_act": form.act_order}
        return {"quant_method": "gptq", "checkpoint_format": form.version, **told}
    weights = {"num_bits": form.bits, "type": "int", "symmetric": form.sym}
    weights |= {"strategy": "channel"} if form.group == -1 else {"strategy": "group", "group_size": form.group}
    weights |= {"actorder": "group"} if form.act_order else {}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    told = {"format": "pack-quantized", "config_groups": groups, "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors", **told}


def write(plain: Path, packed: Path, dequantized: Path, form: Form) -> dict[str, Integers]:
    """The checkpoint `plain` in a form, and the same values as floats. Returns the integers of its matrices."""
    found: dict[str, Integers] = {}
    integers: dict[str, Tensor] = {}
    floats: dict[str, Tensor] = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if not name.endswith(MATRICES) or any(part in name for part in form.floats):
            integers[name] = floats[name] = weight
            continue
        # q, k and v see the same inputs, and so do gates and ups: one order for all of a layer
        one = quantized(weight, form, seed=weight.shape[1])
        found[name], floats[name] = one, torch.from_numpy(one.values()).float()
        integers |= {name.removesuffix("weight") + end: part for end, part in tensors(one, form).items()}
    for folder, kept in ((packed, integers), (dequantized, floats)):
        folder.mkdir()
        for path in plain.iterdir():
            if path.suffix == ".json":
                shutil.copy(path, folder)
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(packed, quantization_config=configuration(form))
    return found


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
