"""`[engine] quant`: who may set it, where it reaches, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from kernels.dispatch import KernelChoice
from kernels.linear.quantize import GPU_QUANTS, NONE, QUANTS
from kernels.native.cpu import NEEDED, VARIABLE
from services.cli import doctor_stack
from services.cli.config import problems
from services.cli.doctor import FAIL, WARN
from services.cli.native_kernels import prepare_kernels
from services.cli.options import up_flags, up_parser
from shared.contracts.errors import SettingsError
from shared.engine.numerics import numerics_id
from shared.engine.worker_settings import worker_options
from shared.model.decoder import load_decoder
from shared.settings.load import LoadedSettings, load_settings
from shared.settings.models import for_model, served_models
from shared.settings.sections import GPU_ONLY, EngineSettings, ModelEntry, Quantization, Settings, WorkersSettings
from tests.native import require_native
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def test_the_settings_know_what_the_kernels_know() -> None:
    assert get_args(Quantization) == tuple(GPU_QUANTS)
    assert set(GPU_ONLY) == GPU_QUANTS.keys() - QUANTS.keys()
    assert all(quant.name == name for name, quant in GPU_QUANTS.items())


def test_a_flag_reaches_the_worker() -> None:
    flags = up_flags(up_parser().parse_args(["--quant", "int8", "--dtype", "bfloat16"]))
    settings = load_settings(flags={name: value for name, value in flags.items() if value is not None}).settings
    options = worker_options(for_model(settings, served_models(settings)[0]), "decode", os.environ)
    assert (options.quant, options.dtype) == ("int8", "bfloat16")


@pytest.mark.parametrize("exact", [True, False])
def test_exact_sums_reach_the_worker(exact: bool) -> None:
    settings = Settings(engine=EngineSettings(exact=exact))
    assert worker_options(for_model(settings, served_models(settings)[0]), "prefill", os.environ).exact is exact


def test_a_model_has_its_own_or_the_engine_s(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    tables = "[[models]]\nname = 'a'\n[[models]]\nname = 'b'\nquant = 'int4'\n[[models]]\nname = 'c'\nquant = 'none'\n"
    file.write_text(f"schema = 1\n[engine]\nquant = 'int8'\n{tables}")
    settings = load_settings(file=file).settings
    assert [model.quant for model in served_models(settings)] == ["int8", "int4", "none"]
    assert [for_model(settings, model).engine.quant for model in served_models(settings)] == ["int8", "int4", "none"]


@pytest.mark.parametrize(
    ("dtype", "kernels", "quant", "words"),
    [
        ("float32", "torch", "int8", "not kernels 'torch'"),
        ("float32", "reference", "int4", "not kernels 'reference'"),
        ("float64", "native", "int8", "with dtype 'float64'"),
        ("float32", "native", "int3", "none of none, int8"),
        ("float32", "auto", "w8a8", "quant 'w8a8' needs a GPU, and a CPU computes here"),
        ("bfloat16", "native", "fp8", "quant 'fp8' needs a GPU, and a CPU computes here"),
    ],
)
def test_what_cannot_be_computed_is_refused(folder: Path, dtype: str, kernels: str, quant: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words) as error:
        load_decoder(folder, dtype, kernels, quant=quant)
    assert error.value.param == "quant"


def test_without_native_kernels_nothing_else_computes_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "none")
    with pytest.raises(SettingsError, match="quant 'int8' needs the native kernels"):
        load_decoder(folder, "float32", "auto", quant="int8")


def test_a_weight_without_integers_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    require_native()
    broken = make_tiny_model(tmp_path / "tiny")
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SettingsError, match=r"quant 'int4': model\.layers\.0\.mlp\.down_proj: a weight is not finite"):
        load_decoder(broken, "float32", "native", quant="int4", threads=1)


def test_automatic_kernels_are_the_native_ones(folder: Path) -> None:
    require_native()
    model = load_decoder(folder, "bfloat16", "auto", quant="int8", threads=1)
    assert model.kernels.native is not None
    assert model.quant is QUANTS["int8"]
    assert model.dtype == torch.bfloat16


def test_the_numerics_id_tells_them_apart() -> None:
    choice = KernelChoice("reference")
    ids = {numerics_id("float32", choice, quant) for quant in GPU_QUANTS.values()}
    assert len(ids) == len(GPU_QUANTS)
    assert numerics_id("float32", choice, NONE) == numerics_id("float32", choice)


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"kernels": "torch"}, "needs the native kernels or a GPU, not engine.kernels = 'torch'"),
        ({"device": "cuda"}, ""),
        ({"kernels": "native"}, ""),
    ],
)
@pytest.mark.parametrize("own", [True, False])
def test_settings_that_contradict_are_told_before_a_start(engine: dict[str, str], words: str, own: bool) -> None:
    quant: dict[str, Any] = {} if own else {"quant": "int8"}
    model = ModelEntry(name="a", quant="int8" if own else None)
    settings = Settings(engine=EngineSettings(**engine, **quant), models=(ModelEntry(name="b", quant="none"), model))
    name = "models.1.quant" if own else "engine.quant"
    assert list(problems(LoadedSettings(settings, {}))) == ([f"{name} = 'int8' {words}"] if words else [])
    if words:
        with pytest.raises(SettingsError, match=f"^quant 'int8' of a {words}$"):
            prepare_kernels(settings, {})
    fake = settings.model_copy(update={"workers": WorkersSettings(fake=True)})
    assert prepare_kernels(fake, {}) == ""
    assert not list(problems(LoadedSettings(fake, {})))


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"kernels": "native"}, "needs a GPU, not engine.kernels = 'native'"),
        ({"device": "cpu"}, "needs a GPU, not engine.device = 'cpu'"),
        ({}, ""),
    ],
)
def test_rows_of_8_bits_need_a_gpu(engine: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told before a start; with the GPU that nothing rules out they start."""
    model = ModelEntry(name="a", quant="w8a8")
    settings = Settings(engine=EngineSettings(**engine), models=(model,))
    told = [f"models.0.quant = 'w8a8' {words}"] if words else []
    assert list(problems(LoadedSettings(settings, {}))) == told
    monkeypatch.setattr("services.cli.native_kernels.has_gpu", lambda: False)
    with pytest.raises(SettingsError, match=f"^quant 'w8a8' of a {words or 'needs a GPU, and there is none here'}$"):
        prepare_kernels(settings, {})
    fake = settings.model_copy(update={"workers": WorkersSettings(fake=True)})
    assert prepare_kernels(fake, {}) == ""
    monkeypatch.setattr(doctor_stack, "has_gpu", lambda: False)
    found = doctor_stack.kernels(Settings(engine=EngineSettings(quant="fp8")), {})
    assert (found.verdict, found.detail) == (FAIL, "quant 'fp8' needs a GPU")
    if not words:
        monkeypatch.setattr("services.cli.native_kernels.has_gpu", lambda: True)
        assert prepare_kernels(settings, {}) == ""


def test_a_stack_whose_integers_nothing_multiplies_does_not_start(tmp_path: Path) -> None:
    env = {"BATON_CACHE": str(tmp_path), VARIABLE: "none"}
    settings = Settings(engine=EngineSettings(quant="int4"))
    with pytest.raises(SettingsError, match=f"^quant 'int4' needs the native kernels: {NEEDED}$"):
        prepare_kernels(settings, env)
    found = doctor_stack.kernels(settings, env)
    assert (found.verdict, found.detail) == (FAIL, NEEDED)
    assert "none" in found.fix
    assert doctor_stack.kernels(Settings(), env).verdict == WARN
