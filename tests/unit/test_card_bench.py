"""A GPU that is lent for minutes: what is run on it, in which order and how long, what is kept, and how it is used."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.testing import DEVICE

# isort: split
from kernels.attention import triton_attention, triton_tuning
from kernels.attention.triton_tuning import Shape, TuningError, candidates, default_shape, forced, read_table, stages
from kernels.bench import __main__ as bench
from kernels.bench import card, machine, tune
from kernels.bench.journal import Journal
from kernels.bench.limits import Limits
from kernels.bench.loan import DONE, FAILED, LEFT_OUT, OUT_OF_TIME, Step, run_steps, statuses
from kernels.bench.row import Case
from kernels.chip import pretend
from kernels.dispatch import triton_digest
from loadtest import device_model
from shared.contracts.errors import SettingsError
from shared.model import device_decoder
from shared.model.device_decoder import load_device_decoder

CPU = torch.device("cpu")


class Card:
    """A clock that only runs in steps, each of which takes what it is said to need, in all."""

    def __init__(self, **needs: float) -> None:
        self.needs = needs
        self.now = 0.0
        self.runs: list[tuple[str, float]] = []

    def launch(self, step: Step, limit: float) -> int | None:
        self.runs.append((step.name, limit))
        took = min(self.needs[step.name], limit)
        self.now += took
        self.needs[step.name] -= took
        return None if self.needs[step.name] else int(step.command == ("fails",))

    def run(self, steps: list[Step], journal: Journal, until: float) -> None:
        run_steps(steps, journal, until, lambda: self.now, self.launch)


def test_steps_have_their_turns_and_go_on_where_they_stopped(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "card.jsonl")
    steps = [Step("a", ("x",), 100), Step("b", ("fails",), 100), Step("c", ("x",), 60), Step("d", ("x",), 500, 50)]
    card = Card(a=30, b=10, c=150, d=400)
    card.run(steps, journal, until=145)
    # c is stopped in its turn; too little is left for d, and goes to c, which a loan later has the rest of
    assert card.runs == [("a", 100), ("b", 100), ("c", 60), ("c", 45)]
    assert statuses(journal) == {"a": DONE, "b": FAILED, "c": OUT_OF_TIME, "d": LEFT_OUT}
    card.runs.clear()
    card.needs["b"] = 5
    card.run(steps, journal, until=card.now + 1000)
    assert card.runs == [("b", 100), ("c", 60), ("d", 500)]
    assert statuses(journal) == {"a": DONE, "b": FAILED, "c": DONE, "d": DONE}


def test_a_journal_loses_a_torn_line_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "rows.jsonl")
    assert journal.read() == []
    journal.append(a=1)
    with journal.file.open("a") as out:
        out.write('{"b": ')
    journal.append(c=[2.5])
    assert journal.read() == [{"a": 1}, {"c": [2.5]}]


def test_a_step_is_stopped_with_all_it_started(tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    child = f"import time, pathlib\nwhile True: pathlib.Path({str(mark)!r}).touch(); time.sleep(0.02)"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    until = time.monotonic() + 60
    while not mark.exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    card._stop(process)
    assert process.returncode == -signal.SIGTERM
    mark.unlink()
    time.sleep(0.3)
    assert not mark.exists()


def test_a_step_ends_at_its_limit_and_what_it_says_is_kept(tmp_path: Path) -> None:
    waits = Step("long one", (sys.executable, "-c", "import time; time.sleep(600)"), 9)
    assert card.launch(waits, 0.2, tmp_path) is None
    said = tmp_path / "long-one.txt"
    before = said.read_text()
    ends = Step("long one", (sys.executable, "-c", "print('again'); raise SystemExit(3)"), 9)
    assert card.launch(ends, 60, tmp_path) == 3
    assert card.launch(ends, 60, tmp_path) == 3
    assert said.read_text() == f"{before}again\nagain\n"


def test_every_step_is_a_command_there_is(tmp_path: Path) -> None:
    steps = card.steps(tmp_path)
    assert len({step.name for step in steps}) == len(steps)
    for step in steps:
        module = step.command[step.command.index("-m") + 1]
        assert module in ("pytest", "kernels.bench", "loadtest.device_model")
        assert all((card.ROOT / word).exists() for word in step.command if word.startswith("tests"))
        assert 0 < step.least_s <= step.most_s
    shapes = [case.shape for case in bench.cases(["attention"])]
    for pattern in card.GOALS:
        assert any(bench.fnmatchcase(shape, pattern) for shape in shapes), pattern


@pytest.fixture
def fake_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a card")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(bench, "measure", lambda: Limits(1e12, 1e13))
    with pretend((9, 0)):
        yield


def another(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """From here on another card, chip, torch or Triton is at hand."""
    if what == "card":
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "another card")
    elif what == "chip":
        monkeypatch.setattr(machine, "capability", lambda _: (8, 0))
        monkeypatch.setattr(tune, "capability", lambda _: (8, 0))
    else:
        monkeypatch.setattr(getattr(machine, what), "__version__", "99.0")


OTHERS = ("card", "chip", "torch", "triton")


@pytest.mark.usefixtures("fake_card")
def test_rows_are_written_as_they_come_and_not_measured_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def case(shape: str) -> Case:
        def call() -> None:
            measured.append(shape)
            if shape == "M=2" and measured.count(shape) == 1:
                raise KeyboardInterrupt

        return Case("linear", shape, 1e9, 1e9, lambda: (call, {}))

    def seconds(call: Callable[[], object]) -> float:
        call()
        return 1e-3

    monkeypatch.setattr(bench, "seconds", seconds)
    monkeypatch.setattr(bench, "cases", lambda _: iter([case("M=1"), case("M=2"), case("M=30")]))
    rows = tmp_path / "rows.jsonl"
    with pytest.raises(KeyboardInterrupt):
        bench.main(["linear", "--rows", str(rows)])
    assert bench.main(["linear", "--rows", str(rows), "--only", "M=?"]) == 0
    assert measured == ["M=1", "M=2", "M=2"]
    found = Journal(rows).read()
    assert [entry["shape"] for entry in found] == ["M=1", "M=2"]
    assert (found[0]["seconds"], found[0]["card"], found[0]["limits"]["flops"]) == (1e-3, "a card", 1e13)


@pytest.mark.usefixtures("fake_card")
@pytest.mark.parametrize("what", OTHERS)
def test_rows_of_another_card_are_not_this_one_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    measured: list[float] = []
    monkeypatch.setattr(bench, "seconds", lambda _: measured.append(1e-3) or 1e-3)
    monkeypatch.setattr(bench, "cases", lambda _: iter([Case("linear", "M=1", 1e9, 1e9, lambda: (list, {}))]))
    for times in (1, 2, 2):  # measured, again elsewhere, and there no more
        assert bench.main(["linear", "--rows", str(tmp_path / "rows.jsonl")]) == 0
        assert len(measured) == times
        another(monkeypatch, what)


@pytest.mark.usefixtures("fake_card")
@pytest.mark.parametrize("what", OTHERS)
def test_launch_shapes_are_chosen_by_the_times_of_their_own_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    tried: list[Shape] = []

    def seconds(_: object) -> float:
        tried.append(triton_tuning.shape(128, False, CPU))
        return 1.0 if tried[-1].split_stages == fastest else 2.0

    monkeypatch.setattr(tune, "seconds", seconds)
    monkeypatch.setattr(tune, "cases_of", lambda *_: [Case("attention", "", 1, 1, lambda: (list, {}))])
    for fastest in (2, 5):
        assert tune.main(["--folder", str(tmp_path)]) == 0
        (file,) = tmp_path.glob("tuning_sm*.json")
        assert [entry["split_stages"] for entry in json.loads(file.read_text())] == [fastest, fastest]
        file.unlink()
        another(monkeypatch, what)
    assert len(tried) == len(Journal(tmp_path / "tried.jsonl").read())


@pytest.mark.usefixtures("fake_card")
@pytest.mark.parametrize("what", OTHERS)
def test_models_on_another_card_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    measured: list[str] = []

    class Made:
        graphs = SimpleNamespace(drop=lambda: None)

        def __init__(self, *_: object) -> None: ...

        def measure(self, name: str, *_: object) -> device_model.Row:
            measured.append(name)
            return device_model.Row(name, 1, 1024, 1, 0.5, 1.0, 1.0, [1.0], [1.0])

    monkeypatch.setattr(device_model, "choose_device", lambda _: ("cuda", ""))
    monkeypatch.setattr(device_model, "copy_rate", lambda _: 1e12)
    monkeypatch.setattr(device_model, "make_model", lambda *_: None)
    monkeypatch.setattr(device_model, "Case", Made)
    monkeypatch.setattr(device_model, "CASES", (("llama-8b", 1, 1024),))
    rows = ["--rows", str(tmp_path / "models.jsonl")]
    for times, options in ((1, []), (1, []), (2, ["--fuse", "never"])):
        assert device_model.main([*rows, *options]) == 0
        assert len(measured) == times
    another(monkeypatch, what)
    for times in (3, 3):
        assert device_model.main(rows) == 0
        assert len(measured) == times


@pytest.mark.usefixtures("fake_card")
def test_a_whole_run_leaves_a_table_and_is_over_when_all_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    echo = "import sys, pathlib; open(sys.argv[1], 'a').write(sys.argv[2] + chr(10))"
    line = json.dumps({"line": "decode 90 % of copy", **machine.machine()}) + "\n" + json.dumps({"line": "unknown"})
    write = (sys.executable, "-c", echo, str(tmp_path / "rows.jsonl"), line)
    monkeypatch.setattr(card, "steps", lambda _: [Step("one", write, 60), Step("two", (sys.executable, "-c", "0"), 60)])
    monkeypatch.setattr(card.signal, "signal", lambda *_: None)
    assert bench.main(["card", "--minutes", "2", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "card.txt").read_text()
    head, *rest = text.splitlines()
    assert head == f"a card, sm_90, torch {torch.__version__}, triton {machine.triton.__version__}"
    # rows of nobody knows which card are not this one's
    assert " ".join(rest).split() == ["one", "done", "two", "done", "decode", "90", "%", "of", "copy"]
    assert text in capsys.readouterr().out
    another(monkeypatch, "card")
    assert card.table(tmp_path, machine.machine()).split("\n", 1)[1].split() == []
    assert bench.main(["card", "--minutes", "2", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "card.txt").read_text().splitlines()[2].split() == ["one", "done"]
    with pytest.raises(SystemExit):
        bench.main(["card", "--minutes", "0", "--out", str(tmp_path)])


def test_without_a_card_nothing_is_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert bench.main(["card", "--out", str(tmp_path / "none")]) == 1
    assert bench.main(["tune", "--folder", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.count("no GPU here") == 2
    assert not (tmp_path / "none").exists()


@pytest.fixture
def nothing_measured(fake_card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "cases", lambda _: iter(()))
    monkeypatch.setattr(tune, "try_all", lambda *_: None)
    monkeypatch.setattr(card, "measure", lambda *_: 0)
    monkeypatch.setattr(device_model, "choose_device", lambda _: ("cuda", ""))
    monkeypatch.setattr(device_model, "copy_rate", lambda _: 1e12)
    monkeypatch.setattr(device_model, "CASES", ())


@pytest.mark.usefixtures("nothing_measured")
@pytest.mark.parametrize(
    ("main", "argv", "option", "file"),
    [
        (bench.main, ["linear"], "--rows", "rows.jsonl"),
        (bench.main, ["linear"], "--json", "rows.json"),
        (bench.main, ["card"], "--out", ""),
        (bench.main, ["tune"], "--folder", ""),
        (device_model.main, [], "--rows", "models.jsonl"),
        (device_model.main, [], "--json", "models.json"),
    ],
)
def test_a_folder_is_made_before_anything_is_measured(
    main: Callable[[list[str]], int],
    argv: list[str],
    option: str,
    file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = tmp_path / "not" / "there"
    assert main([*argv, option, str(place / file)]) == 0
    assert [*place.iterdir()]
    (tmp_path / "taken").touch()
    for measured in ((bench, "measure"), (device_model, "copy_rate")):
        monkeypatch.setattr(*measured, lambda *_: pytest.fail("measured"))
    assert main([*argv, option, str(tmp_path / "taken" / "in" / file)]) == 1
    assert capsys.readouterr().err.startswith(f"{tmp_path}/taken/in/")


def test_peers_are_measured_beside_what_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "models.jsonl")
    formats = {"quant": "none", "kv": "auto", "exact": False}
    for model, sequences, quant in (("llama-8b", 1, "none"), ("llama-8b", 256, "int4"), ("qwen3-0.6b", 64, "none")):
        journal.append(model=model, sequences=sequences, runner_s=0.5, **{**formats, "quant": quant})
    journal.append(peer="qwen3-0.6b", sequences=64, step_s=1.0)
    asked: list[object] = []
    monkeypatch.setattr(device_model, "peer_step_s", lambda *arguments: asked.append(arguments[:3]) or 1.25)
    ours = device_model.worker_times(journal, formats)
    assert ours == {("llama-8b", 1): 0.5, ("qwen3-0.6b", 64): 0.5}
    device_model.measure_peers(ours, "", journal, CPU)
    assert asked == [("llama-8b", 1, 1024)]
    assert journal.read()[-1]["line"].endswith("transformers 1250.000 ms a step, 2.5 x ours")


@pytest.mark.parametrize("chip", [(8, 0), (8, 9), (9, 0)])
def test_shapes_that_may_be_tried_keep_the_rows_of_a_warp(chip: tuple[int, int]) -> None:
    with pretend(chip):
        for head_dim in triton_tuning.HEAD_DIMS:
            for quantized in (False, True):
                usual = default_shape(head_dim, quantized, CPU)
                found = list(candidates(head_dim, quantized, CPU))
                assert found[0] == usual
                assert len(set(found)) == len(found) > 1
                for shape in found:
                    assert shape.split_warps == usual.split_warps
                    assert bool(shape.wide_rows) == bool(usual.wide_rows)
                    if shape.wide_rows:
                        assert shape.wide_rows / shape.wide_warps == 64 / shape.split_warps
                    depth = shape.split_stages
                    if depth:
                        assert stages(head_dim, 64, 2, 1 if quantized else 2, CPU, depth) == depth


def entry(**change: Any) -> dict[str, Any]:
    shape = asdict(Shape(4, 64, 4, 4, 2))
    return {"head_dim": 128, "quantized": False, **shape, **change}


def test_a_table_of_shapes_is_read_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tuning_sm90.json"
    file.write_text(json.dumps([entry()]))
    table = read_table(file, (9, 0))
    assert table == {(128, False): Shape(4, 64, 4, 4, 2)}
    monkeypatch.setattr(triton_tuning, "_table", lambda chip: table if chip == (9, 0) else {})
    launched: list[dict[str, Any]] = []

    class Kernel:
        def __getitem__(self, grid: object) -> Any:
            return lambda *_, **options: launched.append(options)

    monkeypatch.setattr(triton_attention.triton_kernel, "attend_kernel", Kernel())
    monkeypatch.setattr(triton_attention.triton_kernel, "join_kernel", Kernel())
    pool = torch.zeros(40, 2, 1, 16, 128, dtype=torch.bfloat16, device=DEVICE)

    def options(rows: int) -> dict[str, int]:
        launched.clear()
        plan = triton_attention.plan_attention([0, rows], [640], [[*range(40)]], 16, 8, 1, 128, DEVICE)
        q = torch.zeros(rows, 8, 128, dtype=torch.bfloat16, device=DEVICE)
        triton_attention.attend(q, pool, plan, 0.1)
        return {name: launched[0][name] for name in ("ROWS", "num_warps", "num_stages")}

    if DEVICE.type == "cpu":
        assert options(1) == {"ROWS": 64, "num_warps": 4, "num_stages": 4}
        assert options(640) == {"ROWS": 64, "num_warps": 4, "num_stages": 2}
    with forced(Shape(4, 128, 8, 1, 3)):
        assert options(1) == {"ROWS": 64, "num_warps": 4, "num_stages": 1}
        assert options(640) == {"ROWS": 128, "num_warps": 8, "num_stages": 3}


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ([entry(split_warps=8)], r"entry 0, Shape\(split_warps=8.*could change results"),
        ([entry(wide_rows=128)], "entry 0, .*could change results"),
        ([entry(), entry()], "entry 1 has head_dim 128, not one of its own"),
        ([entry(head_dim=72)], "entry 0 has head_dim 72"),
        ([entry(head_dim=256, split_warps=8, wide_rows=0, wide_warps=0, split_stages=6)], "does not fit the chip"),
        ([entry(more=1)], "unknown field `more`"),
        ([{"head_dim": 128}], "missing required field"),
        ({}, "Expected `array`"),
    ],
)
def test_a_wrong_table_is_told_with_its_entry(entries: object, told: str, tmp_path: Path) -> None:
    file = tmp_path / "tuning_sm90.json"
    file.write_text(json.dumps(entries))
    with pytest.raises(TuningError, match=rf"tuning_sm90.json: .*{told}"):
        read_table(file, (9, 0))


def test_tables_in_the_tree_are_good_and_part_of_the_build(tmp_path: Path) -> None:
    for file in (Path(triton_tuning.__file__).parent).glob("tuning_sm*.json"):
        digits = file.stem.removeprefix("tuning_sm")
        read_table(file, (int(digits[:-1]), int(digits[-1])))
    (tmp_path / "attention").mkdir()
    before = triton_digest(tmp_path)
    (tmp_path / "attention" / "tuning_sm90.json").write_text("[]")
    assert triton_digest(tmp_path) != before


@pytest.mark.parametrize("chip", [(8, 0), (8, 9), (9, 0), (10, 0)])
def test_whatever_decodes_and_prefills_best_is_a_table_that_is_taken(tmp_path: Path, chip: tuple[int, int]) -> None:
    file = tmp_path / "tuning.json"
    with pretend(chip):
        tried = list(tune.trials(CPU))
        of = {kind: [shape for *found, shape in tried if (*found,) == kind] for kind in {trial[:2] for trial in tried}}
        pairs = [
            ((quantized, False, decode), (quantized, True, prefill))
            for quantized in (False, True)
            for decode in of[quantized, False]
            for prefill in of.get((quantized, True), [None])
        ]
        for pair in pairs:
            entries = [
                {"quantized": quantized, "prefill": prefill, "tried": asdict(shape), "seconds": [1.0]}
                for quantized, prefill, shape in pair
                if shape
            ]
            file.write_text(json.dumps(tune.best(entries, CPU)))
            (quantized, _, decode), (*_, prefill) = pair
            assert decode
            chosen = read_table(file, chip).get((128, quantized)) or default_shape(128, quantized, CPU)
            assert chosen.split_stages == decode.split_stages
            assert not prefill or triton_tuning.prefilled(chosen) == triton_tuning.prefilled(prefill)
    assert len(pairs) > 10


def test_a_table_that_cannot_be_used_stops_a_worker_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tuning_sm90.json"
    file.write_text(json.dumps([entry(split_warps=8)]))
    monkeypatch.setattr(triton_tuning, "_table", lambda chip: read_table(file, chip))
    monkeypatch.setattr(device_decoder, "choose", lambda _: None)
    with pretend((9, 0)), pytest.raises(SettingsError, match=r"^tuning_sm90\.json: entry 0, .*could change results"):
        load_device_decoder(tmp_path, "bfloat16", "cpu")
    file.unlink()
    with pretend((9, 0)), pytest.raises(SettingsError, match=r"^tuning_sm90\.json: .*No such file"):
        load_device_decoder(tmp_path, "bfloat16", "cpu")


def test_the_best_shapes_that_ran_become_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "cases_of", lambda *kind: [kind])
    journal = Journal(tmp_path / "tried.jsonl")
    fastest = Shape(4, 64, 4, 4, 4)

    def timed(case: Any) -> float:
        shape = triton_tuning.shape(128, False, CPU)
        if shape.split_stages == 5:
            raise RuntimeError("out of registers")
        return 1.0 if shape == fastest else 2.0 + shape.split_stages

    with pretend((9, 0)):
        tried = list(tune.trials(CPU))
        tune.try_all(journal, CPU, timed)
        file = tune.write(journal, tmp_path, CPU)
        assert len(journal.read()) == len(tried)
        tune.try_all(journal, CPU, timed)
        assert len(journal.read()) == len(tried)
    assert (file.name, any("failed" in entry for entry in journal.read())) == ("tuning_sm90.json", True)
    table = read_table(file, (9, 0))
    assert table == {(128, False): fastest}
