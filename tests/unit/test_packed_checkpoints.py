"""Checkpoints of integers: GPTQ, AWQ and compressed-tensors, read exactly, computed by torch and by native kernels."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.linear.quantize import Int4Weight, Int8Weight, Unquantizable
from loadtest import quality
from services.cli import doctor_stack
from services.cli.doctor import FAIL
from services.cli.stack_models import with_models
from shared.contracts.errors import SettingsError
from shared.engine.numerics import numerics_id
from shared.engine.self_check import run_self_check
from shared.model.config import load_config, packed_as
from shared.model.decoder import configuration_of, load_decoder
from shared.model.digest import model_digest
from shared.model.folder import check_model_folder
from shared.model.pack_cache import PackCache
from shared.model.packing import Packing
from shared.model.quality_gate import (
    AUTO,
    Configuration,
    SetFigures,
    keep_record,
    open_gate,
    own_results,
)
from shared.model.unpack import unpacked
from shared.model.weights import Weights
from shared.settings.sections import EngineSettings, ModelEntry, Settings
from tests.native import require_native
from tests.packed_checkpoints import Form, Integers, change_config, configuration, int32, write
from tests.tiny_models import make_tiny_model
from tests.unit.test_decoder import our_logits, random_tokens, reference_logits, reference_model

FORMS = [
    Form(group=32),
    Form(group=64, sym=True),
    Form(group=128, version="gptq_v2"),
    Form(group=-1),
    Form(group=32, act_order=True),
    Form(group=128, act_order=True, sym=True, version="gptq_v2"),
    Form(bits=8, group=-1, sym=True),
    Form("awq", group=32),
    Form("awq", group=64),
    Form("awq", group=128),
    Form("compressed-tensors", group=32),
    Form("compressed-tensors", group=128, sym=True, act_order=True),
    Form("compressed-tensors", group=-1, sym=True),
    Form("compressed-tensors", bits=8, group=-1, sym=True),
]
IDS = [f"{f.method}-{f.bits}-{f.group}{'-sym' * f.sym}{'-act' * f.act_order}-{f.version}" for f in FORMS]
Written = tuple[Path, Path, dict[str, Integers]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer, whose products have 128 or 256 inputs."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 32}
    return make_tiny_model(tmp_path_factory.mktemp("plain") / "model", tie_word_embeddings=False, **sizes)


def written(plain: Path, base: Path, form: Form) -> Written:
    return base / "packed", base / "floats", write(plain, base / "packed", base / "floats", form)


@pytest.fixture(scope="module")
def written_once(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(plain, tmp_path_factory.mktemp("gptq"), Form())[0]


@pytest.fixture
def gptq(written_once: Path, tmp_path: Path) -> Path:
    """A checkpoint that may be changed."""
    return Path(shutil.copytree(written_once, tmp_path / "packed"))


@pytest.mark.parametrize("form", FORMS, ids=IDS)
def test_every_integer_and_value_is_the_files_own(plain: Path, tmp_path: Path, form: Form) -> None:
    packed, _, integers = written(plain, tmp_path, form)
    config = load_config(packed)
    with Weights(packed, config) as weights:
        for name, one in integers.items():
            kept, outline = weights.kept(name), weights.outline(name)
            assert np.array_equal(weights[name].double().numpy(), one.values()), name
            assert not isinstance(kept, torch.Tensor)
            assert not isinstance(outline, torch.Tensor)
            assert (outline.shape, outline.scales.shape) == (kept.shape, kept.scales.shape)
            if isinstance(kept, Int8Weight):
                assert np.array_equal(kept.integers.numpy(), one.q - 128)
                continue
            assert isinstance(outline, Int4Weight)
            order = np.arange(one.q.shape[1]) if kept.order is None else kept.order.numpy()
            assert np.array_equal(kept.integers.numpy(), one.q[:, order])
            assert kept.group == (128 if form.group == -1 else form.group)
            assert (kept.order is not None) == (form.act_order and one.zeros.shape[1] > 1)
            assert (outline.group, outline.order is None) == (kept.group, kept.order is None)


@pytest.mark.parametrize("form", [FORMS[0], FORMS[4], FORMS[6], FORMS[7], FORMS[11]], ids=lambda form: form.method)
def test_logits_are_those_of_the_values(plain: Path, tmp_path: Path, form: Form) -> None:
    mixed = ("mlp.down",) if form.method == "awq" else ()
    packed, floats, _ = written(plain, tmp_path, replace(form, floats=mixed))
    token_ids = random_tokens(40, 320, seed=1)
    with torch.no_grad():
        expected = reference_logits(reference_model(floats, "float32"), token_ids)
    exact = load_decoder(packed, "float32", "torch")
    assert configuration_of(exact).is_exact
    found = our_logits(exact, "float32", token_ids, tmp_path)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    require_native()
    model = load_decoder(packed, "float32", "native", threads=2, quick_head=True)
    name = load_config(packed).packing.name  # type: ignore[union-attr]
    assert configuration_of(model) == Configuration("native", "float32", name)
    found = our_logits(model, "float32", token_ids, tmp_path)
    # rows are rounded to 8 bits
    assert (found - expected).norm() < 0.05 * expected.norm()
    assert torch.equal(found, our_logits(model, "float32", token_ids, tmp_path, chunks=(1, 7, 32)))


def test_a_zero_of_nought_is_stored_with_a_borrow() -> None:
    # GPTQ's first version: the words of zeros less one in every field, as one number
    packing = Packing("gptq", 4, 32, less_one=True)
    zeros = torch.tensor([[0, 8, 0, 15, 1, 0, 0, 3]])
    word = sum(int(zero) << 4 * i for i, zero in enumerate(zeros[0])) - 0x11111111
    parts = {
        ".qweight": torch.zeros(4, 8, dtype=torch.int32),
        ".qzeros": int32(np.array([[word]])),
        ".scales": torch.ones(1, 8, dtype=torch.float16),
    }
    found = unpacked(packing, parts, (8, 32))
    assert isinstance(found, Int4Weight)
    assert torch.equal(found.floats(), -zeros.T.float().expand(8, 32))


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quant_method",
            "'bitsandbytes' is not supported, only gptq, awq, compressed",
        ),
        ({"quant_method": None}, "quant_method", "None is not supported"),
        ({"quant_method": ["gptq"]}, "quant_method", "is not supported"),
        ({"bits": 3}, "bits", "3 is not supported, only 4 and 8"),
        ({"bits": "4"}, "bits", "not a positive whole number"),
        ({"bits": None}, "bits", "is missing"),
        ({"group_size": 16}, "group_size", "16 is not supported, only 32, 64, 128 and -1"),
        ({"group_size": True}, "group_size", "True is not supported"),
        ({"bits": 8}, "group_size", "32 is not supported with 8 bits, only -1"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format", "only gptq and gptq_v2"),
        ({"checkpoint_format": None, "format": "gptq_p"}, "format", "'gptq_p' is not supported"),
        ({"is_marlin_format": True}, "is_marlin_format", "not supported"),
        ({"lm_head": True}, "lm_head", "output head"),
        ({"quant_method": "awq", "version": "gemv"}, "version", "'gemv' is not supported, only gemm"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point", "False is not supported, only true"),
        ({"quant_method": "awq", "bits": 8, "group_size": -1}, "bits", "8 is not supported, only 4"),
        ({"quant_method": "awq", "bits": None, "w_bit": 8}, "w_bit", "8 is not supported, only 4"),
        ({"quant_method": "awq", "group_size": None, "q_group_size": 16}, "q_group_size", "16 is not supported"),
        ({"quant_method": "awq", "version": None, "format": "marlin"}, "format", "'marlin' is not supported"),
        ({"quant_method": None, "method": "exl2"}, "method", "'exl2' is not supported"),
        ({"quant_method": "compressed-tensors"}, "format", "only pack-quantized"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups", "only one group"),
    ],
)
def test_what_is_not_read_is_refused_by_field(gptq: Path, changes: dict[str, Any], field: str, words: str) -> None:
    told = configuration(Form("awq" if changes.get("quant_method") == "awq" else "gptq"))
    change_config(gptq, quantization_config=told | changes)
    with pytest.raises(SettingsError, match=words) as error:
        load_config(gptq)
    assert error.value.param == f"quantization_config.{field}"
    assert str(gptq / "config.json") in error.value.message


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"weights": None}, "", "says nothing of its weights"),
        ({"input_activations": {"num_bits": 8}}, ".group_0.input_activations", "not supported"),
        ({"weights": {"num_bits": 4, "type": "float"}}, ".group_0.weights.type", "only int"),
        ({"weights": {"num_bits": 4, "strategy": "tensor"}}, ".group_0.weights.strategy", "only group and channel"),
        ({"weights": {"num_bits": 4, "symmetric": 1}}, ".group_0.weights.symmetric", "not true or false"),
        ({"weights": {"num_bits": 8, "symmetric": False}}, ".group_0.weights.symmetric", "with 8 bits"),
    ],
)
def test_what_is_not_read_of_compressed_tensors(gptq: Path, changes: dict[str, Any], field: str, words: str) -> None:
    told = configuration(Form("compressed-tensors"))
    told["config_groups"]["group_0"] |= changes
    change_config(gptq, quantization_config=told)
    with pytest.raises(SettingsError, match=words) as error:
        load_config(gptq)
    assert error.value.param == f"quantization_config.config_groups{field}"


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("changes", "name", "words"),
    [
        ({f"{Q}.qzeros": None}, f"{Q}.qzeros", "is missing from model.safetensors"),
        ({f"{Q}.{end}": None for end in ("qweight", "qzeros", "scales", "g_idx")}, f"{Q}.weight", "is missing"),
        ({f"{Q}.weight": torch.ones(128, 128)}, f"{Q}.weight", "as floats and as integers"),
        ({f"{Q}.qweight": torch.ones(16, 64, dtype=torch.int32)}, f"{Q}.qweight", r"\(16, 64\) should be I32 of shape"),
        ({f"{Q}.qweight": torch.ones(16, 128)}, f"{Q}.qweight", "F32 of shape"),
        (
            {f"{Q}.scales": torch.ones(5, 128)},
            f"{Q}.scales",
            r"\(5, 128\) should be F16 or BF16 or F32 of shape \(4, 128",
        ),
        ({f"{Q}.scales": torch.full((4, 128), float("nan"))}, f"{Q}.scales", "a scale is not finite"),
        ({f"{Q}.scales": torch.full((4, 128), 1 / 3)}, f"{Q}.scales", "a scale is no float16"),
        ({f"{Q}.g_idx": torch.zeros(128, dtype=torch.int32)}, f"{Q}.g_idx", "groups are not of 32 inputs each"),
        ({f"{Q}.g_idx": torch.arange(128) // 32 - 1}, f"{Q}.g_idx", "groups are not of 32 inputs each"),
        ({f"{Q}.bias": torch.ones(128)}, f"{Q}.bias", "not zero, though config.json says attention_bias is false"),
        ({f"{Q}.bias": torch.zeros(12)}, f"{Q}.bias", r"\(12,\) should be \(128,\)"),
        ({"lm_head.qweight": torch.ones(16, 320, dtype=torch.int32)}, "lm_head.qweight", "is not part of this model"),
        ({f"{Q}.weight_packed": torch.ones(1)}, f"{Q}.weight_packed", "is not part of this model"),
    ],
)
def test_what_is_wrong_with_a_tensor_is_told(gptq: Path, changes: dict[str, Any], name: str, words: str) -> None:
    change_tensors(gptq, changes)
    with pytest.raises(SettingsError, match=words) as error:
        load_decoder(gptq, "float32", "torch")
    assert error.value.param == name
    assert str(gptq) in error.value.message


def test_zeros_of_a_symmetric_checkpoint_are_the_middle() -> None:
    packing = Packing("compressed-tensors", 4, 32, symmetric=True)
    parts = {
        ".weight_packed": torch.zeros(8, 4, dtype=torch.int32),
        ".weight_scale": torch.ones(8, 1, dtype=torch.float16),
        ".weight_shape": torch.tensor([8, 32]),
    }
    middle = torch.tensor([[-0x77777778]], dtype=torch.int32)  # 8 in each field
    for told in (parts, parts | {".weight_zero_point": middle}):
        found = unpacked(packing, told, (8, 32))
        assert isinstance(found, Int4Weight)
        assert bool((found.floats() == -8).all())
    with pytest.raises(Unquantizable, match="weight_zero_point: not the middle"):
        unpacked(packing, parts | {".weight_zero_point": middle + 1}, (8, 32))


def test_outputs_that_fill_no_words_are_told(gptq: Path) -> None:
    change_config(gptq, intermediate_size=252)
    change_tensors(gptq, {"model.layers.0.mlp.down_proj.g_idx": torch.zeros(252, dtype=torch.int32)})
    with pytest.raises(SettingsError, match=r"a matrix \(.*252.*\) does not fill words of 8 integers"):
        load_decoder(gptq, "float32", "torch")


def test_a_file_that_ends_early_is_told(gptq: Path) -> None:
    path = gptq / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(SettingsError, match=r"cannot read weights from .*model\.safetensors"):
        load_decoder(gptq, "float32", "torch")


def test_integers_that_no_configuration_tells_of_are_told(gptq: Path) -> None:
    change_config(gptq, quantization_config=None)
    with pytest.raises(SettingsError, match=r"config\.json has no quantization_config"):
        load_decoder(gptq, "float32", "torch")


def test_eight_bits_with_a_zero_of_their_own_are_refused(plain: Path, tmp_path: Path) -> None:
    packed, _, _ = written(plain, tmp_path, Form(bits=8, group=-1))
    with pytest.raises(SettingsError, match=r"proj\.qzeros: zeros other than 128 are not supported with 8 bits"):
        load_decoder(packed, "float32", "torch")


def test_biases_that_are_there_for_nothing_change_nothing(gptq: Path, tmp_path: Path) -> None:
    token_ids = random_tokens(8, 320, seed=1)
    before = our_logits(load_decoder(gptq, "float32", "torch"), "float32", token_ids, tmp_path)
    change_tensors(gptq, {f"{Q}.bias": torch.zeros(128), "model.layers.0.mlp.up_proj.bias": torch.zeros(256)})
    assert torch.equal(our_logits(load_decoder(gptq, "float32", "torch"), "float32", token_ids, tmp_path), before)


@pytest.mark.parametrize("quant", ["int8", "int4", "int4-g128"])
def test_a_setting_that_contradicts_is_refused(gptq: Path, quant: str) -> None:
    require_native()
    with pytest.raises(SettingsError, match=rf"^quant '{quant}': .*quantization_config: .*gptq-int4-g32") as error:
        load_decoder(gptq, "float32", "native", quant=quant, threads=1)
    assert error.value.param == "quant"
    (gptq / "tokenizer.json").write_text("{}")
    with pytest.raises(SettingsError, match=rf"^quant '{quant}': .*stay so"):
        check_model_folder(gptq, quant=quant)
    check_model_folder(gptq)
    entry = ModelEntry(name="a", path=str(gptq), quant=quant)  # type: ignore[arg-type]
    found = doctor_stack.model(entry, False, {})
    assert (found.verdict, found.fix) == (FAIL, "set quant to none")
    settings = Settings(models=(ModelEntry(name="a", path=str(gptq)),), engine=EngineSettings(quant=quant))  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=f"^quant '{quant}'"):
        with_models(settings, {}, lambda _: None)


def test_orders_that_differ_are_not_multiplied_together(plain: Path, tmp_path: Path) -> None:
    require_native()
    packed, floats, _ = written(plain, tmp_path, Form(act_order=True))
    index = load_file(packed / "model.safetensors")[f"{Q}.g_idx"]
    change_tensors(packed, {f"{Q}.g_idx": index.flip(0).contiguous()})
    with pytest.raises(SettingsError, match=rf"'gptq-int4-g32': {Q}, .*k_proj, .*v_proj: .* order of its inputs"):
        load_decoder(packed, "float32", "native", threads=1)
    whole = load_file(floats / "model.safetensors")[f"{Q}.weight"]
    change_tensors(
        packed, {f"{Q}.{end}": None for end in ("qweight", "qzeros", "scales", "g_idx")} | {f"{Q}.weight": whole}
    )
    with pytest.raises(SettingsError, match="some is kept as none and some as int4-g32"):
        load_decoder(packed, "float32", "native", threads=1)


def change_tensors(folder: Path, changes: dict[str, Any]) -> None:
    tensors = load_file(folder / "model.safetensors") | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("form", [Form(), Form(bits=8, group=-1, sym=True)], ids=["4", "8"])
def test_the_check_at_start_is_of_such_integers(plain: Path, tmp_path: Path, form: Form) -> None:
    require_native()
    packed, _, _ = written(plain, tmp_path, form)
    model = load_decoder(packed, "bfloat16", "native", threads=1)
    assert run_self_check(model.config, model.dtype, model.kernels, model.quant).exact
    assert f"-bfloat16-{packed_as(packed)}." in numerics_id("bfloat16", model.kernels, model.quant)


def test_quality_is_measured_and_decides_the_dtype(gptq: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_native()
    monkeypatch.setattr(quality, "load_sets", lambda _: {"code": list(range(60))})
    wanted = quality.of_checkpoint(
        gptq, [Configuration("native", "bfloat16"), Configuration("native", "float32", "int8")]
    )
    assert wanted == [Configuration("native", "bfloat16", "gptq-int4-g32")]
    (record,) = quality.measure(gptq, wanted, 1)
    assert (record.configuration, record.model) == (wanted[0], model_digest(gptq))
    monkeypatch.setattr("shared.model.decoder.open_gate", lambda _: open_gate(tmp_path))
    assert load_decoder(gptq, AUTO, "native", threads=1).dtype == torch.float32
    passed = {"code": SetFigures(60, 0.001, 1.0)}
    keep_record(own_results(tmp_path), replace(record, sets=passed))
    assert load_decoder(gptq, AUTO, "native", threads=1).dtype == torch.bfloat16
    with pytest.raises(SettingsError, match="are gptq-int4-g32 and stay so"):
        quality.of_checkpoint(gptq, [Configuration("native", "bfloat16", "int8")])


def test_packed_weights_are_kept_and_found_again(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_native()
    gptq, _, _ = written(plain, tmp_path, Form(act_order=True))
    token_ids = random_tokens(8, 320, seed=1)
    packs = PackCache(tmp_path / "packed", least_bytes=0)
    monkeypatch.setattr("shared.model.decoder.PackCache", lambda _: packs)
    first = our_logits(load_decoder(gptq, "float32", "native", threads=1), "float32", token_ids, tmp_path)
    assert len(list(packs.folder.glob("*.pack"))) == 1
    monkeypatch.setattr("shared.model.weights.unpacked", None)  # nothing is read of the checkpoint again
    again = our_logits(load_decoder(gptq, "float32", "native", threads=1), "float32", token_ids, tmp_path)
    assert torch.equal(first, again)


@pytest.mark.parametrize(
    ("told", "packing"),
    [
        ({"method": "gptq", "format": "gptq_v2", "bits": 4, "group_size": 128}, Packing("gptq", 4, 128)),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, Packing("gptq", 4, 0, less_one=True)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}, Packing("awq", 4, 64)),
        ({"method": "awq", "format": "gemm", "bits": 4, "group_size": 32}, Packing("awq", 4, 32)),
    ],
)
def test_other_writers_words(gptq: Path, told: dict[str, Any], packing: Packing) -> None:
    change_config(gptq, quantization_config=told)
    assert load_config(gptq).packing == packing


@pytest.mark.parametrize("method", ["gptq", "compressed-tensors"])
def test_an_order_that_is_told_of_must_be_there(plain: Path, tmp_path: Path, method: str) -> None:
    packed, _, _ = written(plain, tmp_path, Form(method, act_order=True))
    name = f"{Q}.g_idx" if method == "gptq" else f"{Q}.weight_g_idx"
    change_tensors(packed, {name: None})
    with pytest.raises(SettingsError, match="is missing from") as error:
        load_decoder(packed, "float32", "torch")
    assert error.value.param == name
