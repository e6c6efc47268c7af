"""`[kv] dtype`: where it reaches, what it changes, and what is refused."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from kernels.native.cpu import NEEDED, VARIABLE
from loadtest.quality import Reader
from services.cli import doctor_stack
from services.cli.config import problems
from services.cli.doctor import FAIL
from services.cli.native_kernels import prepare_kernels
from shared.contracts.errors import SettingsError
from shared.contracts.ids import WorkerId
from shared.engine.worker_engine import WorkerOptions, open_worker_engine
from shared.engine.worker_settings import worker_options
from shared.kv.layout import LayerGroup, fingerprint
from shared.model.decoder import load_decoder
from shared.model.kv_dtype import kv_dtype_of, kv_dtype_on_gpu
from shared.model.quality_gate import SAME, Configuration, Gate
from shared.settings.load import LoadedSettings
from shared.settings.models import for_model, served_models
from shared.settings.sections import EngineSettings, KvSettings, Settings, WorkersSettings
from tests.native import require_native
from tests.tiny_models import make_tiny_model

INT8 = Settings(kv=KvSettings(dtype="int8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def test_a_setting_reaches_the_worker() -> None:
    assert worker_options(for_model(INT8, served_models(INT8)[0]), "decode", os.environ).kv_dtype == "int8"
    with pytest.raises(ValidationError, match=r"dtype\n.*'auto', 'bfloat16', 'float32', 'float16', 'int8' or 'fp8'"):
        KvSettings.model_validate({"dtype": "int4"})


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_float16_is_nearly_what_float32_is(folder: Path, tmp_path: Path, kernels: str) -> None:
    if kernels == "native":
        require_native()
    model = load_decoder(folder, "float32", kernels, threads=1)
    token_ids = [i * 7 % 300 for i in range(100)]
    with ExitStack() as stack:
        readers = [Reader(model, tmp_path, f"kv-{i}", 100, kv) for i, kv in enumerate((SAME, "float16", "float16"))]
        for reader in readers:
            stack.callback(reader.close)
        plain, halves = (reader.read(0, token_ids) for reader in readers[:2])
        parts = [readers[2].read(first, token_ids[first : first + 10]) for first in range(0, 100, 10)]
        assert readers[1].pool.layout.groups[0].span_bytes * 2 == readers[0].pool.layout.groups[0].span_bytes
    assert 0 < float((halves - plain).abs().max()) < 2e-2
    assert torch.equal(torch.cat(parts), halves)


@pytest.mark.parametrize(
    ("wanted", "kept"), [("auto", "float32"), ("float32", "float32"), ("float16", "float16"), ("int8", "int8")]
)
def test_native_kernels_keep_kv_as_they_compute_or_in_fewer_bits(folder: Path, wanted: str, kept: str) -> None:
    require_native()
    assert kv_dtype_of(wanted, load_decoder(folder, "float32", "native", threads=1)) == kept


@pytest.mark.parametrize(
    ("kernels", "wanted", "words"),
    [
        ("native", "bfloat16", "kv.dtype 'bfloat16' .* in float32: its KV is one of auto, float32, float16, int8$"),
        ("torch", "int8", "kv.dtype 'int8' needs the native kernels.*: auto, float32, float16 work with them$"),
        ("torch", "fp8", "kv.dtype 'fp8' needs a GPU.*: auto, float32, float16, int8 work$"),
    ],
)
def test_what_nothing_reads_is_refused(folder: Path, kernels: str, wanted: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words) as error:
        kv_dtype_of(wanted, load_decoder(folder, "float32", kernels, threads=1))
    assert error.value.param == "kv.dtype"


def test_a_gpu_keeps_kv_as_it_computes_or_in_8_bits() -> None:
    kept = {wanted: kv_dtype_on_gpu(wanted, "bfloat16", (8, 9)) for wanted in ("auto", "bfloat16", "int8", "fp8")}
    assert kept == {"auto": "bfloat16", "bfloat16": "bfloat16", "int8": "int8", "fp8": "float8_e4m3fn"}
    assert kv_dtype_on_gpu("int8", "float32", (8, 0)) == "int8"
    with pytest.raises(SettingsError, match="'fp8' needs sm_89 or newer, this GPU is sm_80: int8 works on it"):
        kv_dtype_on_gpu("fp8", "bfloat16", (8, 0))
    for wrong in ("float32", "float16"):
        with pytest.raises(SettingsError, match="one of bfloat16, int8, fp8") as error:
            kv_dtype_on_gpu(wrong, "bfloat16", (9, 0))
        assert error.value.param == "kv.dtype"


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (EngineSettings(kernels="native"), "needs a GPU, not engine.kernels = 'native'"),
        (EngineSettings(device="cpu"), "needs a GPU, not engine.device = 'cpu'"),
        (EngineSettings(), ""),
    ],
)
def test_float8_is_a_gpu_s(engine: EngineSettings, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.cli.native_kernels.has_gpu", lambda: False)
    settings = Settings(kv=KvSettings(dtype="fp8"), engine=engine)
    assert list(problems(LoadedSettings(settings, {}))) == ([f"kv.dtype = 'fp8' {words}"] if words else [])
    with pytest.raises(SettingsError, match=r"^kv\.dtype 'fp8' needs a GPU"):
        prepare_kernels(settings, {})
    monkeypatch.setattr("services.cli.doctor_stack.has_gpu", lambda: False)
    if engine.kernels == "auto":
        assert doctor_stack.kernels(settings, {}).verdict == FAIL
    fake = settings.model_copy(update={"workers": WorkersSettings(fake=True)})
    assert not list(problems(LoadedSettings(fake, {})))
    assert prepare_kernels(fake, {}) == ""


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (EngineSettings(kernels="triton"), "is for CPUs, not engine.kernels = 'triton'"),
        (EngineSettings(device="cuda"), "is for CPUs, not engine.device = 'cuda'"),
        (EngineSettings(), ""),
    ],
)
def test_float16_is_a_cpu_s(engine: EngineSettings, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("native_kernels", "doctor_stack"):
        monkeypatch.setattr(f"services.cli.{module}.has_gpu", lambda: True)
    settings = Settings(kv=KvSettings(dtype="float16"), engine=engine)
    assert list(problems(LoadedSettings(settings, {}))) == ([f"kv.dtype = 'float16' {words}"] if words else [])
    with pytest.raises(SettingsError, match=r"^kv\.dtype 'float16' is for CPUs"):
        prepare_kernels(settings, {})
    if not words:
        assert doctor_stack.kernels(settings, {}).verdict == FAIL
    fake = settings.model_copy(update={"workers": WorkersSettings(fake=True)})
    assert not list(problems(LoadedSettings(fake, {})))
    assert prepare_kernels(fake, {}) == ""


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (EngineSettings(kernels="torch"), "needs the native kernels or a GPU, not engine.kernels = 'torch'"),
        (EngineSettings(device="cuda"), ""),
        (EngineSettings(), ""),
    ],
)
def test_settings_that_contradict_are_told_before_a_start(engine: EngineSettings, words: str) -> None:
    settings = INT8.model_copy(update={"engine": engine})
    assert list(problems(LoadedSettings(settings, {}))) == ([f"kv.dtype = 'int8' {words}"] if words else [])
    if words:
        with pytest.raises(SettingsError, match=f"^kv.dtype 'int8' {words}$"):
            prepare_kernels(settings, {})
    fake = settings.model_copy(update={"workers": WorkersSettings(fake=True)})
    assert not list(problems(LoadedSettings(fake, {})))


def test_a_stack_whose_kv_nothing_reads_does_not_start(tmp_path: Path) -> None:
    env = {"BATON_CACHE": str(tmp_path), VARIABLE: "none"}
    with pytest.raises(SettingsError, match=f"^kv.dtype 'int8' needs the native kernels: {NEEDED}$"):
        prepare_kernels(INT8, env)
    found = doctor_stack.kernels(INT8, env)
    assert (found.verdict, found.fix) == (FAIL, "kv.dtype needs them: set it to auto")


def test_integers_take_half_the_memory_and_a_scale_each() -> None:
    plain = LayerGroup("full", (0, 1, 2), 2, 64, 32, "bfloat16", "lanes16")
    integers = replace(plain, dtype="int8")
    assert replace(plain, dtype="float8_e4m3fn").span_bytes == integers.span_bytes
    vectors = 3 * 2 * 2 * 32
    assert (plain.span_bytes, integers.span_bytes) == (vectors * 128, vectors * 68)
    assert (integers.tiles_bytes, integers.scales_bytes, plain.scales_bytes) == (vectors * 64, vectors * 4, 0)
    halves = replace(plain, dtype="float16")
    assert halves.span_bytes == plain.span_bytes
    assert len({fingerprint((one,), "m", "n") for one in (plain, integers, halves)}) == 3


def test_a_worker_s_kv_decides_its_blocks_and_its_identity(folder: Path, tmp_path: Path) -> None:
    require_native()
    options = WorkerOptions(
        folder, tmp_path, dtype="bfloat16", pool_bytes=1 << 20, threads=1, kernels="native", calibrate=False
    )
    facts = []
    for kv_dtype in ("auto", "int8", "float16"):
        core = open_worker_engine(replace(options, kv_dtype=kv_dtype), WorkerId(f"decode-{kv_dtype}"))
        core.start()
        core.stop(30.0)
        facts.append(core.facts)
    plain, integers, halves = facts
    assert halves.layout.num_blocks == plain.layout.num_blocks
    assert len({one.fingerprint for one in facts}) == len({one.numerics for one in facts}) == 3
    assert "-kv.float16-" in halves.numerics
    assert integers.layout.num_blocks[0] >= 1.5 * plain.layout.num_blocks[0]  # heads of 16 and their scales
    assert "-kv.int8-" in integers.numerics
    assert integers.computes.startswith("bfloat16 on native kernels, KV in int8: quality never measured")


def test_integers_are_another_configuration_of_the_gate() -> None:
    exact = Configuration("native", "float32")
    assert exact.is_exact
    assert not replace(exact, kv="int8").is_exact
    assert not Gate([]).allows("m", replace(exact, kv="int8"))
    assert str(replace(exact, kv="int8")) == "float32 on native kernels, KV in int8"
