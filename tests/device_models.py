"""Tiny models of every family a GPU computes, and a runner of their steps: in Triton's interpreter, or on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kernels.testing  # noqa: F401 - decides how Triton's kernels are made, before they are imported

# isort: split
from shared.contracts.sampling import SamplingParams
from shared.engine.decode_graphs import DecodeGraphs
from shared.engine.device_compute import DeviceCompute, StepLimits
from shared.engine.device_runner import DeviceRunner
from shared.engine.device_stream import DeviceStream
from shared.engine.step_plan import ScheduledSequence, StepOutput, StepPlan
from shared.kv.device_spans import device_views
from shared.kv.layout import PoolLayout
from shared.model.config import layer_groups
from shared.model.device_decoder import DeviceDecoder

VOCAB, TOKENS, BLOCK, NUM_BLOCKS = 320, 48, 16, 16
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "eos_token_id": 2,
    "dtype": torch.float32,
}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True))


def qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SIZES))


def gemma2() -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    caps = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0, "query_pre_attn_scalar": 32}
    config = Gemma2Config(**SIZES, **caps, sliding_window=20)
    config._attn_implementation = "eager"  # the others leave the soft cap out
    return Gemma2ForCausalLM(config)


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2))


FAMILIES: dict[str, Callable[[], Any]] = {"llama": llama, "qwen3": qwen3, "gemma2": gemma2, "mixtral": mixtral}


def save(make: Callable[[], Any], folder: Path) -> Any:
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(-0.5, 0.5) if "Gemma" in type(model).__name__ else parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.5)
    model.save_pretrained(folder)
    return model


class Runs:
    """A runner over a fresh pool of NaN that records every row of logits.

    Args:
        kv_dtype: of the pool; "" for the model's own.
    """

    def __init__(self, model: DeviceDecoder, graphs: bool = False, max_num_seqs: int = 4, kv_dtype: str = "") -> None:
        self.rows: dict[tuple[str, int], Tensor] = {}
        groups = layer_groups(model.config, BLOCK, kv_dtype or str(model.dtype).removeprefix("torch."))
        self.layout = PoolLayout(groups, (NUM_BLOCKS,))
        # not a number in every float format, scales included
        self.data = torch.full((self.layout.total_bytes,), 0xFF, dtype=torch.uint8, device=model.device)
        views = device_views(self.data, self.layout)
        self.pool, self.scales = views[0].values, views[0].scales
        limits = StepLimits(64, max_num_seqs, max_len=256)
        compute = DeviceCompute(model, groups, views, limits)
        stream = DeviceStream(model.device)
        captured = None
        if graphs:
            captured = DecodeGraphs(stream, compute.decode, compute.draw)
            captured.capture(compute.buckets)
        self.runner = DeviceRunner(compute, stream, captured, None if graphs else self._record)
        self.step = 0

    def _record(self, seq_id: str, position: int, row: Tensor) -> None:
        self.rows[seq_id, position] = row

    def launch(self, *sequences: ScheduledSequence) -> Callable[[], StepOutput]:
        self.step += 1
        return self.runner.run(StepPlan(self.step, sequences))

    def run(self, *sequences: ScheduledSequence) -> StepOutput:
        return self.launch(*sequences)()


GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
BLOCKS = ((9, 3, 14, 1), (2, 8, 5, 11))


def part(
    seq_id: str, tokens: list[int], start: int, blocks: tuple[int, ...], sampling: SamplingParams | None = GREEDY
) -> ScheduledSequence:
    """Positions from `start` on, with logits of every row."""
    return ScheduledSequence(seq_id, start, tuple(tokens), (blocks,), len(tokens), sampling)
