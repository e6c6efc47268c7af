"""`./baton bench speculation`: what it tells, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest import bench
from tests.conformance.real_worker import tiny_checkpoint


def test_both_engines_say_the_same_and_every_cell_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = tiny_checkpoint(tmp_path / "model"), tmp_path / "out.json"
    small = ["--rounds", "2", "--tokens", "12", "--threads", "1", "--streams", "1", "2", "--texts", "copies"]
    assert bench.main(["speculation", "--model", str(model), "--json", str(out), *small]) == 0
    body = json.loads(out.read_text())
    assert [(f["text"], f["streams"]) for f in body["figures"]] == [("copies", 1), ("copies", 2)]
    for figure in body["figures"]:
        assert min(figure["off_tokens_s"], figure["on_tokens_s"], figure["ratio"], figure["cpu_ratio"]) > 0
        assert 0 <= figure["accepted"] <= figure["drafted"]
    assert len(capsys.readouterr().out.splitlines()) == 3
