"""`./baton bench peers`: the closed loop, what is measured, who takes turns, what counts, and what is told of it."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from loadtest import bench, peer_environments, peers
from loadtest.closed_loop import OUTPUTS, PROMPTS, Job, even_jobs, make_jobs, order_of, run_loop, serve
from loadtest.contestants import BatonStack, Contestant, EngineProcess, batched_result
from loadtest.http_loop import read_event, run_http
from loadtest.machine import IDLE_CORES
from loadtest.peer_environments import LLAMA as LLAMA_NAME
from loadtest.peer_environments import LLAMA_TARGETS, Environments
from loadtest.peer_environments import VLLM as VLLM_NAME
from loadtest.peer_floor import floor_of
from loadtest.peer_plan import (
    BATON,
    LLAMA,
    QUANTS,
    RUNS,
    TRANSFORMERS,
    VLLM,
    VLLM_BF16,
    Cell,
    all_cells,
    chosen,
    groups,
)
from loadtest.peer_plot import panels
from loadtest.peer_report import MIN_CLEAN, Sample, figures, ratios, text_of
from loadtest.peer_weights import DEFAULT, RANDOM, Weights
from shared.contracts.errors import Unavailable
from tests.native import require_native

CELL = Cell(RANDOM, "bf16", "engine", 8)
BATCH = Cell(RANDOM, "bf16", "batch", 8)


class Toy:
    """A token a running request a step; one token short for the request `short`."""

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


def test_rounds_are_of_one_size_and_share_no_prompt() -> None:
    first, second = (CELL.jobs(1000, 1, number) for number in (1, 2))
    assert [(len(job.prompt), job.max_tokens) for job in first] == [(len(job.prompt), job.max_tokens) for job in second]
    assert len(first) == 12
    assert not {job.prompt[:32] for job in first} & {job.prompt[:32] for job in second}
    assert not {job.prompt[:32] for job in first} & {
        job.prompt[:32] for job in Cell(RANDOM, "int8", "engine", 8).jobs(1000, 1, 1)
    }
    assert len({len(job.prompt) for job in BATCH.jobs(1000, 1, 1)}) == 1
    assert len(CELL.jobs(1000, 1, 1, requests=5)) == 5


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


def test_a_batch_is_timed_while_all_of_it_is_at_its_outputs() -> None:
    clock = count()
    result = run_loop(Toy(), even_jobs(3, 8, 5, 1000), 3, lambda: next(clock))
    # every step is one tick: the first brings the first tokens, the other four are of full width
    assert (result.full_tokens, result.full_s) == (12, 4)
    assert result.prefill_s == 4  # start, three submissions, one step
    waits = run_loop(Toy(), even_jobs(3, 8, 5, 1000), 1, lambda: next(clock))
    assert (waits.full_tokens, waits.full_s) == (0, 0)


def test_less_work_than_asked_is_no_result() -> None:
    with pytest.raises(ValueError, match="request 2"):
        run_loop(Toy(short=2), make_jobs(4, 1000, 1), 2)


def test_a_driver_carries_out_orders_until_there_are_no_more() -> None:
    orders = io.StringIO("".join(order_of(make_jobs(n, 1000, 1), n) for n in (1, 3)))
    answers = io.StringIO()
    serve(Toy(), "toy 1", orders, answers)
    build, one, three = (json.loads(line) for line in answers.getvalue().splitlines())
    assert build == {"build": "toy 1"}
    assert (one["concurrency"], three["concurrency"], len(three["first_s"])) == (1, 3, 3)


DRIVER = """
import json, sys
print(json.dumps({"build": "toy"}), flush=True)
for line in sys.stdin:
    if json.loads(line)["concurrency"] == 9:
        sys.exit("no more")
    print(json.dumps({"jobs": len(json.loads(line)["jobs"])}), flush=True)
