"""Checkpoints of integers through Triton's kernels, in its interpreter or on a GPU: logits are those of the values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.testing import DEVICE, INTERPRETED

# isort: split
from kernels.linear.triton_weights import dequantized
from shared.contracts.errors import SettingsError
from shared.model.device_decoder import load_device_decoder
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
