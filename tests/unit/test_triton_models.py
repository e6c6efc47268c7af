"""Whole tiny models through the Triton kernels, in the interpreter or on a GPU: the logits of the families' own code.

transformers is the judge, in float32; a prompt's chunks, and decode steps that feed one another on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.testing import DEVICE, INTERPRETED, TOLERANCE

# isort: split
from shared.contracts.sampling import SamplingParams
from shared.engine.decode_graphs import DecodeGraphs
from shared.engine.device_compute import DeviceCompute, StepLimits
from shared.engine.device_runner import DeviceRunner
from shared.engine.device_stream import DeviceStream
from shared.engine.step_plan import IN_FLIGHT, ScheduledSequence, StepOutput, StepPlan
from shared.model.config import layer_groups
from shared.model.device_decoder import DeviceDecoder, load_device_decoder

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered"),  # numpy's, in the interpreter
    *([] if INTERPRETED else [pytest.mark.gpu]),
]

VOCAB, TOKENS, BLOCK = 320, 48, 16
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
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


FAMILIES: dict[str, Callable[[], Any]] = {"llama": llama, "qwen3": qwen3, "gemma2": gemma2}


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
    """A runner over a fresh pool of NaN that records every row of logits."""

    def __init__(self, model: DeviceDecoder, graphs: bool = False, max_num_seqs: int = 4) -> None:
        self.rows: dict[tuple[str, int], Tensor] = {}
        groups = layer_groups(model.config, BLOCK, str(model.dtype).removeprefix("torch."))
        shape = (16, len(groups[0].layers), 2, groups[0].num_kv_heads, BLOCK, groups[0].head_dim)
        self.pool = torch.full(shape, float("nan"), dtype=model.dtype, device=model.device)
        limits = StepLimits(max_rows=64, max_num_seqs=max_num_seqs, max_len=256)
        compute = DeviceCompute(model, groups, (self.pool,), limits)
        stream = DeviceStream(model.device)
        captured = None
        if graphs:
            captured = DecodeGraphs(stream, compute.decode)
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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_model_gives_the_logits_of_its_own_code(family: str, tmp_path: Path) -> None:
    judge = save(FAMILIES[family], tmp_path)
    tokens = torch.randint(3, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = judge(tokens[None]).logits[0]
    ids = tokens.tolist()
    runs = Runs(load_device_decoder(tmp_path, "float32", DEVICE.type))

    # a chunk, a chunk beside another sequence, then single tokens beside it
    runs.run(part("a", ids[:29], 0, BLOCKS[0]))
    runs.run(part("a", ids[29:44], 29, BLOCKS[0]), part("b", ids[:3], 0, BLOCKS[1]))
    for i in range(44, TOKENS):
        runs.run(part("a", ids[i : i + 1], i, BLOCKS[0]), part("b", ids[i - 41 : i - 40], i - 41, BLOCKS[1]))

    found = torch.stack([runs.rows["a", i] for i in range(TOKENS)])
    assert torch.isfinite(found).all()
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    beside = torch.stack([runs.rows["b", i] for i in range(7)])
    assert (beside - expected[:7]).abs().max() < 1e-4 * expected.abs().max()
