from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.contracts.errors import SettingsError
from shared.model.config import load_config
from shared.model.folder import INDEX, SINGLE
from shared.model.quantization import TensorParallel
from shared.model.weights import Weights, model_digest
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(folder / SINGLE)
    for name, tensor in change.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / SINGLE)


def open_weights(folder: Path) -> None:
    with Weights(folder, load_config(folder)):
        pass


def test_reads_tensors(folder: Path) -> None:
    with Weights(folder, load_config(folder)) as weights:
        expected = load_file(folder / SINGLE)["model.layers.0.mlp.up_proj.weight"]
        assert torch.equal(weights["model.layers.0.mlp.up_proj.weight"], expected)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"model.norm.weight": None}, "model.norm.weight"),
        ({"model.norm.weight": torch.ones(3)}, "model.norm.weight"),
        ({"model.layers.1.mlp.up_proj.weight": torch.ones(2)}, "model.layers.1.mlp.up_proj.weight"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, "model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_missing_extra_and_misshaped_tensors_are_named(
    folder: Path, change: dict[str, torch.Tensor | None], name: str
) -> None:
    rewrite(folder, change)
    with pytest.raises(SettingsError, match=str(folder)) as caught:
        open_weights(folder)
    assert caught.value.param == name


def test_broken_and_missing_files(folder: Path) -> None:
    (folder / SINGLE).write_bytes(b"\xff" * 64)
    with pytest.raises(SettingsError, match=SINGLE):
        open_weights(folder)
    (folder / SINGLE).unlink()
    with pytest.raises(SettingsError, match=SINGLE):
        open_weights(folder)


def test_an_index_of_several_files(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    index = {"weight_map": {name: file for file, members in parts.items() for name in members}}
    (folder / INDEX).write_text(json.dumps(index))
    with Weights(folder, load_config(folder)) as weights:
        assert all(torch.equal(weights[name], tensors[name]) for name in names)
    index["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(SettingsError, match="outside"):
        open_weights(folder)


def test_the_digest_follows_the_bytes(folder: Path) -> None:
    before = model_digest(folder)
    assert before == model_digest(folder)
    assert len(before) == 32
    rewrite(folder, {"model.norm.weight": torch.full((64,), 2.0)})
    assert model_digest(folder) != before


def test_only_one_tensor_parallel_rank() -> None:
    assert TensorParallel().local(9) == 9
    with pytest.raises(SettingsError):
        TensorParallel(0, 2)
