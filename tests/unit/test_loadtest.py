"""Loads, figures and reports of `./baton bench`, and its client against a server that misbehaves."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from loadtest.bench import BASE, POLICIES, make_plan, turns
from loadtest.client import Outcome, run_load
from loadtest.machine import ForeignLoad, processor_s_each, this_machine
from loadtest.report import Round, figures, percentile, same_texts, table, text_of
from loadtest.workload import Job, Lengths, LoadShape, make_jobs

# ------------------------------------------------------------------------------------------ loads


def test_a_seed_is_a_load() -> None:
    shape = LoadShape(requests=40, rate=2.0)
    assert make_jobs(shape, 7) == make_jobs(shape, 7)
    assert make_jobs(shape, 7) != make_jobs(shape, 8)


def test_arrivals_and_lengths_follow_their_distributions() -> None:
    shape = LoadShape(requests=4000, rate=5.0, prompt=Lengths(48, 0.8, 400), output=Lengths(40, 0.6, 160))
    jobs = make_jobs(shape, 1)
    gaps = [b.at_s - a.at_s for a, b in itertools.pairwise(jobs)]
    assert jobs[0].at_s == 0.0
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.1)
    assert statistics.pstdev(gaps) == pytest.approx(0.2, rel=0.15)  # of an exponential: its mean
    assert statistics.median(len(job.prompt) for job in jobs) == pytest.approx(48, rel=0.1)
    assert statistics.median(job.max_tokens for job in jobs) == pytest.approx(40, rel=0.1)
    assert max(len(job.prompt) for job in jobs) == 400
    assert min(job.max_tokens for job in jobs) >= 1
    assert len({job.prompt[:8] for job in jobs if len(job.prompt) >= 8}) > 3000, "prompts share no beginning"


def test_a_load_that_never_comes_is_refused() -> None:
    for shape in (LoadShape(requests=0, rate=1.0), LoadShape(requests=1, rate=0.0)):
        with pytest.raises(ValueError, match="load"):
            make_jobs(shape, 1)


# ------------------------------------------------------------------------------------------ figures


def test_percentiles_are_nearest_ranks() -> None:
    values = [float(v) for v in range(100, 0, -1)]
    assert [percentile(values, p) for p in (50, 95, 99, 100)] == [50, 95, 99, 100]
    assert percentile([3.0], 50) == 3.0
    assert percentile([], 50) is None


def outcome(number: int, first_s: float = 0.1, error: str = "", text: str = "t") -> Outcome:
    return Outcome(number, f"cmpl-{number}", 0.0, first_s, [0.02, 0.04], first_s + 0.06, 3, text, error)


def one_round(name: str = "static", number: int = 1, **fields: Any) -> Round:
    outcomes = (outcome(0), outcome(1, 0.3), outcome(2, error="HTTP 503: full"))
    defaults: dict[str, Any] = {"seconds": 2.0, "queue_s": {0: 0.01, 1: 0.2}, "foreign_cores": 0.1}
    return Round(name, number, **{"outcomes": outcomes} | defaults | fields)


def test_a_failed_request_is_an_error_and_nothing_else() -> None:
    found = figures([one_round(), one_round(number=2, foreign_cores=0.5)])
    assert (found["rounds"], found["requests"], found["errors"]) == (2, 6, 2)
    assert found["ttft_s"] == {"p50": 0.1, "p95": 0.3, "p99": 0.3}
    assert found["itl_s"]["p50"] == 0.02
    assert found["queue_s"]["p99"] == 0.2
    assert (found["tokens_per_s"], found["requests_per_s"]) == (12 / 4.0, 4 / 4.0)
    assert found["foreign_cores"] == 0.5


def test_texts_are_compared_over_all_rounds() -> None:
    other = one_round(outcomes=(outcome(0, text="x"), outcome(1)))
    assert same_texts([one_round(), one_round()]) == (2, 2)
    assert same_texts([one_round(), other]) == (1, 2)


def report(**changes: Any) -> dict[str, Any]:
    rounds = [one_round()]
    values: dict[str, Any] = {
        "bench": "batching",
        "seed": 5,
        "load": {"requests": 3, "rate": 1.5, "prompt": lengths(), "output": lengths()},
        "machine": this_machine().body(),
        "foreign_cores_before": 0.05,
        "idle": True,
        "figures": {"static": figures(rounds)},
        "same_texts": [2, 2],
        "rounds": [{"name": "static", "outcomes": [{"error": o.error} for o in rounds[0].outcomes]}],
    }
    return values | changes


def lengths() -> dict[str, Any]:
    return {"median": 48, "sigma": 0.8, "most": 400}


def test_a_report_says_what_was_measured_and_whether_it_may_be_compared() -> None:
    text = text_of(report())
    assert "seed 5" in text
    assert "100/300/300" in text
    assert "1 of 3 requests failed; the first: HTTP 503: full" in text
    assert "IDLE" not in text
    assert "NOT AN IDLE MACHINE" in text_of(report(idle=False))
    nothing = figures([one_round(outcomes=(), queue_s={})])
    assert "-/-/-" in table({"none": nothing})
    json.dumps(nothing, allow_nan=False)
    assert "2 traces did not come" in text_of(report(figures={"static": figures([one_round(queue_s={})])}))


def test_others_load_is_what_is_not_ours() -> None:
    load = ForeignLoad()
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    ours = ForeignLoad()
    assert load.cores() < len(os.sched_getaffinity(0)) + 0.1
    assert ours.cores() >= 0.0


# ------------------------------------------------------------------------------------------ plans


def options(**changes: Any) -> argparse.Namespace:
    values: dict[str, Any] = {
        "kind": "batching",
        "seed": 1,
        "requests": 0,
        "rate": 0.0,
        "rounds": 1,
        "batch_size": 4,
        "batch_window": 0.2,
        "set": [],
    }
    return argparse.Namespace(**values | changes)


def test_policies_differ_in_nothing_but_the_policy() -> None:
    plan = make_plan(options(set=["model.dtype=bfloat16"], requests=9))
    assert tuple(plan.configurations) == POLICIES
    assert plan.rounds == 2, "one round is no measurement"
    assert plan.shape.requests == 9
    for name, settings in plan.configurations.items():
        assert settings["engine.batching"] == name
        rest = {key: value for key, value in settings.items() if key != "engine.batching"}
        assert rest == BASE | {"engine.batch_size": 4, "engine.batch_window_s": 0.2, "model.dtype": "bfloat16"}


def test_smoke_measures_the_settings_as_they_are() -> None:
    plan = make_plan(options(kind="smoke"))
    assert plan.configurations == {"as set": {}}
    assert plan.rounds == 1
    with pytest.raises(ValueError, match="SECTION"):
        make_plan(options(set=["nonsense"]))


def test_each_round_begins_with_another() -> None:
    assert [turns("abc", n) for n in (1, 2, 4)] == [["a", "b", "c"], ["b", "c", "a"], ["a", "b", "c"]]


# ------------------------------------------------------------------------------------------ client


class Server(BaseHTTPRequestHandler):
    """Answers by the first token of the prompt: 0 streams, 1 refuses, 2 breaks off, 3 sends an error event."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = body["prompt"][0]
        self.send_response(503 if kind == 1 else 200)
        self.end_headers()
        if kind == 1:
            self.wfile.write(b'{"error": {"message": "full"}}')
            return
        for piece in ("a", "b", "c"):
            self.event({"id": "cmpl-1", "choices": [{"text": piece, "finish_reason": None}]})
            time.sleep(0.02)
            if kind == 3:
                self.event({"error": {"message": "lost"}})
        if kind == 2:
            return
        self.event({"id": "cmpl-1", "choices": [{"text": "", "finish_reason": "length"}]})
        self.event({"id": "cmpl-1", "choices": [], "usage": {"completion_tokens": 3}})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, event: Any) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        return None


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


