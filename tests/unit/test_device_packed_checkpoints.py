"""Checkpoints of integers through Triton's kernels, in its interpreter or on a GPU: logits are those of the values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.testing import DEVICE, INTERPRETED

# isort: split
from kernels.linear.quantize import Int4Weight, Quant
from kernels.linear.triton_kernel import linear
from kernels.linear.triton_weights import dequantized
from kernels.moe.triton_kernel import stacked
from shared.contracts.errors import SettingsError
from shared.model.device_decoder import load_device_decoder
from shared.model.device_packing import packed
from tests.device_models import BLOCKS, SIZES, TOKENS, VOCAB, Runs, part, save
from tests.packed_checkpoints import Form, write

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

IDS = torch.randint(3, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
SMALL = SIZES | {"num_hidden_layers": 1}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True))


def shallow_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL))


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2))


CASES = [
    (llama, Form(act_order=True)),
    (shallow_llama, Form("awq", floats=("mlp.down",))),
    (shallow_llama, Form(bits=8, group=-1, sym=True)),
    (mixtral, Form("awq")),
]


@pytest.mark.parametrize(("make", "form"), CASES, ids=["gptq-order", "awq", "gptq-8", "awq-experts"])
def test_logits_are_those_of_the_values(make: Callable[[], Any], form: Form, tmp_path: Path) -> None:
    plain = save(make, tmp_path / "plain")
    integers = write(tmp_path / "plain", tmp_path / "packed", tmp_path / "floats", form)
    judge = type(plain).from_pretrained(tmp_path / "floats", dtype=torch.float32).eval()
    with torch.no_grad():
        expected = judge(torch.tensor(IDS[:6])[None]).logits[0]
    model = load_device_decoder(tmp_path / "packed", "float32", DEVICE.type)
    o = model.weights.layers[0].o
    values = torch.from_numpy(integers["model.layers.0.self_attn.o_proj.weight"].values())
    assert torch.equal(dequantized(o).cpu(), values)
    assert (o.kind, o.permutation is None) == ("int8" if form.bits == 8 else "int4", not form.act_order)
    runs = Runs(model)
    runs.run(part("a", IDS[:5], 0, BLOCKS[0]))
    runs.run(part("a", IDS[5:6], 5, BLOCKS[0]))
    found = torch.stack([runs.rows["a", i] for i in range(6)])
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_zeros_that_are_all_in_the_middle_are_not_read() -> None:
    """Of a layer, or of all its experts; products are the same bits, and an expert alone with others keeps its own."""
    generator = torch.Generator().manual_seed(0)
    integers = torch.randint(0, 16, (24, 64), dtype=torch.uint8, generator=generator).to(DEVICE)
    scales = torch.rand(24, 2, generator=generator).half().to(DEVICE)
    middle = torch.full((24, 2), -8.0, device=DEVICE)
    other = middle.clone()
    other[5, 1] = -3.0
    quant = Quant("gptq-int4-g32", 4, 32, in_steps=True)
    symmetric, uneven = (
        packed([Int4Weight(integers, scales, minima, 32, in_steps=True)], quant) for minima in (middle, other)
    )
    assert symmetric.zeros is None
    assert uneven.zeros is not None
    read = replace(symmetric, zeros=torch.full_like(uneven.zeros, 8))
    assert torch.equal(dequantized(symmetric), dequantized(read))
    x = torch.randn(3, 64, generator=generator).to(DEVICE)
    assert torch.equal(linear(x, symmetric), linear(x, read))
    assert stacked([symmetric, symmetric]).zeros is None
    mixed = stacked([symmetric, uneven]).zeros
    assert mixed is not None
    assert torch.equal(mixed, torch.stack([read.zeros, uneven.zeros]))


def test_what_experts_cannot_hold_is_told(tmp_path: Path) -> None:
    save(mixtral, tmp_path / "plain")
    write(tmp_path / "plain", tmp_path / "packed", tmp_path / "floats", Form(act_order=True))
    with pytest.raises(SettingsError, match=r"'gptq-int4-g32': .*experts: .* order of its own"):
        load_device_decoder(tmp_path / "packed", "float32", DEVICE.type)


def test_a_setting_that_contradicts_is_refused(tmp_path: Path) -> None:
    save(shallow_llama, tmp_path / "plain")
    write(tmp_path / "plain", tmp_path / "packed", tmp_path / "floats", Form())
    with pytest.raises(SettingsError, match=r"quant 'int8': .*quantization_config"):
        load_device_decoder(tmp_path / "packed", "float32", DEVICE.type, quant="int8")
