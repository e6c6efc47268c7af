"""How a model's matrices are kept: as a setting says, or as its checkpoint already keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kernels.linear.quantize import INT8_GROUP, Quant
from shared.model.config import ModelConfig, require_kept
from shared.model.packing import GROUPS


def quant_for(config: ModelConfig, folder: Path, setting: str, known: Mapping[str, Quant]) -> Quant:
    """The format of a model's matrices.

    Args:
        setting: a key of `known`; "none" for a checkpoint of integers means those.

    Raises:
        SettingsError: the checkpoint holds integers, and the setting would have others (param `quant`).
    """
    require_kept(config, folder, setting)
    packing = config.packing
    if packing is None:
        return known[setting]
    group = INT8_GROUP if packing.bits == 8 else packing.group or max(GROUPS)
    return Quant(packing.name, packing.bits, group, in_steps=packing.bits == 4, as_kept=True)
