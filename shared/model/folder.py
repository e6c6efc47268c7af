"""Which files make a model folder, and a quick look at them before anything is started. Without torch."""

from __future__ import annotations

import json
from pathlib import Path

from shared.contracts.errors import SettingsError
from shared.model.config import load_config

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, in order: one file, or those its index names."""
    index = folder / INDEX
    if (folder / SINGLE).exists() or not index.exists():
        return [folder / SINGLE]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as exc:
        raise SettingsError(f"{index} is not an index of weight files", param=INDEX) from exc
    if any(Path(name).name != name for name in names):
        raise SettingsError(f"{index} names a file outside its folder", param=INDEX)
    return [folder / name for name in names]


def check_model_folder(folder: Path, *, weights: bool = True) -> None:
    """Raise SettingsError, naming file and field, for a folder that can't be served: the configuration is read, of the
    rest only whether it is there.

    Args:
        weights: False when nobody will read them, as with fake workers.
    """
    load_config(folder)
    wanted = [folder / "tokenizer.json", *(weight_files(folder) if weights else [])]
    for path in wanted:
        if not path.is_file():
            raise SettingsError(f"model folder {folder} has no {path.name}", param=path.name)
