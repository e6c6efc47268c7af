"""`python -m loadtest.contention`: rates over the time all were at work, parts of what is reached alone, and a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest import contention
from loadtest.contention import SCENARIOS, Sample, figures, rates
from loadtest.contention_worker import Step
from loadtest.machine import IDLE_CORES
from tests.native import require_native
from tests.tiny_models import make_tiny_model


def test_steps_at_the_edge_count_by_their_part() -> None:
    decode = [Step("decode", float(i), i + 1.0) for i in range(10)]
    prefill = [Step("prefill", 1.0, 4.0), Step("prefill", 4.0, 7.0)]
    # both were at work from 1 to 7
    assert rates([decode, prefill]) == {"decode": pytest.approx(1.0), "prefill": pytest.approx(1 / 3)}
    half = [Step("prefill", 2.5, 4.5)]
    assert rates([decode, half]) == {"decode": pytest.approx(1.0), "prefill": pytest.approx(0.5)}
    assert rates([decode]) == {"decode": pytest.approx(1.0)}
    turns = [Step("decode", 0.0, 1.0), Step("prefill", 1.0, 4.0)]
    assert rates([turns]) == {"decode": pytest.approx(0.25), "prefill": pytest.approx(0.25)}


def samples(**changed: dict[str, float]) -> dict[str, list[Sample]]:
    found = {
        "decode alone": {"decode": 20.0},
        "prefill alone": {"prefill": 4.0},
        "one worker": {"decode": 10.0, "prefill": 2.0},
        "two workers": {"decode": 9.0, "prefill": 2.0},
        "unshared": {"decode": 2.0, "prefill": 1.0},
        "decode, spinner": {"decode": 12.0},
        "prefill, spinner": {"prefill": 2.0},
    } | changed
    assert set(found) == {scenario.name for scenario in SCENARIOS}
    return {name: [Sample(each, 0.0)] * 3 for name, each in found.items()}


def test_figures_are_parts_of_what_each_reaches_alone() -> None:
    found = figures(samples())
    assert found["two_of_one"] == pytest.approx(0.95)
    assert found["unshared_of_one"] == pytest.approx(0.35)
    assert found["spinner_costs"] == {"decode": pytest.approx(0.4), "prefill": pytest.approx(0.5)}


def test_samples_of_a_busy_machine_are_dropped_while_there_are_others() -> None:
    taken = samples()
    taken["two workers"] = [Sample({"decode": 1.0, "prefill": 0.1}, 2 * IDLE_CORES), *taken["two workers"]]
    assert figures(taken)["two_of_one"] == pytest.approx(0.95)
    assert figures(taken)["clean"]["two workers"] == 3
    taken["two workers"] = taken["two workers"][:1]
    assert figures(taken)["two_of_one"] == pytest.approx(0.075)
    assert figures(taken)["clean"]["two workers"] == 0


def test_a_run_on_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require_native()
    folder = make_tiny_model(tmp_path / "tiny", num_hidden_layers=1)
    target = tmp_path / "report.json"
    arguments = ["--model", str(folder), "--seconds", "0.2", "--rounds", "1", "--json", str(target)]
    assert contention.main(arguments) == 0
    report = json.loads(target.read_text())
    assert all(found["decode"] + found["prefill"] > 0 for found in report["figures"]["steps_s"].values())
    assert len(report["samples"]["two workers"]) == 1
    assert "two workers reach" in capsys.readouterr().out


def test_a_model_that_cannot_be_used_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert contention.main(["--model", str(tmp_path), "--rounds", "1"]) == 1
    assert "config.json" in capsys.readouterr().err