"""


def test_an_engine_process_answers_and_a_dead_one_is_told_with_its_last_words() -> None:
    process = EngineProcess([sys.executable, "-c", DRIVER])
    process.start()
    try:
        assert process.build == "toy"
        assert process.run(make_jobs(3, 1000, 1), 2) == {"jobs": 3}
        assert len(process.pids()) == 1
        with pytest.raises(Unavailable, match="no more"):
            process.run(make_jobs(1, 1000, 1), 9)
    finally:
        process.stop()
    assert process.pids() == []


def test_a_driver_that_does_not_start_is_told() -> None:
    process = EngineProcess([sys.executable, "-c", "raise SystemExit('no such thing')"])
    try:
        with pytest.raises(Unavailable, match="did not start: no such thing"):
            process.start()
    finally:
        process.stop()


def test_events_of_a_stream() -> None:
    assert read_event('data: {"choices": [{"text": "ab"}]}') == ("ab", None)
    assert read_event('data: {"choices": [], "usage": {"completion_tokens": 7}}') == ("", 7)
    assert read_event('data: {"choices": [{"text": ""}], "usage": null}') == ("", None)
    assert read_event("data: [DONE]") == read_event(": comment") == read_event("") == ("", None)
    with pytest.raises(Unavailable, match="too much"):
        read_event('data: {"error": {"message": "too much"}}')


def test_what_batched_bench_prints() -> None:
    row = {"pp": 128, "tg": 48, "pl": 8, "t_pp": 2.0, "t_tg": 4.0}
    result = batched_result(f"main: n_kv_max = 4096\n{json.dumps(row)}\n", 8)
    assert (result["full_tokens"], result["full_s"], result["prefill_s"], result["prompt_tokens"]) == (
        384,
        4.0,
        2.0,
        1024,
    )
    with pytest.raises(Unavailable, match="no result"):
        batched_result("failed to load\n", 8)


def test_like_is_measured_with_like() -> None:
    cells = all_cells()
    assert len({cell.name for cell in cells}) == len(cells)
    assert {(cell.quant, cell.way) for cell in cells} == set(RUNS)
    assert all(cell.contestants()[0] == BATON and len(cell.contestants()) > 1 for cell in cells)
    assert {cell.quant for cell in cells if cell.model == DEFAULT} == {"bf16", "int4"}
    assert {cell.width for cell in cells if TRANSFORMERS in cell.contestants()} == {1, 8}
    assert {cell.model for cell in cells if TRANSFORMERS in cell.contestants()} == {RANDOM, DEFAULT}
    assert not any(cell.quant == "int4" and VLLM in cell.contestants() for cell in cells)
    with_vllm = [cell.name for cell in cells if VLLM in cell.contestants() and cell.way == "http"]
    assert with_vllm == [f"{model}/bf16/http/c{width}" for model in (RANDOM, DEFAULT) for width in (1, 8, 32)]
    assert [cell.name for cell in cells if VLLM_BF16 in cell.contestants()] == [
        f"{RANDOM}/int8/engine/c8",
        f"{RANDOM}/int8/engine/c32",
    ]
    assert list(groups(cells)) == [(RANDOM, quant) for quant in QUANTS] + [(DEFAULT, "bf16"), (DEFAULT, "int4")]


def test_cells_are_chosen_by_pattern() -> None:
    assert chosen([]) == all_cells()
    assert {cell.quant for cell in chosen(["*/int8/*"])} == {"int8"}
    assert [cell.name for cell in chosen([CELL.name])] == [CELL.name]
    with pytest.raises(ValueError, match="no such cell"):
        chosen(["*/int8/*", "*/fp8/*"])


def one(name: str, rate: float, foreign: float = 0.0, number: int = 1, cell: Cell = CELL) -> Sample:
    result = {"output_tokens": 100, "seconds": 100 / rate, "first_s": [0.5], "gaps_s": [0.01, 0.02]}
    result |= {"prompt_tokens": 64, "prefill_s": 2.0, "full_tokens": 90, "full_s": 90 / rate / 2}
    return Sample(cell.name, name, number, f"{name} 1", result, foreign, 0.2)


def test_samples_that_others_disturbed_do_not_count() -> None:
    busy = IDLE_CORES + 0.01
    a, b = figures([one("a", 10), one("a", 2, busy), one("a", 20, IDLE_CORES), one("b", 5, 1.0), one("b", 7, 1.0)])
    assert (a["tokens_per_s"], a["clean"], a["dropped"]) == (pytest.approx(15), 2, 1)
    assert (b["tokens_per_s"], b["clean"], b["dropped"]) == (pytest.approx(6), 0, 2)
    assert a["cpu_s_per_token"] == pytest.approx(0.002)
    assert a["spread"] == pytest.approx(10 / 15)
    assert a["prefill_tokens_per_s"] is None


def test_a_batch_has_its_full_width_and_its_prefill() -> None:
    (row,) = figures([one("a", 10, cell=BATCH)])
    assert (row["tokens_per_s"], row["prefill_tokens_per_s"]) == (pytest.approx(20), 32)


def test_ratios_are_within_rounds() -> None:
    # the machine was twice as fast in the second round: the ratio is the same in both
    samples = [one(BATON, 20), one(VLLM, 10), one(BATON, 40, number=2), one(VLLM, 20, number=2)]
    disturbed = [one(BATON, 1, 1.0, number=3), one(VLLM, 9, number=3)]
    (row,) = ratios(samples + disturbed)
    assert (row["cell"], row["peer"], row["throughput"], row["clean"]) == (CELL.name, VLLM, pytest.approx(2), 2)
    # a sample taken again stands for its round
    (row,) = ratios([*samples, *disturbed, one(BATON, 18, number=3)])
    assert (row["throughput"], row["clean"]) == (pytest.approx(2), 3)
    (row,) = ratios(disturbed)
    assert (row["throughput"], row["clean"]) == (pytest.approx(1 / 9), 0)
    assert ratios([one(VLLM, 9)]) == ratios([one(BATON, 9)]) == []


def report(samples: Sequence[Sample], floors: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    head = {"machine": {"cpu": "x", "cores": 2, "date": "today"}, "threads": 2, "missing": ["llama"], "failed": {}}
    head["floors"] = floors
    return head | {"figures": figures(samples), "ratios": ratios(samples), "samples": [asdict(one) for one in samples]}


def test_the_table_marks_what_is_no_measure() -> None:
    clean = [one(name, rate, number=n) for n in range(1, MIN_CLEAN + 1) for name, rate in ((BATON, 30), (VLLM, 10))]
    text = text_of(report(clean))
    assert "BUSY" not in text
    assert "3.00" in next(line for line in text.splitlines() if line.startswith("  vllm"))
    assert "not measured: llama" in text
    text = text_of(report([*clean[:-1], one(VLLM, 10, 1.0, MIN_CLEAN)]))
    assert ["BUSY" in line for line in text.splitlines() if line.startswith(("  baton", "  vllm"))] == [False, True]


def test_floors_are_told() -> None:
    row = {"cell": "decode B1", "native": 30.0, "share": 0.9, "sweep_s": 0.03, "idle": True}
    measured = {"weight_bytes": 10**9, "copy_gb_s": 20.0, "numerics": {}, "figures": [row]}
    text = text_of(report([], [floor_of(RANDOM, "bf16", measured)]))
    assert "swept at 33.3 GB/s" in text
    assert "0.90 of the sweep's speed" in text


def test_panels_of_the_figure() -> None:
    found = panels(report([one(BATON, 30), one(VLLM, 10), one(BATON, 5, cell=BATCH)]))
    assert found == {
        f"{RANDOM}/bf16/engine": {BATON: {"c8": pytest.approx(30)}, VLLM: {"c8": pytest.approx(10)}},
        f"{RANDOM}/bf16/batch": {BATON: {"B8": pytest.approx(10)}},
    }


class Fake:
    """A contestant that writes down what it ran; it was disturbed the first `busy` times."""

    def __init__(self, name: str, way: str, log: list[tuple[str, str, int]]) -> None:
        self.build, self._way, self._log = name, way, log

    def start(self) -> None:
        self._log.append((self.build, f"start {self._way}", 0))

    def pids(self) -> Sequence[int]:
        return []

    def run(self, jobs: Sequence[Job], concurrency: int) -> dict[str, Any]:
        self._log.append((self.build, self._way, concurrency))
        return one(self.build, 10).result

    def stop(self) -> None:
        self._log.append((self.build, f"stop {self._way}", 0))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """All peers are there, and contestants are fakes on an idle machine."""
    log: list[tuple[str, str, int]] = []
    environments = Environments(tmp_path)
    for path in [environments.vllm, *(environments.llama(name) for name in LLAMA_TARGETS)]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def makers(*_: object) -> peers.Make:
        return lambda name, way: Fake(name, way, log)

    monkeypatch.setattr(peers, "makers", makers)
    monkeypatch.setattr(Weights, "vocab_size", lambda self: 1000)
    monkeypatch.setattr(peers, "ForeignLoad", idle_then([]))
    monkeypatch.setattr(peers, "_has_transformers", lambda: False)
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    return log


def idle_then(busy: list[float]) -> Any:
    """A stand-in for `ForeignLoad` that tells these loads, then none."""

    class Load:
        def __init__(self, *pids: int, children: bool) -> None:
            assert not children

        def cores(self) -> float:
            return busy.pop(0) if busy else 0.0

    return Load


def test_contestants_take_turns_and_stay_loaded(world: list[tuple[str, str, int]], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    cells = [f"{RANDOM}/bf16/http/c1", f"{RANDOM}/bf16/http/c8"]
    assert bench.main(["peers", "--cells", *cells, "--rounds", "2", "--no-floor", "--json", str(out)]) == 0
    runs = [(name, width) for name, way, width in world if way == "http"]
    order = [BATON, VLLM, LLAMA]
    later = [VLLM, LLAMA, BATON]
    assert runs == [(name, width) for names in (order, later) for width in (1, 8) for name in names]
    assert sorted(name for name, way, _ in world if way == "start http") == sorted(order)
    assert sorted(name for name, way, _ in world[-3:] if way == "stop http") == sorted(order)
    found = json.loads(out.read_text())
    assert [(one["contestant"], one["number"]) for one in found["samples"]][:3] == [(name, 1) for name in order]
    assert found["missing"] == ["transformers (requirements/test.txt)"]


def test_a_disturbed_sample_is_taken_again(
    world: list[tuple[str, str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "ForeignLoad", idle_then([1.0, 0.0, 1.0, 1.0]))
    out = tmp_path / "out.json"
    argv = ["peers", "--cells", CELL.name, "--rounds", "1", "--no-floor", "--json", str(out)]
    assert bench.main(argv) == 0
    samples = json.loads(out.read_text())["samples"]
    assert [(one["contestant"], one["foreign_cores"]) for one in samples] == [
        (BATON, 1.0),
        (BATON, 0.0),
        (VLLM, 1.0),
        (VLLM, 1.0),
    ]
    # resumed: what is clean stays, what is not is taken again
    world.clear()
    assert bench.main([*argv, "--resume"]) == 0
    assert [name for name, way, _ in world if way == "engine"] == [VLLM]
    assert len(json.loads(out.read_text())["samples"]) == 5
    assert (
        bench.main(["peers", "--cells", CELL.name, "--peers", "--no-floor", "--rounds", "1", "--json", str(out)]) == 0
    )
    assert {one["contestant"] for one in json.loads(out.read_text())["samples"]} == {BATON}


def test_a_file_of_something_else_is_not_resumed(
    world: list[tuple[str, str, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    out.write_text('{"bench": "engine"}')
    assert bench.main(["peers", "--cells", CELL.name, "--json", str(out), "--resume"]) == 1
    assert "is not of this bench" in capsys.readouterr().err
    assert bench.main(["peers", "--cells", "nothing"]) == 1
    assert "no such cell" in capsys.readouterr().err
    assert world == []


def test_a_contestant_that_fails_is_told_and_the_others_go_on(
    world: list[tuple[str, str, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Broken(Fake):
        def run(self, jobs: Sequence[Job], concurrency: int) -> dict[str, Any]:
            raise Unavailable("out of breath")

    def makers(*_: object) -> peers.Make:
        return lambda name, way: (Broken if name == VLLM else Fake)(name, way, world)

    monkeypatch.setattr(peers, "makers", makers)
    out = tmp_path / "out.json"
    argv = ["peers", "--cells", f"{RANDOM}/bf16/engine/*", "--rounds", "2", "--no-floor", "--json", str(out)]
    assert bench.main(argv) == 1
    found = json.loads(out.read_text())
    assert {one["contestant"] for one in found["samples"]} == {BATON}
    assert len(found["samples"]) == 6
    assert found["failed"] == {f"{VLLM}, {RANDOM}, bf16, engine": "out of breath"}
    assert "failed: vllm" in capsys.readouterr().out
    assert [name for name, way, _ in world if way.startswith("stop")].count(VLLM) == 1


class Completions(BaseHTTPRequestHandler):
    """Streams words of one token each, one short where `max_tokens` is 7, and refuses where it is 9."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked = body["max_tokens"]
        self.send_response(503 if asked == 9 else 200)
        self.end_headers()
        if asked == 9:
            self.wfile.write(b"not now")
            return
        come = asked - (asked == 7)
        events: list[dict[str, Any]] = [{"choices": [{"text": "" if n == 1 else "word"}]} for n in range(come)]
        if body["stream_options"].get("continuous_usage_stats"):  # several tokens a chunk, told
            events = [{"choices": [{"text": "words"}], "usage": {"completion_tokens": n}} for n in (1, 4, come)]
        for event in [*events, {"choices": [], "usage": {"completion_tokens": come}}]:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Completions)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_the_loop_over_http_counts_tokens_without_a_text(url: str) -> None:
    result = run_http(url, even_jobs(5, 4, 6, 1000), 2, "m", {})
    assert (result.output_tokens, result.prompt_tokens, len(result.first_s)) == (30, 20, 5)
    with pytest.raises(ValueError, match="6 tokens instead of 7"):
        run_http(url, even_jobs(3, 4, 7, 1000), 2, "m", {})
    with pytest.raises(Unavailable, match="503: not now"):
        run_http(url, even_jobs(3, 4, 9, 1000), 2, "m", {})
    with pytest.raises(Unavailable, match="ConnectionRefusedError"):
        run_http("http://127.0.0.1:9", even_jobs(1, 4, 4, 1000), 1, "m", {})


