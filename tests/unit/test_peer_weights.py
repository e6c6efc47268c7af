"""The weights of `./baton bench peers`: every file holds the same model, and vLLM's int8 is the nearest there is."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from loadtest.peer_gguf import gguf_name, permute, same_in_bf16
from loadtest.peer_weights import DEFAULT, MERGES, RANDOM, SHAPE, Weights, gguf_type, random_folder
from shared.contracts.errors import Unavailable
from shared.model.config import load_config
from shared.model.convert_gguf import unpermute
from shared.model.decoder import load_decoder
from shared.text.tokenizer import load_tokenizer
from tests.unit.test_gguf_folder import Q4_1, write

TINY = SHAPE | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(RANDOM, tmp_path_factory.mktemp("cache"), Path("/bin/false"), lambda _: None, TINY)


def test_random_weights_are_always_the_same_and_loadable(weights: Weights, tmp_path: Path) -> None:
    folder = weights.baton()
    random_folder(tmp_path, TINY)
    assert (tmp_path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert load_config(folder).eos_token_ids == ()
    load_decoder(folder, "float32", "torch")
    assert weights.vocab_size() == 320
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert (weights.baton() / "model.safetensors").stat().st_mtime_ns == made


def test_the_full_shape_is_qwens() -> None:
    layer = 2 * 896 * 896 + 2 * 128 * 896 + 3 * 896 * 4864 + 2 * 896
    assert 24 * layer + 151936 * 896 + 896 == pytest.approx(494e6, rel=1e-3)
    assert [SHAPE[key] for key in ("hidden_size", "intermediate_size", "vocab_size")] == [896, 4864, 151936]


def test_every_token_has_a_text(weights: Weights) -> None:
    tokenizer = load_tokenizer(weights.baton())
    assert tokenizer.decode([256, 317]) == "t0xt61x"
    assert tokenizer.decode([318]) == MERGES[0].replace(" ", "").replace("Ġ", " ")


def test_gguf_holds_the_same_bits(weights: Weights) -> None:
    plain = load_file(weights.baton() / "model.safetensors")
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(weights.gguf("bf16")).tensors}
    assert found.keys() == {gguf_name(name) for name in plain}
    for name, tensor in plain.items():
        values = gguf.dequantize(found[gguf_name(name)].data, found[gguf_name(name)].tensor_type)
        if heads := {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2]):
            assert not np.array_equal(values, tensor.float().numpy())
            values = unpermute(values, heads)
        assert np.array_equal(values, tensor.float().numpy()), name


def test_permute_is_the_inverse_of_unpermute() -> None:
    weight = np.arange(4 * 8 * 3, dtype=np.float32).reshape(32, 3)
    assert np.array_equal(unpermute(permute(weight, 4), 4), weight)


def test_quantized_files_become_bf16_with_all_that_is_told_of_them(weights: Weights, tmp_path: Path) -> None:
    source, made = weights.gguf("bf16"), tmp_path / "again.gguf"
    same_in_bf16(source, made)
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(made)
    assert [(t.name, t.tensor_type, t.shape.tolist()) for t in before.tensors] == [
        (t.name, t.tensor_type, t.shape.tolist()) for t in after.tensors
    ]
    assert all(np.array_equal(a.data, b.data) for a, b in zip(before.tensors, after.tensors, strict=True))
    names = {name for name in before.fields if not name.startswith("GGUF.")}
    assert names <= after.fields.keys()
    assert all(before.fields[name].contents() == after.fields[name].contents() for name in names)


def test_int8_of_vllm_is_the_nearest_in_every_row(weights: Weights) -> None:
    folder = weights.vllm_int8()
    plain, packed = load_file(weights.baton() / "model.safetensors"), load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    scale = packed[f"{name}_scale"].float()
    assert (packed[name].dtype, tuple(scale.shape)) == (torch.int8, (64, 1))
    assert ((packed[name].float() * scale - plain[name].float()).abs() <= scale * 0.51).all()
    assert torch.equal(packed["model.embed_tokens.weight"], plain["model.embed_tokens.weight"])
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    assert (group["weights"]["strategy"], group["input_activations"]["strategy"]) == ("channel", "token")


def test_a_quantizer_that_fails_leaves_nothing(weights: Weights) -> None:
    with pytest.raises(Unavailable, match="llama-quantize"):
        weights.gguf("int8")
    assert not list(weights.folder.glob("*Q8*"))
    assert not list(weights.folder.glob(".making-*"))


def test_four_bits_of_the_default_model_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "default.gguf", Q4_1)
    monkeypatch.setattr(Weights, "gguf", lambda self, quant: tmp_path / "default.gguf")
    default = Weights(DEFAULT, tmp_path, Path("/bin/false"), lambda _: None)
    folder = default.baton_of("int4")
    assert load_config(folder).eos_token_ids == ()
    assert any(name.endswith(".integers") for name in load_file(folder / "model.safetensors"))
    assert default.baton_of("int4") == folder != default.folder / "baton"
    monkeypatch.setattr(Weights, "baton", lambda self: tmp_path / "plain")
    assert default.baton_of("bf16") == tmp_path / "plain"


def test_the_same_kind_is_compared() -> None:
    assert [gguf_type(RANDOM, quant) for quant in ("bf16", "int8", "int4")] == ["BF16", "Q8_0", "Q4_0"]
    assert gguf_type(DEFAULT, "int4") == "Q4_1"


def test_a_missing_quantizer_is_named(tmp_path: Path) -> None:
    absent = Weights(RANDOM, tmp_path, tmp_path / "llama-quantize", lambda _: None, TINY)
    with pytest.raises(Unavailable, match="llama-quantize"):
        absent.gguf("int4")
