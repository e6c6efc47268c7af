"""Which files make a model folder, and a look at them before anything is started. Without torch."""

from __future__ import annotations

import json
from pathlib import Path

from shared.contracts.errors import SettingsError
from shared.model.config import load_config, require_kept

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def weight_map(folder: Path) -> dict[str, str] | None:
    """The file name of each tensor by the folder's index; None when one file holds everything.

    Raises:
        SettingsError: the index is malformed, or names a file outside the folder.
    """
    index = folder / INDEX
    if (folder / SINGLE).exists() or not index.exists():
        return None
    try:
        found = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=_without_repeats)["weight_map"]
    except _Repeated as exc:
        raise SettingsError(f"{index}: {exc.name}: stands there twice", param=exc.name) from exc
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise SettingsError(f"{index} is not an index of weight files", param=INDEX) from exc
    if not isinstance(found, dict) or not found:
        raise SettingsError(f"{index} is not an index of weight files", param=INDEX)
    for name, file_name in found.items():
        if not isinstance(file_name, str) or not file_name.endswith(".safetensors"):
            raise SettingsError(f"{index}: {name}: {file_name!r} is not a safetensors file", param=name)
        if Path(file_name).name != file_name or "\0" in file_name:
            raise SettingsError(f"{index}: {name}: {file_name!r} is outside the folder", param=name)
    return dict(found)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, in order: one file, or those its index names."""
    names = weight_map(folder)
    return [folder / name for name in ([SINGLE] if names is None else sorted(set(names.values())))]


def check_model_folder(folder: Path, *, weights: bool = True, quant: str = "none") -> None:
    """Raise SettingsError, naming file and field or tensor, for a folder that can't be served.

    Args:
        weights: False when nobody will read them, as with fake workers.
        quant: the setting of how its matrices are to be kept.
    """
    config = load_config(folder)
    if weights:
        require_kept(config, folder, quant)
    wanted = [folder / "tokenizer.json", *(weight_files(folder) if weights else [])]
    for path in wanted:
        if not path.is_file():
            raise SettingsError(f"model folder {folder} has no {path.name}", param=path.name)
    if weights:
        from shared.model.checkpoint import check_checkpoint

        check_checkpoint(folder, config)


class _Repeated(ValueError):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise _Repeated(name)
        found[name] = value
    return found