def test_the_loop_over_http_counts_the_tokens_that_a_chunk_tells(url: str) -> None:
    result = run_http(url, even_jobs(2, 4, 6, 1000), 2, "m", BatonStack.TOLD)
    assert (result.output_tokens, len(result.gaps_s)) == (12, 4)


def test_settings_of_the_stack() -> None:
    settings = peers.stack_settings(Path("m"), "int8", 2, 256, ["engine.token_budget=64"])
    assert (settings["engine.quant"], settings["engine.token_budget"], settings["workers.prefill"]) == ("int8", "64", 0)
    assert "engine.token_budget" not in peers.stack_settings(Path("m"), "int8", 2, 0)
    with pytest.raises(ValueError, match="SECTION"):
        peers.stack_settings(Path("m"), "none", 2, 256, ["engine.token_budget"])


def test_who_reads_which_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside integers vLLM runs in bfloat16 too; the default model's four bits are those of llama.cpp's file."""
    monkeypatch.setattr(Weights, "baton", lambda self: Path("plain"))
    monkeypatch.setattr(Weights, "vllm_int8", lambda self: Path("vllm-int8"))
    monkeypatch.setattr(Weights, "baton_of", lambda self, quant: Path(f"own-{quant}"))
    options = peers._parser().parse_args([])

    def command(model: str, quant: str, name: str, way: str = "engine") -> list[str]:
        weights = Weights(model, tmp_path, Path("quantize"), lambda _: None)
        made: Any = peers.makers(weights, quant, 2, Environments(tmp_path), options)(name, way)
        return [str(part) for part in made._command]

    def folder(*asked: str) -> str:
        words = command(*asked)
        return words[words.index("--model") + 1]

    assert (folder(RANDOM, "int8", VLLM), folder(RANDOM, "int8", VLLM_BF16)) == ("vllm-int8", "plain")
    assert folder(RANDOM, "bf16", VLLM) == folder(DEFAULT, "bf16", VLLM, "http") == "plain"
    assert (folder(RANDOM, "int8", BATON), folder(DEFAULT, "int4", BATON)) == ("own-int8", "own-int4")
    assert "--token-budget" not in command(RANDOM, "int8", BATON)


def test_install_makes_what_cells_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, str]] = []
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    monkeypatch.setattr(Environments, "install", lambda self, say: made.append(("environments", "")))
    monkeypatch.setattr(Weights, "gguf", lambda self, quant: made.append((self.name, quant)))
    monkeypatch.setattr(Weights, "baton_of", lambda self, quant: None)
    monkeypatch.setattr(Weights, "vllm_int8", lambda self: made.append((self.name, "vllm")))
    assert bench.main(["peers", "--install"]) == 0
    random = [(RANDOM, "bf16"), (RANDOM, "int8"), (RANDOM, "vllm"), (RANDOM, "int4")]
    assert made == [("environments", ""), *random, (DEFAULT, "bf16"), (DEFAULT, "int4")]


def test_only_whole_peers_are_there(tmp_path: Path) -> None:
    environments = Environments(tmp_path)
    assert environments.missing() == [VLLM_NAME, LLAMA_NAME]
    for path in [environments.vllm, environments.llama("llama-server")]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert environments.missing() == [LLAMA_NAME]


def test_an_install_that_fails_leaves_no_half_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(command: Sequence[str]) -> None:
        raise Unavailable("offline")

    monkeypatch.setattr(peer_environments.venv, "create", lambda folder, **_: folder.mkdir(parents=True))
    monkeypatch.setattr(peer_environments, "_call", call)
    with pytest.raises(Unavailable, match="offline"):
        Environments(tmp_path).install(lambda _: None)
    assert not (tmp_path / "peers" / VLLM_NAME).exists()


def contestant(made: Contestant) -> Contestant:
    """Types only: a fake must be one."""
    return made


def test_the_own_engine_runs_a_loop(tmp_path: Path) -> None:
    require_native()
    from tests.tiny_models import make_tiny_model

    folder = make_tiny_model(tmp_path / "tiny", num_hidden_layers=1)
    command = [sys.executable, "-m", "loadtest.peer_baton", "--model", str(folder), "--threads", "1", "--quant", "int8"]
    process = EngineProcess(command)
    contestant(process).start()
    assert process._process is not None
    child = process._process.child
    try:
        assert "int8" in process.build
        for number in (1, 2):
            jobs = even_jobs(3, 8, 4, 300, str(number))
            result = process.run(jobs, 2)
            assert (result["output_tokens"], len(result["first_s"])) == (12, 3)
    finally:
        process.stop()
    assert child.returncode == 0, "it was ended before it had given its pool's memory back"
