"""Rotary tables of every kind and spelling, bit for bit those of transformers on the same `config.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.model.config import load_config
from shared.model.rope import Rope
from shared.model.rope_table import rope_table
from tests.unit.test_model_config import PLAIN

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 3.0},
    "llama3": LLAMA3,
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, ratio": {"factor": None, "original_max_position_embeddings": 64},
    "yarn, mscale": {"factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn, ramp": {"factor": 2, "attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2, "truncate": False},
}
LAYOUTS = ("rope_parameters", "rope_scaling", "type", "outside")
MAX_POSITIONS = 96


def write_config(folder: Path, kind: str, layout: str, head_dim: int, theta: float) -> None:
    rope: dict[str, Any] = {"rope_type": kind.partition(",")[0]} | KINDS[kind]
    raw = PLAIN | {
        "hidden_size": 4 * head_dim,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": MAX_POSITIONS,
    }
    if layout == "rope_parameters":
        raw = {k: v for k, v in raw.items() if k != "rope_theta"} | {"rope_parameters": rope | {"rope_theta": theta}}
    else:
        if layout == "type":
            rope["type"] = rope.pop("rope_type")
        elif layout == "outside" and "original_max_position_embeddings" in rope:
            # the field beside the table wins
            raw["original_max_position_embeddings"] = 48
        raw |= {"rope_scaling": rope, "rope_theta": theta}
    (folder / "config.json").write_text(json.dumps(raw))


def reference_table(folder: Path, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin of transformers, positions beyond the original context one at a time."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder))
    x = torch.zeros(1)
    calls = [range(MAX_POSITIONS), *(range(p, p + 1) for p in range(MAX_POSITIONS, num_positions))]
    parts = [rotary(x, torch.tensor([list(call)])) for call in calls]
    cos, sin = (torch.cat([part[i][0] for part in parts]) for i in (0, 1))
    return cos[:num_positions], sin[:num_positions]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_tables_equal_transformers_bit_for_bit(kind: str, layout: str, tmp_path: Path) -> None:
    for head_dim, theta in ((64, 5e5), (16, 1e4)):
        write_config(tmp_path, kind, layout, head_dim, theta)
        config = load_config(tmp_path)
        assert config.rope.theta == theta
        table = rope_table(config.rope, head_dim, config.max_positions, torch.float32)
        cos, sin = reference_table(tmp_path, config.max_positions)
        half = head_dim // 2
        assert table.shape == (config.max_positions, 2, head_dim)
        assert torch.equal(table[:, 0], cos)
        assert torch.equal(table[:, 1, half:], sin[:, half:])
        assert torch.equal(table[:, 1, :half], -sin[:, :half])


def test_a_dynamic_row_depends_on_its_position_alone() -> None:
    rope = Rope("dynamic", 1e4, 4.0, 64)
    whole = rope_table(rope, 32, 256, torch.float32)
    for count in (1, 63, 64, 65, 100, 255):
        assert torch.equal(rope_table(rope, 32, count, torch.float32), whole[:count])
    plain = rope_table(Rope(theta=1e4), 32, 256, torch.float32)
    assert torch.equal(whole[:64], plain[:64])
    assert not torch.equal(whole[64:], plain[64:])
