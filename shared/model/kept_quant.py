"""How a model's matrices are kept: as a setting says, or as its checkpoint already keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kernels.linear.quantize import INT8_GROUP, NONE, Quant
from shared.contracts.errors import SettingsError
from shared.model.config import ModelConfig
from shared.model.packing import FIELD, GROUPS


def quant_for(config: ModelConfig, folder: Path, setting: str, known: Mapping[str, Quant]) -> Quant:
    """The format of a model's matrices.

    Args:
        setting: a key of `known`; "none" for a checkpoint of integers means those.

    Raises:
        SettingsError: the checkpoint holds integers, and the setting would have others (param `quant`).
    """
    packing = config.packing
    if packing is None:
        return known[setting]
    if setting != NONE.name:
        told = f"{folder / 'config.json'}: {FIELD}: its weights are {packing.name} and stay so, which is what"
        raise SettingsError(f"quant {setting!r}: {told} quant {NONE.name!r} means", param="quant")
    group = INT8_GROUP if packing.bits == 8 else packing.group or max(GROUPS)
    return Quant(packing.name, packing.bits, group, in_steps=packing.bits == 4, as_kept=True)
