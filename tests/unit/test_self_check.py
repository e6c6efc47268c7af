from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shared.engine.self_check as module
from kernels.dispatch import KernelChoice, choose
from kernels.native.model import NativeModel
from shared.contracts.errors import SettingsError
from shared.engine.numerics import numerics_id
from shared.engine.self_check import run_self_check
from shared.model.config import parse_config
from shared.model.fetch import cache_dir
from tests.native import require_native
from tests.unit.test_model_config import PLAIN

CONFIG = parse_config(PLAIN, Path("config.json"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_this_machine_passes(dtype: torch.dtype) -> None:
    report = run_self_check(CONFIG, dtype, choose("torch"))
    report.require_exact()
    assert len(report.checks) == 8
    assert report.duration_s < 20  # under 2 s on an idle machine


def test_a_product_that_depends_on_its_batch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def sloppy(x: torch.Tensor, weight: object) -> torch.Tensor:
        return x * (1 + len(x) * 1e-7)

    monkeypatch.setattr(module, "linear", sloppy)
    report = run_self_check(CONFIG, torch.float32, KernelChoice("reference"))
    assert not report.exact
    with pytest.raises(SettingsError, match="linear qkv"):
        report.require_exact()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_native_kernels_pass(dtype: torch.dtype) -> None:
    require_native()
    report = run_self_check(CONFIG, dtype, choose("native", cache_dir(os.environ) / "kernels"))
    report.require_exact()
    assert [check.name for check in report.checks] == ["native step"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda model, rows: rows * (1 + len(rows) * 1e-7), "chunks"),
        (lambda model, rows: rows * (1 + model.team.threads * 1e-7), "two threads"),
        (lambda model, rows: rows if len(rows) > 1 else rows * (1 + 1e-7), "chunks of \\(1, 599\\)"),
        (lambda model, rows: rows * float("nan"), "never written"),
    ],
    ids=["rows", "threads", "lone rows", "not finite"],
)
def test_native_kernels_that_depend_on_company_are_caught(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[NativeModel, torch.Tensor], torch.Tensor], words: str
) -> None:
    require_native()
    sound = NativeModel.step
    monkeypatch.setattr(NativeModel, "step", lambda self, *args: fault(self, sound(self, *args)))
    report = run_self_check(CONFIG, torch.float32, choose("native", cache_dir(os.environ) / "kernels"))
    with pytest.raises(SettingsError, match=words):
        report.require_exact()


def test_numerics_id_tells_cards_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = {numerics_id("bfloat16", KernelChoice("cublas", triton="b"))}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability in ((8, 0), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        ids.add(numerics_id("bfloat16", KernelChoice("cublas", triton="b")))
    assert len(ids) == 3
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert len({numerics_id("bfloat16", KernelChoice("reference")), *ids}) == 4


def test_numerics_id_tells_dtypes_and_kernels_apart() -> None:
    ids = {numerics_id(d, KernelChoice(k)) for d in ("float32", "bfloat16") for k in ("reference", "onednn")}
    assert len(ids) == 4
    assert numerics_id("float32", KernelChoice("reference")) in ids
