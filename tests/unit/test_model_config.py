from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernels.tile_layouts import LANES16
from shared.contracts.errors import SettingsError
from shared.model.config import layer_groups, load_config, parse_config
from shared.model.rope import Rope

PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
    "torch_dtype": "bfloat16",
}
PATH = Path("model/config.json")


def test_sizes() -> None:
    config = parse_config(PLAIN, PATH, 2)
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.rope.theta, config.tied_embeddings, config.dtype) == (100000.0, True, "bfloat16")
    assert config.scale == 0.125


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5),
        ({"rope_parameters": {"rope_theta": 7.0}, "rope_theta": None}, 7.0),
        ({"rope_scaling": None}, 1e5),
        ({"rope_scaling": {"type": "default"}}, 1e5),
    ],
)
def test_rope_forms(changes: dict[str, Any], theta: float) -> None:
    raw = {k: v for k, v in (PLAIN | changes).items() if not (k == "rope_theta" and v is None)}
    assert parse_config(raw, PATH).rope == Rope(theta=theta)


@pytest.mark.parametrize(("eos", "ids"), [(None, ()), (2, (2,)), ([2, 5, 2], (2, 5))])
def test_eos_ids(eos: object, ids: tuple[int, ...]) -> None:
    assert parse_config(PLAIN, PATH, eos).eos_token_ids == ids


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"model_type": "mistral"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"quantization_config": "gptq"}, "quantization_config"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"type": "longrope", "factor": 8.0}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}},
            "rope_scaling.high_freq_factor",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling.factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e5}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": 1}}, "rope_parameters.truncate"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "alpha": 3}}, "rope_parameters.alpha"),
        ({"rope_parameters": {"rope_theta": 0.5}}, "rope_parameters.rope_theta"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"num_attention_heads": 7}, "hidden_size"),
        ({"head_dim": 33}, "head_dim"),
        ({"head_dim": None, "hidden_size": 577}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
    ],
)
def test_the_unsupported_is_refused_by_file_and_field(changes: dict[str, Any], field: str) -> None:
    raw = PLAIN | changes
    if changes == {"num_attention_heads": 7}:
        raw |= {"num_key_value_heads": 7}
    with pytest.raises(SettingsError) as caught:
        parse_config(raw, PATH)
    assert caught.value.param == field
    assert "config.json" in caught.value.message


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_type": "default"}, 8192),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 8192),
        ({"rope_type": "linear", "factor": 2.5}, 20480),
        ({"rope_type": "dynamic", "factor": 2}, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 4096}, 8192),
        ({"rope_type": "yarn", "factor": 2.0}, 16384),
    ],
)
def test_the_context_that_scaling_gives(rope: dict[str, Any], context: int) -> None:
    assert parse_config(PLAIN | {"rope_parameters": rope}, PATH).max_positions == context
    assert parse_config(PLAIN | {"rope_scaling": rope}, PATH).max_positions == context


def test_eos_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(SettingsError, match="eos_token_id"):
        parse_config(PLAIN, PATH, 49152)


def test_files(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SettingsError, match="not JSON"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(PLAIN | {"eos_token_id": 1}))
    assert load_config(tmp_path).eos_token_ids == (1,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    assert load_config(tmp_path).eos_token_ids == (2, 3)


def test_layer_groups() -> None:
    (group,) = layer_groups(parse_config(PLAIN, PATH), 32, "bfloat16")
    assert group.layers == tuple(range(30))
    assert group.span_bytes == 30 * 2 * 3 * 32 * 64 * 2
    with pytest.raises(SettingsError, match="block size"):
        layer_groups(parse_config(PLAIN, PATH), 24, "bfloat16")
    with pytest.raises(SettingsError, match="below 16"):
        layer_groups(parse_config(PLAIN, PATH), 8, "bfloat16", tile_layout=LANES16)
    with pytest.raises(SettingsError, match="dtype"):
        layer_groups(parse_config(PLAIN, PATH), 32, "float8")
