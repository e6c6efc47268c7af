"""`./baton bench engine`: samples that others disturbed, figures and shares, and a run on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch

from kernels.native.cpu import VARIABLE
from loadtest import bench
from loadtest.engine import CELLS, LONGEST, cells_of, contestants, figures, text_of
from loadtest.machine import IDLE_CORES
from loadtest.samples import SAMPLE_S, Sample, Series, collect
from tests.native import require_native
from tests.tiny_models import make_tiny_model


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def series(*samples: tuple[float, float]) -> Series:
    return Series([Sample(step_s, foreign) for step_s, foreign in samples])


def test_a_disturbed_sample_does_not_count() -> None:
    one = series((1.0, 0.0), (9.0, IDLE_CORES + 0.01), (2.0, IDLE_CORES), (3.0, 0.1))
    assert one.idle
    assert one.step_s == 2.0


def test_a_machine_that_was_never_idle_is_told() -> None:
    one = series((1.0, 0.0), (9.0, 1.0), (5.0, 1.0))
    assert not one.idle
    assert one.step_s == 5.0


class Load:
    """Others use these cores, sample by sample."""

    def __init__(self, cores: Iterator[float]) -> None:
        self._cores = cores

    def __call__(self) -> Load:
        return self

    def cores(self) -> float:
        return next(self._cores)


def test_steps_take_turns_until_all_have_enough() -> None:
    clock = count(0.0, SAMPLE_S / 2)
    order: list[str] = []
    steps = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    load = Load(iter([0.0, 1.0, 0.0, 0.0, 0.0, 0.0]))
    found = collect(steps, 1e9, 2, lambda: next(clock), load)  # type: ignore[arg-type]
    # one step that does not count, then as many as fit: the clock moves on by half a sample a look
    assert "".join(order) == "aabb" * 3
    assert [len(one.clean) for one in found.values()] == [3, 2]
    assert {sample.step_s for one in found.values() for sample in one.samples} == {SAMPLE_S}


def test_no_round_begins_after_the_time() -> None:
    clock = count(0.0, 1.0)
    found = collect({"a": lambda: None}, 5.0, 99, lambda: next(clock), Load(iter([1.0] * 9)))  # type: ignore[arg-type]
    assert 1 <= len(found["a"].samples) <= 3


def measured() -> dict[str, Series]:
    """Steps that take a millisecond a row natively and two by torch; sweeps take half."""
    found: dict[str, Series] = {}
    for cell in CELLS:
        chunks = cell.tokens_a_step // cell.rows
        found[f"torch {cell.name}"] = series(*[(0.002 * cell.rows * chunks, 0.0)] * 3)
        found[f"native {cell.name}"] = series(*[(0.001 * cell.rows * chunks, 0.0)] * 3)
        found[cell.sweep] = series(*[(0.0005 * cell.rows, 0.0)] * 3)
    return found


def test_shares_are_of_the_same_rows() -> None:
    for row in figures(measured()):
        assert (row["torch"], row["native"]) == (pytest.approx(500), pytest.approx(1000))
        assert (row["ratio"], row["share"]) == (pytest.approx(2), pytest.approx(0.5))
        assert (row["idle"], row["clean"], row["dropped"]) == (True, 6, 0)


def report(found: dict[str, Series]) -> dict[str, object]:
    machine = {"cpu": "x", "date": "today"}
    head = {"model": "m", "dtype": "bfloat16", "quant": "none", "threads": 2, "weight_bytes": 10**9, "machine": machine}
    return head | {"figures": figures(found)}


def test_a_busy_cell_is_marked_in_the_table() -> None:
    found = measured()
    assert "BUSY" not in text_of(report(found))
    found["torch decode B8"] = series((1.0, 1.0), (1.0, 1.0))
    lines = text_of(report(found)).splitlines()
    assert [line.split()[1] for line in lines if "BUSY" in line] == ["B8"]
    assert "no measure of this machine" in lines[-1]


def test_without_native_kernels_torch_stands_alone() -> None:
    found = {name: one for name, one in measured().items() if name.startswith("torch")}
    text = text_of(report(found) | {"weight_bytes": None})
    assert "—" in text
    assert "GB/s" not in text


def test_cells_that_a_context_cannot_hold_are_left_out() -> None:
    assert [cell.tokens for cell in cells_of(8192, 4096)][-3:] == [0, 512, 2048]
    assert cells_of(8192, 8192) == list(CELLS)
    assert cells_of(2048, 128) == []


def test_integers_are_the_native_kernels_alone() -> None:
    assert contestants(None, "none") == ("torch", "native")
    assert contestants("native", "none") == contestants(None, "int8") == ("native",)
    assert contestants("torch", "int4") == ()


def test_integer_weights_by_themselves(tmp_path: Path) -> None:
    require_native()
    folder, out = make_tiny_model(tmp_path / "tiny", num_hidden_layers=1), tmp_path / "o"
    argv = ["engine", "--model", str(folder), "--quant", "int8", "--longest", "256", "--threads", "1", "--seconds", "0"]
    assert bench.main([*argv, "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert (found["quant"], list(found["numerics"])) == ("int8", ["native"])
    assert {row["torch"] for row in found["figures"]} == {None}
    assert all(row["native"] > 0 for row in found["figures"])


@pytest.mark.parametrize("native", [True, False])
def test_a_run_on_a_tiny_model(
    tmp_path: Path, native: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if native:
        require_native()
    else:
        monkeypatch.setenv(VARIABLE, "none")
    folder, out = make_tiny_model(tmp_path / "tiny", num_hidden_layers=1, max_position_embeddings=4096), tmp_path / "o"
    argv = ["engine", "--model", str(folder), "--dtype", "float32", "--threads", "1", "--seconds", "0"]
    assert bench.main([*argv, "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert [row["cell"] for row in found["figures"]] == [cell.name for cell in CELLS if cell.tokens <= LONGEST]
    assert found["copy_gb_s"] > 0
    for row in found["figures"]:
        assert row["torch"] > 0
        assert (row["native"] is not None) == (row["share"] is not None) == native
    assert set(found["numerics"]) == {"torch", *(["native"] if native else [])}
    assert "decode B32" in capsys.readouterr().out


def test_a_model_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["engine", "--model", str(tmp_path / "nothing")]) == 1
    assert "nothing" in capsys.readouterr().err
