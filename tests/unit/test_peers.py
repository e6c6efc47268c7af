"""The closed loop of `./baton bench peers`, its figures, and that contestants take turns on the same work."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pytest

from loadtest import bench, peers
from loadtest.closed_loop import OUTPUTS, PROMPTS, Job, make_jobs, run_loop
from loadtest.machine import IDLE_CORES
from loadtest.peers import Run, figures, run, start_process, text_of
from shared.contracts.errors import Unavailable
from tests.tiny_models import make_tiny_model


class Toy:
    """A token a running request a step; one token short for the requests in `short`."""

    def __init__(self, short: int | None = None) -> None:
        self.running: dict[int, int] = {}
        self.widest = 0
        self._short = short

    def submit(self, number: int, job: Job) -> None:
        self.running[number] = job.max_tokens - (number == self._short)
        self.widest = max(self.widest, len(self.running))

    def step(self) -> Sequence[tuple[int, int, bool]]:
        self.running = {number: left - 1 for number, left in self.running.items()}
        out = [(number, 1, left == 0) for number, left in self.running.items()]
        self.running = {number: left for number, left in self.running.items() if left}
        return out


def test_jobs_of_a_seed_are_the_same_and_of_the_named_lengths() -> None:
    jobs = make_jobs(40, 1000, 7)
    assert jobs == make_jobs(40, 1000, 7) != make_jobs(40, 1000, 8)
    assert {len(job.prompt) for job in jobs} == set(PROMPTS)
    assert {job.max_tokens for job in jobs} == set(OUTPUTS)
    assert all(300 <= token < 1000 for job in jobs for token in job.prompt)
    assert all(3 <= token < 320 for job in make_jobs(4, 320, 1) for token in job.prompt)


@pytest.mark.parametrize("concurrency", [1, 3, 9])
def test_so_many_run_at_once_and_all_end(concurrency: int) -> None:
    jobs, toy, clock = make_jobs(7, 1000, 1), Toy(), count()
    result = run_loop(toy, jobs, concurrency, lambda: next(clock))
    assert toy.widest == min(concurrency, 7)
    assert result.output_tokens == sum(job.max_tokens for job in jobs)
    assert len(result.first_s) == 7
    assert len(result.gaps_s) == result.output_tokens - 7
    assert result.prompt_tokens == sum(len(job.prompt) for job in jobs)
    assert result.seconds > 0


def test_less_work_than_asked_is_no_result() -> None:
    with pytest.raises(ValueError, match="request 2"):
        run_loop(Toy(short=2), make_jobs(4, 1000, 1), 2)


def one(contestant: str, rate: float, foreign: float, concurrency: int = 8) -> Run:
    result = {"output_tokens": 100, "seconds": 100 / rate, "first_s": [0.5], "gaps_s": [0.01, 0.02], "build": "b"}
    return Run(contestant, concurrency, 0, result, foreign)


def test_runs_that_others_disturbed_do_not_count() -> None:
    runs = [one("a", 10, 0.0), one("a", 2, IDLE_CORES + 1), one("a", 20, 0.1), one("b", 5, 1.0), one("b", 7, 1.0)]
    a, b = figures(runs)
    assert (a["output_tokens_per_s"], a["clean"], a["dropped"]) == (pytest.approx(15), 2, 1)
    assert (b["output_tokens_per_s"], b["clean"], b["dropped"]) == (pytest.approx(6), 0, 2)
    machine = {"cpu": "x", "date": "today"}
    head = {"model": "m", "dtype": "d", "threads": 1, "machine": machine, "missing": ["vllm"]}
    lines = text_of(head | {"figures": [a, b]}).splitlines()
    assert [("BUSY" in line) for line in lines[2:4]] == [False, True]
    assert lines[-1] == "not measured: vllm"


def test_contestants_take_turns_on_the_same_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    folder = make_tiny_model(tmp_path / "tiny", num_hidden_layers=1)
    python = tmp_path / "peers" / peers.VLLM / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    commands: list[Sequence[str]] = []

    def start(command: Sequence[str]) -> str:
        commands.append(command)
        return json.dumps(one("", 1, 0).result)

    argv = ["--model", str(folder), "--rounds", "2", "--concurrency", "1", "8", "--threads", "3"]
    report = run(peers._parser().parse_args(argv), start)
    assert report["missing"] == []
    order = [(entry["contestant"], entry["concurrency"]) for entry in report["runs"]]
    native, torch, vllm = "baton native", "baton torch", "vllm"
    assert [name for name, _ in order] == [native, torch, vllm] * 2 + [torch, vllm, native] * 2
    assert [width for _, width in order] == [1, 1, 1, 8, 8, 8] * 2
    for command in commands:
        words = list(command)
        width = words[words.index("--concurrency") + 1]
        assert words[words.index("--requests") + 1] == {"1": "4", "8": "16"}[width]
        assert words[words.index("--threads") + 1] == "3"
        assert words[words.index("--seed") + 1] == "1"
        assert ("--vocab-size" in words) == (words[0] == str(python))


def test_a_driver_that_fails_is_named() -> None:
    with pytest.raises(Unavailable, match="no such thing"):
        start_process(["/bin/sh", "-c", "echo no such thing >&2; exit 3"])


@pytest.mark.long
def test_the_command_on_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_environment", lambda: tmp_path / "nothing")
    folder, out = make_tiny_model(tmp_path / "tiny"), tmp_path / "out.json"
    argv = ["peers", "--model", str(folder), "--rounds", "1", "--concurrency", "3", "--requests", "4", "--threads", "1"]
    assert bench.main([*argv, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert [row["contestant"] for row in report["figures"]] == ["baton native", "baton torch"]
    assert len({entry["result"]["output_tokens"] for entry in report["runs"]}) == 1
    assert report["missing"]
