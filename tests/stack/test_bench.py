"""`./baton bench` on stacks of its own, with fake workers: whole, and nothing left behind."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.stack.running import Baton

pytestmark = pytest.mark.timeout(300)


def bench(folder: Path, *argv: str) -> tuple[subprocess.CompletedProcess[str], dict[str, object]]:
    baton, out = Baton(folder / "unused"), folder / "out.json"
    done = baton.run("bench", *argv, "--set", "workers.fake=true", "--json", str(out), timeout_s=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(baton.temporary.iterdir()), "its state folder was left"
    return done, json.loads(out.read_text())


def test_smoke_prints_a_table_and_writes_everything(tmp_path: Path) -> None:
    done, report = bench(tmp_path, "smoke", "--requests", "5", "--rate", "10", "--seed", "3")
    assert "seed 3" in done.stdout
    figures = report["figures"]["as set"]  # type: ignore[index]
    assert (figures["requests"], figures["errors"], figures["queue_seen"]) == (5, 0, 5)
    for key in ("ttft_s", "itl_s", "total_s", "queue_s"):
        assert 0 <= figures[key]["p50"] <= figures[key]["p95"] <= figures[key]["p99"]
    assert figures["tokens"] == sum(o["tokens"] for o in report["rounds"][0]["outcomes"])  # type: ignore[index]


@pytest.mark.long
def test_batching_runs_the_three_policies_in_turn(tmp_path: Path) -> None:
    _, report = bench(tmp_path, "batching", "--requests", "6", "--rate", "20")
    names = [one["name"] for one in report["rounds"]]  # type: ignore[attr-defined]
    assert names == ["continuous", "static", "dynamic", "static", "dynamic", "continuous"]
    assert report["same_texts"] == [6, 6]
