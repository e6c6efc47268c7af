from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared.contracts.errors import SettingsError
from shared.model.folder import INDEX, SINGLE, check_model_folder
from tests.unit.test_model_config import PLAIN


def fill(folder: Path, *names: str, **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps(PLAIN | changes))
    for name in names:
        (folder / name).touch()
    return folder


def test_a_whole_folder_passes_and_fakes_need_no_weights(tmp_path: Path) -> None:
    check_model_folder(fill(tmp_path, "tokenizer.json"), weights=False)
    check_model_folder(fill(tmp_path, "tokenizer.json", SINGLE))


def test_a_wrong_folder_is_refused_with_file_and_field(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot read .*config\.json"):
        check_model_folder(tmp_path)
    with pytest.raises(SettingsError, match=r"config\.json: architectures: \['MistralForCausalLM'\] is not supported"):
        check_model_folder(fill(tmp_path, architectures=["MistralForCausalLM"]))
    with pytest.raises(SettingsError, match=r"has no tokenizer\.json"):
        check_model_folder(fill(tmp_path))
    with pytest.raises(SettingsError, match=r"has no model\.safetensors"):
        check_model_folder(fill(tmp_path, "tokenizer.json"))


def test_every_file_of_an_index_must_be_there(tmp_path: Path) -> None:
    fill(tmp_path, "tokenizer.json", "a.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    with pytest.raises(SettingsError, match=r"has no b\.safetensors"):
        check_model_folder(tmp_path)
