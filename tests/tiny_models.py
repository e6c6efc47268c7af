"""Small random Llama checkpoints, made with transformers, and plans to run them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shared.contracts.sampling import SamplingParams
from shared.engine.step_plan import ScheduledSequence

GREEDY = SamplingParams(max_tokens=64, temperature=0.0)


def make_tiny_model(folder: Path, *, seed: int = 0, shards: str = "5GB", **changes: Any) -> Path:
    """Write a random Llama checkpoint: 4 layers, 4 query and 2 KV heads of 16, vocabulary 320, unless changed.

    Weights are larger than a fresh model's, so that logits differ clearly and errors show. `shards` is the largest
    file, such as "200KB": then there are several and an index.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.15,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "dtype": torch.float32,
    } | changes
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**settings)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):  # zero in a fresh model
                parameter.normal_(std=0.5)
    model.to(settings["dtype"]).save_pretrained(folder, safe_serialization=True, max_shard_size=shards)
    return folder


def sequence(
    seq_id: str,
    token_ids: list[int],
    blocks: list[int],
    *,
    start: int = 0,
    num_logits: int = 1,
    sampling: SamplingParams | None = GREEDY,
    stored_from: int = 0,
) -> ScheduledSequence:
    """A sequence of a plan with one layer group."""
    return ScheduledSequence(seq_id, start, tuple(token_ids), (tuple(blocks),), num_logits, sampling, stored_from)


def random_tokens(count: int, vocab_size: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(3, vocab_size, (count,), generator=generator).tolist()
    return ids
