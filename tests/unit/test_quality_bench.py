"""`./baton bench quality`: what it computes, on a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels.native.cpu import VARIABLE
from loadtest import quality
from loadtest.quality import Sums, lines_of, load_sets, measure, windows
from shared.contracts.errors import Internal, SettingsError
from shared.model.quality_gate import Configuration, Record, SetFigures, own_results, read_records
from tests.native import require_native
from tests.tiny_models import make_tiny_model
from tests.tiny_tokenizer import tokenizer_json


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_tiny_model(tmp_path_factory.mktemp("tiny"), vocab_size=512)
    (made / "tokenizer.json").write_bytes(tokenizer_json())
    return made


def test_sums_are_the_divergence_from_float32() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.5, 0.25]])
    sums = Sums()
    sums.add(p.log() + 3, q.log() - 2)
    sums.add(p.log(), p.log())
    figures = sums.figures()
    assert (figures.positions, figures.top1) == (2, 0.5)
    assert figures.kl == pytest.approx((0.5 * 0.6931472 - 0.25 * 0.6931472) / 2, abs=1e-6)


def test_logits_that_are_not_finite_are_no_figure() -> None:
    rows = torch.zeros(2, 3)
    with pytest.raises(Internal, match="not finite"):
        Sums().add(rows, rows.index_fill(0, torch.tensor([1]), float("nan")))


def test_windows_keep_every_token() -> None:
    assert [list(one) for one in windows(range(7), 3)] == [[0, 1, 2], [3, 4, 5], [6]]


def test_the_committed_texts_are_what_was_promised(folder: Path) -> None:
    sets = load_sets(folder)
    assert set(sets) == {"chat", "code", "long", "multilingual"}
    assert min(map(len, sets.values())) > 2000


def test_chunks_and_windows_are_read_as_the_whole(folder: Path, tmp_path: Path) -> None:
    """Against transformers, over more tokens than a chunk."""
    from transformers import AutoModelForCausalLM

    token_ids = torch.randint(0, 512, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    model = quality._load(folder, Configuration("torch", "float32"), 1)
    reader = quality.Reader(model, tmp_path, "one", 300)
    try:
        found = torch.cat([reader.read(start, token_ids[start : start + 256]) for start in (0, 256)])
    finally:
        reader.pool.close()
    with torch.inference_mode():
        wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([token_ids])).logits[0]
    assert torch.allclose(found, wanted, atol=1e-4)


@pytest.fixture
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("torch_threads")
def test_a_configuration_is_measured_and_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quality, "own_results", lambda _: own_results(tmp_path))
    texts = {"code": list(range(300)), "chat": list(range(40, 80))}
    monkeypatch.setattr(quality, "load_sets", lambda _: texts)
    command = ["--model", str(folder), "--kernels", "torch", "--threads", "1"]
    assert quality.main([*command, "--dtype", "bfloat16"]) == 0
    (record,) = read_records(own_results(tmp_path))
    assert record.configuration == Configuration("torch", "bfloat16")
    assert {name: one.positions for name, one in record.sets.items()} == {"code": 300, "chat": 40}
    assert all(0 < one.kl < 0.01 for one in record.sets.values())
    assert "mean of sets" in capsys.readouterr().out
    assert quality.main([*command, "--dtype", "float32"]) == 0
    _, same = read_records(own_results(tmp_path))
    assert all(abs(one.kl) < 1e-6 and one.top1 == 1.0 for one in same.sets.values())


def test_integers_are_farther_off_the_fewer_bits_they_have(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_native()
    monkeypatch.setattr(quality, "load_sets", lambda _: {"code": list(range(200))})
    wanted = [Configuration("native", "float32", quant) for quant in ("none", "int8", "int4")]
    plain, int8, int4 = (record.kl for record in measure(folder, wanted, 1))
    assert plain < int8 < int4


def test_kernels_that_cannot_be_had_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "none")
    with pytest.raises(SettingsError, match="cannot be had here"):
        measure(folder, [Configuration("native", "bfloat16")], 1)


def test_the_report_names_figures_and_thresholds() -> None:
    sets = {"code": SetFigures(9, 0.001, 0.99)}
    text = "\n".join(lines_of([Record("d", "tiny", Configuration("native", "bfloat16"), "n", sets)]))
    assert "bfloat16 on native kernels" in text
    assert "9 positions   KL 0.00100 nat   top-1  99.00%" in text
    assert "passed: mean KL <= 0.02 nat, mean top-1 >= 97%" in text
