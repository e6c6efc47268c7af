from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared.contracts.errors import SettingsError
from shared.model.folder import INDEX, check_model_folder
from tests.tiny_models import make_tiny_model
from tests.unit.test_model_config import PLAIN


def fill(folder: Path, *names: str, **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps(PLAIN | changes))
    for name in names:
        (folder / name).touch()
    return folder


def test_a_whole_folder_passes_and_fakes_need_no_weights(tmp_path: Path) -> None:
    check_model_folder(fill(tmp_path, "tokenizer.json"), weights=False)
    (make_tiny_model(tmp_path / "real", num_hidden_layers=1) / "tokenizer.json").touch()
    check_model_folder(tmp_path / "real")


def test_weights_that_contradict_the_configuration_are_refused_by_file_and_tensor(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, num_hidden_layers=1)
    (folder / "tokenizer.json").touch()
    config = json.loads((folder / "config.json").read_text())
    for changes, words in (
        ({"intermediate_size": 128}, r"model\.safetensors: model\.layers\.0\.mlp\..*_proj\.weight: shape .* should be"),
        ({"num_hidden_layers": 2}, r"model\.layers\.1\..*: is missing from model\.safetensors"),
        ({"attention_bias": True}, r"model\.layers\.0\.self_attn\.q_proj\.bias: is missing"),
        ({"tie_word_embeddings": False}, r"lm_head\.weight: is missing .*tie_word_embeddings"),
    ):
        (folder / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(SettingsError, match=words):
            check_model_folder(folder)


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
