"""The gate of number formats: figures decide by thresholds, and only what passed becomes a default."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from kernels.linear.quantize import GPU_QUANTS, RULE
from shared.contracts.errors import SettingsError
from shared.engine.worker_engine import WorkerOptions
from shared.engine.worker_quality import on_gpu, told_quality
from shared.model import quality_gate
from shared.model.decoder import configuration_of, load_decoder
from shared.model.digest import model_digest
from shared.model.quality_gate import (
    AUTO,
    SHIPPED,
    Configuration,
    Gate,
    Record,
    SetFigures,
    keep_record,
    open_gate,
    own_results,
    read_records,
)
from tests.native import require_native
from tests.tiny_models import make_tiny_model

BF16 = Configuration("native", "bfloat16")
GPU = Configuration("triton", "bfloat16")
GOOD = SetFigures(1000, 0.001, 0.99)


def record(configuration: Configuration = BF16, **sets: SetFigures) -> Record:
    return Record("digest", "tiny", configuration, "build-1", sets or {"code": GOOD, "chat": GOOD})


def test_figures_at_the_thresholds_pass() -> None:
    assert record(code=SetFigures(10, 0.02, 0.97), chat=SetFigures(10, 0.02, 0.97)).passed
    assert record(code=SetFigures(10, 0.0, 1.0)).passed


@pytest.mark.parametrize(
    ("code", "chat", "words"),
    [
        (SetFigures(10, 0.021, 0.99), SetFigures(10, 0.0202, 0.99), "KL 0.0206 nat is above 0.02"),
        (SetFigures(10, 0.001, 0.95), SetFigures(10, 0.001, 0.98), "top-1 96.50% is below 97%"),
    ],
)
def test_figures_beyond_them_fail(code: SetFigures, chat: SetFigures, words: str) -> None:
    found = record(code=code, chat=chat)
    assert found.faults() == [words]
    assert f"FAILED: {words}" in str(found)


def test_one_set_far_worse_than_the_others_fails_however_short() -> None:
    found = record(code=GOOD, chat=GOOD, long=SetFigures(10, 0.01, 0.99))
    assert found.faults() == ["long's KL 0.0100 nat is above 2 times the mean"]


def test_figures_that_are_no_numbers_fail() -> None:
    nan = float("nan")
    assert len(record(code=SetFigures(10, nan, nan)).faults()) == 3


def test_only_what_passed_becomes_a_default() -> None:
    failed = record(replace(BF16, kernels="torch"), code=SetFigures(10, 0.5, 0.5))
    gate = Gate([record(), failed])
    assert gate.default_dtype("digest", "native") == "bfloat16"
    assert [gate.default_dtype("digest", kernels) for kernels in ("torch", "triton")] == ["float32", "float32"]
    assert gate.default_dtype("other weights", "native") == "float32"


def test_what_is_allowed_and_what_is_said() -> None:
    failed = record(replace(BF16, quant="int4"), code=SetFigures(10, 0.5, 0.5))
    gate = Gate([record(), failed])
    assert gate.allows("digest", BF16)
    assert gate.describe("digest", BF16) == "bfloat16 on native kernels: KL 0.00100 nat, top-1 99.00%: passed"
    assert gate.describe("digest", BF16, "build-2").endswith("passed; measured with another build")
    assert not gate.allows("digest", failed.configuration)
    assert "int4 over bfloat16 on native kernels: KL 0.50000 nat" in gate.describe("digest", failed.configuration)
    unknown = replace(BF16, quant="int8")
    assert not gate.allows("digest", unknown)
    assert gate.describe("digest", unknown).endswith("quality never measured for this model")
    for exact in (Configuration("torch", "float32"), Configuration("native", "float64")):
        assert gate.allows("new", exact)
    assert not gate.allows("new", Configuration("native", "float32", "int8"))


def test_a_record_is_kept_in_place_of_the_older_one(tmp_path: Path) -> None:
    path = own_results(tmp_path / "cache")
    assert read_records(path) == []
    other = record(replace(BF16, quant="int8"))
    for one in (record(), other, replace(record(), numerics="build-2")):
        keep_record(path, one)
    assert read_records(path) == [other, replace(record(), numerics="build-2")]


def test_one_s_own_measure_counts_before_the_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = tmp_path / "shipped.json"
    monkeypatch.setattr(quality_gate, "SHIPPED", shipped)
    keep_record(shipped, record())
    assert open_gate(tmp_path).default_dtype("digest", "native") == "bfloat16"
    keep_record(own_results(tmp_path), record(code=SetFigures(10, 0.5, 0.5)))
    assert open_gate(tmp_path).default_dtype("digest", "native") == "float32"


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"format": 9, "records": []}', '{"format": 1, "records": [{}]}', '{"format": 1, "records": [3]}'],
)
def test_a_file_that_cannot_be_read_is_named_and_counts_as_empty(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    own_results(tmp_path).write_text(text)
    with pytest.raises(SettingsError, match=r"quality\.json"):
        read_records(own_results(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert open_gate(tmp_path).default_dtype("digest", "native") == "float32"
    assert "it counts as empty" in caplog.text


def test_impossible_figures_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    keep_record(path, record())
    raw = json.loads(path.read_text())
    raw["records"][0]["sets"]["code"]["top1"] = 1.5
    path.write_text(json.dumps(raw))
    with pytest.raises(SettingsError, match=r"records\[0\] is not a quality record: impossible"):
        read_records(path)


def test_what_is_shipped_was_measured_with_these_integers() -> None:
    records = read_records(SHIPPED)
    assert records
    for one in records:
        quant = one.configuration.quant
        assert quant in GPU_QUANTS
        assert f"-{one.configuration.dtype}{f'-{quant}.{RULE}' if quant != 'none' else ''}-" in one.numerics


def test_a_model_is_loaded_as_its_record_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    require_native()
    folder = make_tiny_model(tmp_path / "tiny")
    digest = model_digest(folder)
    # the libraries built meanwhile stay where they are: only the gate looks here
    monkeypatch.setattr("shared.model.decoder.open_gate", lambda _: open_gate(tmp_path))
    monkeypatch.setattr("shared.engine.worker_quality.open_gate", lambda _: open_gate(tmp_path))
    assert configuration_of(load_decoder(folder, AUTO, "native", threads=1)) == Configuration("native", "float32")
    keep_record(own_results(tmp_path), replace(record(), model=digest))
    assert configuration_of(load_decoder(folder, AUTO, "native", threads=1)) == BF16
    assert configuration_of(load_decoder(folder, AUTO, "torch", threads=1)) == Configuration("torch", "float32")
    with caplog.at_level(logging.WARNING):
        told_quality(BF16, digest, "build-1", warn=True)
        told_quality(replace(BF16, quant="int8"), digest, "build-1", warn=False)
        assert not caplog.records
        told_quality(replace(BF16, quant="int8"), digest, "build-1", warn=True)
    assert [one.message for one in caplog.records] == [
        "int8 over bfloat16 on native kernels: quality never measured for this model"
    ]
    options = WorkerOptions(model_dir=folder, kv_dir=tmp_path, dtype=AUTO)
    assert on_gpu(options).dtype == "float32"
    failed = {"code": SetFigures(100, 0.5, 0.9)}
    keep_record(own_results(tmp_path), replace(record(), model=digest, configuration=GPU, sets=failed))
    assert on_gpu(options).dtype == "float32"
    keep_record(own_results(tmp_path), replace(record(), model=digest, configuration=GPU))
    assert on_gpu(options).dtype == "bfloat16"
    assert on_gpu(replace(options, dtype="bfloat16")).dtype == "bfloat16"


@pytest.mark.model
def test_the_default_model_is_the_one_that_was_measured(default_model_dir: Path, tmp_path: Path) -> None:
    gate, digest = open_gate(tmp_path), model_digest(default_model_dir)
    assert gate.default_dtype(digest, "native") == "bfloat16"
    assert gate.default_dtype(digest, "torch") == "float32"