async def test_the_client_measures_what_ends_well_and_names_what_does_not(url: str) -> None:
    jobs = [Job(kind, 0.05 * kind, (kind,), 3) for kind in range(4)]
    fine, refused, broken, failed = (await run_load(url, "key", "m", jobs))[0]
    assert (fine.error, fine.tokens, fine.id, len(fine.gaps_s)) == ("", 3, "cmpl-1", 2)
    assert fine.first_s is not None
    assert fine.first_s < fine.total_s
    assert all(gap > 0.01 for gap in fine.gaps_s)
    assert refused.error.startswith("HTTP 503")
    assert "done=False" in broken.error
    assert "lost" in failed.error
    assert [o.sent_s >= job.at_s for o, job in zip((fine, refused, broken, failed), jobs, strict=True)] == [True] * 4


async def test_the_load_is_open_a_slow_answer_holds_no_other_up(url: str) -> None:
    jobs = [Job(i, 0.0, (0,), 3) for i in range(8)]
    outcomes, seconds = await run_load(url, "key", "m", jobs)
    assert max(o.sent_s for o in outcomes) < seconds
    assert not [o for o in outcomes if o.error]


async def test_a_gateway_that_is_not_there_is_an_error_of_each_request() -> None:
    outcomes, _ = await run_load("http://127.0.0.1:9", "key", "m", [Job(0, 0.0, (0,), 1)])
    assert "ConnectError" in outcomes[0].error


def test_processor_time_is_told_finer_than_the_hundredths_of_a_second_that_proc_counts_in() -> None:
    own, told = os.getpid(), list[float]()
    for _ in range(3):
        began, before = time.process_time(), processor_s_each(own)[own]
        while time.process_time() - began < 0.002:
            pass
        told.append(processor_s_each(own)[own] - before)
        assert 0 < told[-1] <= time.process_time() - began
    assert any(abs(seconds - round(seconds, 2)) > 1e-6 for seconds in told)
