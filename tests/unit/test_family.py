"""Model families: what their configurations say, what their checkpoints hold, and where they are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared.contracts.errors import SettingsError
from shared.model.checkpoint import expected_shapes
from shared.model.config import parse_config
from shared.model.decoder import load_decoder
from shared.model.family import LLAMA

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
}
GEMMA = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
QWEN = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}


def parse(*changes: dict[str, Any]) -> Any:
    raw: dict[str, Any] = dict(SIZES)
    for change in changes:
        raw |= change
    return parse_config(raw, Path("config.json"))


def test_llama_is_the_default() -> None:
    config = parse({"architectures": ["LlamaForCausalLM"]})
    assert config.family == LLAMA
    assert config.scale == 64**-0.5


def test_gemma_2() -> None:
    config = parse(GEMMA, {"sliding_window": 20, "query_pre_attn_scalar": 16, "final_logit_softcapping": None})
    family = config.family
    assert family.windows == (20, 0, 20)
    assert (family.window(0), family.window(1)) == (20, 0)
    assert (family.score_cap, family.logit_cap) == (50.0, 0.0)
    assert config.tied_embeddings
    assert config.scale == 0.25
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    assert parse(GEMMA, {"layer_types": kinds}).family.windows == (0, 4096, 0)


def test_what_checkpoints_hold() -> None:
    qwen = expected_shapes(parse(QWEN))
    assert qwen["model.layers.2.self_attn.q_norm.weight"] == (64,)
    gemma = expected_shapes(parse(GEMMA))
    assert gemma["model.layers.0.post_feedforward_layernorm.weight"] == (64,)
    assert "lm_head.weight" not in gemma
    mixtral = expected_shapes(parse(MIXTRAL, {"num_local_experts": 3}))
    assert mixtral["model.layers.1.block_sparse_moe.experts.2.w2.weight"] == (64, 96)
    assert mixtral["model.layers.1.block_sparse_moe.gate.weight"] == (3, 64)
    assert "model.layers.1.mlp.gate_proj.weight" not in mixtral


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 5}, "sliding_window"),
        (QWEN | {"use_sliding_window": True}, "use_sliding_window"),
        (QWEN | {"model_type": "llama"}, "model_type"),
        (GEMMA | {"hidden_activation": "gelu"}, "hidden_activation"),
        (GEMMA | {"layer_types": ["full_attention"]}, "layer_types"),
        (GEMMA | {"attn_logit_softcapping": -1}, "attn_logit_softcapping"),
        (MIXTRAL | {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        (MIXTRAL | {"sliding_window": 64}, "sliding_window"),
        ({"architectures": ["LlamaForCausalLM", "Other"]}, "architectures"),
    ],
)
def test_what_is_not_computed_is_refused_by_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse(changes)
    assert caught.value.param == field


def test_other_families_are_refused_on_a_cpu(tmp_path: Path) -> None:
    import json

    (tmp_path / "config.json").write_text(json.dumps(SIZES | QWEN))
    with pytest.raises(SettingsError, match="Qwen3ForCausalLM: is computed on a GPU only"):
        load_decoder(tmp_path, "float32", "reference")
