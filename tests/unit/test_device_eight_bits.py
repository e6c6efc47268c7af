"""8-bit rows over 8-bit weights, and fused small steps, in whole tiny models: in Triton's interpreter or on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.testing import DEVICE, INTERPRETED, require_float8

# isort: split
from kernels.chip import pretend
from kernels.linear.quantize import GPU_QUANTS, Unquantizable
from kernels.linear.triton_weights import DeviceWeight, dequantized
from shared.contracts.errors import SettingsError
from shared.model import device_decoder
from shared.model.device_decoder import DeviceDecoder, load_device_decoder
from shared.model.device_packing import packed
from tests.device_models import BLOCKS, Runs, save
from tests.unit.test_device_formats import last, tied_qwen3

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered"),  # numpy's, in the interpreter
    *([] if INTERPRETED else [pytest.mark.gpu]),
]


def rounded_product(x: Tensor, weight: DeviceWeight) -> Tensor:
    """As `linear` says, in float64: rows over their largest magnitude, an integer or a float8 an element."""
    rows = x.double()
    if weight.kind in ("w8a8", "fp8"):
        largest = 127.0 if weight.kind == "w8a8" else 448.0
        # one division as the kernel's: what lies at a half must fall to the same side
        scale = (x.float().abs().amax(1, keepdim=True) / largest).clamp_min(1e-30)
        steps = x.float() / scale
        rows = (steps.round() if weight.kind == "w8a8" else steps.to(torch.float8_e4m3fn)).double() * scale.double()
    y = rows @ dequantized(weight).T
    return (y if weight.bias is None else y + weight.bias.double()).to(x.dtype)


def product(x: Tensor, weight: DeviceWeight) -> Tensor:
    """Rows as they are, in float64."""
    y = x.double() @ dequantized(weight).T
    return (y if weight.bias is None else y + weight.bias.double()).to(x.dtype)


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("one-layer")
    save(tied_qwen3, path)
    return path


def two_steps(runs: Runs) -> Tensor:
    """Logits of a prompt's end and of the token behind it."""
    for start, end in ((0, 6), (6, 7)):
        runs.run(last("a", start, end, BLOCKS[0]))
    return torch.stack([runs.rows["a", i] for i in (5, 6)])


@pytest.mark.parametrize("quant", ["w8a8", "fp8"])
def test_rows_and_weights_of_8_bits_give_the_logits_of_what_they_stand_for(
    quant: str, one_layer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt's step and a decode step that is not fused."""
    require_float8(quant)
    loaded = load_device_decoder(one_layer, "float32", DEVICE.type, quant=quant)
    model = DeviceDecoder(loaded.config, loaded.weights, loaded.kernels, fuse=False, quant=loaded.quant)
    layer, head = model.weights.layers[0], model.weights.head
    assert head is not None
    assert (layer.qkv.kind, layer.o.kind, head.kind) == (quant, quant, "int8")
    assert layer.qkv.data.nbytes == layer.qkv.out_features * layer.qkv.in_features
    found = two_steps(Runs(model))
    monkeypatch.setattr(device_decoder, "linear", rounded_product)
    expected = two_steps(Runs(model))
    monkeypatch.setattr(device_decoder, "linear", product)
    unrounded = two_steps(Runs(model))
    # tensor cores hold sums of float8 in 13 or 14 bits, and a row that rounds the other way then moves by a step
    limit = 1e-4 if INTERPRETED or quant == "w8a8" else 3e-2
    assert (found - expected).abs().max() < limit * expected.abs().max()
    assert (unrounded - expected).abs().max() > max(limit, 1e-3) * expected.abs().max(), "rounding of rows shows"


@pytest.mark.parametrize("quant", ["int4", "fp8"])
def test_a_step_of_one_row_is_fused(quant: str, one_layer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each product is one launch with all that stands beside it, and multiplies rows as they are."""
    require_float8(quant)
    model = load_device_decoder(one_layer, "float32", DEVICE.type, quant=quant)
    apart = DeviceDecoder(model.config, model.weights, model.kernels, fuse=False, quant=model.quant)
    launched, few = [], device_decoder.few_rows_linear

    def counted(*args: Any, **options: Any) -> Tensor:
        launched.append(args)
        return few(*args, **options)

    monkeypatch.setattr(device_decoder, "few_rows_linear", counted)
    monkeypatch.setattr(device_decoder, "linear", product)
    expected = two_steps(Runs(apart))
    assert not launched
    found = two_steps(Runs(model))
    assert len(launched) == 4 * model.config.num_layers + 1
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_float8_is_refused_where_the_card_has_none(one_layer: Path) -> None:
    with pretend((8, 6)), pytest.raises(SettingsError, match=r"quant 'fp8' needs sm_89 or newer.*sm_86: w8a8") as error:
        load_device_decoder(one_layer, "float32", DEVICE.type, quant="fp8")
    assert error.value.param == "quant"


@pytest.mark.parametrize("quant", ["w8a8", "fp8"])
def test_a_weight_that_is_not_finite_has_no_8_bits(quant: str) -> None:
    with pytest.raises(Unquantizable, match="a weight is not finite"):
        packed([torch.full((4, 32), torch.inf)], GPU_QUANTS[quant])
