from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.contracts.errors import SettingsError
from shared.model.checkpoint import EMBEDDING, HEAD
from shared.model.config import load_config
from shared.model.digest import model_digest
from shared.model.folder import INDEX, SINGLE
from shared.model.quantization import TensorParallel
from shared.model.weights import Weights
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_mapped_tensor_is_the_tensor_and_writes_reach_no_file(folder: Path, dtype: torch.dtype) -> None:
    rewrite(folder, {EMBEDDING: load_file(folder / SINGLE)[EMBEDDING].to(dtype)})
    before = (folder / SINGLE).read_bytes()
    with Weights(folder, load_config(folder)) as weights:
        mapped, read = weights.mapped(EMBEDDING), weights[EMBEDDING]
    # it outlives the files' being open
    assert mapped.dtype == dtype
    assert torch.equal(mapped, read)
    mapped[0] += 1
    assert (folder / SINGLE).read_bytes() == before


def test_a_tied_embedding_under_the_heads_name_is_mapped(folder: Path) -> None:
    matrix = load_file(folder / SINGLE)[EMBEDDING]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    rewrite(folder, {EMBEDDING: None, HEAD: matrix})
    with Weights(folder, load_config(folder)) as weights:
        assert torch.equal(weights.mapped(EMBEDDING), matrix)


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
        ({"model.norm.weight": torch.ones(64, dtype=torch.int8)}, "model.norm.weight"),
        ({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}, "model.norm.weight"),
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


@pytest.fixture
def sharded(folder: Path) -> Path:
    """`folder` as two files, `a` with the first, third, … tensor by name and `b` with the others."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, members in parts.items() for name in members}}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


IN_A = "model.embed_tokens.weight"
IN_B = "model.layers.0.input_layernorm.weight"


def reindex(folder: Path, **changes: str | None) -> None:
    index = json.loads((folder / INDEX).read_text())
    for name, file in changes.items():
        index["weight_map"][name] = file
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file is not None}
    (folder / INDEX).write_text(json.dumps(index))


def test_an_index_of_several_files(tiny: Path, sharded: Path) -> None:
    tensors = load_file(tiny / SINGLE)
    with Weights(sharded, load_config(sharded)) as weights:
        assert all(torch.equal(weights[name], tensor) for name, tensor in tensors.items())


def test_shards_that_contradict_their_index_are_refused_by_file_and_tensor(sharded: Path) -> None:
    def refused(name: str, *words: str) -> None:
        with pytest.raises(SettingsError) as caught:
            open_weights(sharded)
        assert caught.value.param == name
        assert all(word in caught.value.message for word in words), caught.value.message

    before = (sharded / INDEX).read_text()
    reindex(sharded, **{IN_A: "b.safetensors"})
    refused(IN_A, "a.safetensors", "it is in b.safetensors")
    reindex(sharded, **{IN_A: None})
    refused(IN_A, "a.safetensors", "says nothing of it")

    (sharded / INDEX).write_text(before)
    b = load_file(sharded / "b.safetensors")
    save_file({name: tensor for name, tensor in b.items() if name != IN_B}, sharded / "b.safetensors")
    refused(IN_B, "b.safetensors", "is missing here")
    save_file(b | {IN_A: load_file(sharded / "a.safetensors")[IN_A]}, sharded / "b.safetensors")
    refused(IN_A, "b.safetensors", "a.safetensors")
    (sharded / "b.safetensors").unlink()
    refused("b.safetensors", "b.safetensors")


@pytest.mark.parametrize(
    "file", ["../elsewhere.safetensors", "/a.safetensors", "..", "a.bin", "", 5, "x/a.safetensors"]
)
def test_an_index_names_only_files_beside_it(sharded: Path, file: Any) -> None:
    reindex(sharded, **{IN_A: file})
    with pytest.raises(SettingsError, match=r"is outside the folder|is not a safetensors file") as caught:
        open_weights(sharded)
    assert caught.value.param == IN_A


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_a_malformed_index_is_refused(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    with pytest.raises(SettingsError, match="is not an index"):
        open_weights(sharded)


def test_a_tensor_named_twice_in_the_index_is_refused(sharded: Path) -> None:
    text = (sharded / INDEX).read_text()
    (sharded / INDEX).write_text(text.replace('"weight_map": {', f'"weight_map": {{"{IN_B}": "a.safetensors", '))
    with pytest.raises(SettingsError, match="stands there twice") as caught:
        open_weights(sharded)
    assert caught.value.param == IN_B


def set_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_tied_heads(folder: Path) -> None:
    embedding = load_file(folder / SINGLE)[IN_A]
    rewrite(folder, {HEAD: embedding.clone()})
    open_weights(folder)

    rewrite(folder, {IN_A: None})  # the one matrix under the head's name alone
    with Weights(folder, load_config(folder)) as weights:
        assert torch.equal(weights[IN_A], embedding)

    rewrite(folder, {IN_A: embedding, HEAD: embedding + 1})
    with pytest.raises(SettingsError, match=r"lm_head\.weight: differs from model\.embed_tokens\.weight"):
        open_weights(folder)
    set_config(folder, tie_word_embeddings=False)
    open_weights(folder)

    rewrite(folder, {HEAD: None})
    with pytest.raises(SettingsError, match=r"lm_head\.weight: is missing .*tie_word_embeddings is false"):
        open_weights(folder)
    set_config(folder, tie_word_embeddings=True)
    rewrite(folder, {IN_A: None})
    with pytest.raises(SettingsError, match=r"embed_tokens\.weight: is missing from model\.safetensors"):
        open_weights(folder)


def test_old_rotary_tables_are_ignored(folder: Path) -> None:
    rewrite(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
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
