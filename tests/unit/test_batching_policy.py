"""Static, dynamic and continuous batching: who may begin, and when."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import pytest

from shared.engine.batcher import Batcher
from shared.engine.batching_policy import make_policy
from shared.engine.engine import Engine
from shared.engine.fake_runner import FakeRunner
from shared.engine.sequence_update import SequenceUpdate
from tests.unit.batcher_support import fifty, make_batcher, make_spec, output_of, shape


def admitted(policy: Any, ready: str, now: float, live: str = "") -> str:
    return "".join(sorted(policy.admit(list(ready), set(live or ready), now)))


def test_continuous_admits_everybody_at_once() -> None:
    policy = make_policy("continuous", 2, 1.0)
    assert admitted(policy, "abc", 0.0) == "abc"
    assert policy.wait_s(0.0) == math.inf


def test_a_static_batch_is_whoever_waits_and_runs_to_its_end() -> None:
    policy = make_policy("static", 3, 1.0)
    assert admitted(policy, "ab", 0.0) == "ab"
    assert admitted(policy, "abc", 1.0) == "ab", "there was room for one more, but the batch has begun"
    assert admitted(policy, "bcdef", 2.0) == "b"
    assert admitted(policy, "cdef", 3.0) == "cde"
    assert admitted(policy, "f", 4.0, live="cf") == "c", "not ready, but not ended either"
    assert admitted(policy, "f", 5.0) == "f"
    assert policy.wait_s(5.0) == math.inf


def test_a_dynamic_batch_waits_until_it_is_full_or_its_first_has_waited_long_enough() -> None:
    policy = make_policy("dynamic", 3, 1.0)
    assert admitted(policy, "", 0.0) == ""
    assert policy.wait_s(0.0) == math.inf
    assert admitted(policy, "a", 10.0) == ""
    assert policy.wait_s(10.25) == 0.75
    assert admitted(policy, "ab", 10.5) == ""
    assert admitted(policy, "ab", 11.0) == "ab"
    # those that arrive meanwhile are timed from their own arrival, not from the end of the batch
    assert admitted(policy, "abc", 12.0) == "ab"
    assert policy.wait_s(12.0) == math.inf
    assert admitted(policy, "cd", 12.5) == ""
    assert admitted(policy, "cd", 13.0) == "cd"
    assert admitted(policy, "efghi", 14.0) == "efg", "full at once"
    assert admitted(policy, "hi", 14.5) == ""
    assert admitted(policy, "hi", 15.0) == "hi"


def test_one_that_leaves_before_its_batch_begins_does_not_start_the_clock_of_others() -> None:
    policy = make_policy("dynamic", 3, 1.0)
    assert admitted(policy, "a", 0.0) == ""
    assert admitted(policy, "b", 0.9) == ""
    assert admitted(policy, "b", 1.5) == ""
    assert admitted(policy, "b", 1.9) == "b"


@pytest.mark.parametrize(("name", "size", "window"), [("best", 1, 0.0), ("static", 0, 0.0), ("dynamic", 1, -0.1)])
def test_impossible_policies_are_refused(name: Any, size: int, window: float) -> None:
    with pytest.raises(ValueError, match="batch"):
        make_policy(name, size, window)


def starts(batcher: Batcher, steps: int) -> list[list[str]]:
    """Which sequences each step computes."""
    seen = []
    for now in range(steps):
        plan = batcher.plan(float(now))
        seen.append([row[0] for row in shape(plan)])
        if plan is not None:
            batcher.commit(output_of(plan, fifty))
    return seen


def test_the_batcher_runs_static_batches_one_after_the_other() -> None:
    batcher = make_batcher(batching="static", batch_size=2)
    for seq_id, tokens in (("a", 1), ("b", 3), ("c", 2)):
        batcher.reserve(make_spec(seq_id, prompt=2, max_tokens=tokens))
    assert starts(batcher, 6) == [["a", "b"], ["b"], ["b"], ["c"], ["c"], []]


def test_the_batcher_gathers_a_dynamic_batch_and_what_only_computes_never_waits() -> None:
    batcher = make_batcher(batching="dynamic", batch_size=4, batch_window_s=2.0)
    batcher.reserve(make_spec("a", prompt=2, max_tokens=1))
    batcher.reserve(make_spec("k", prompt=2, compute_only=True))
    assert batcher.wait_s(0.0) == math.inf  # nobody was seen yet
    assert starts(batcher, 4) == [["k"], [], ["a"], []]


def test_one_that_waits_for_its_kv_keeps_no_batch_from_running() -> None:
    batcher = make_batcher(batching="static", batch_size=2)
    batcher.reserve(make_spec("h", prompt=3, max_tokens=1, await_kv=True))
    batcher.reserve(make_spec("a", prompt=2, max_tokens=2))
    assert starts(batcher, 1) == [["a"]]
    batcher.release("h")
    assert starts(batcher, 2) == [["a"], ["h"]]


def test_an_engine_wakes_up_when_a_dynamic_batch_has_waited_long_enough() -> None:
    batcher = make_batcher(batching="dynamic", batch_size=8, batch_window_s=0.2)
    ended = threading.Event()

    def take(updates: list[SequenceUpdate]) -> None:
        if any(update.finish for update in updates):
            ended.set()

    engine = Engine(batcher, FakeRunner(sleep=lambda _: None), take, idle_tick_s=30.0)
    engine.start()
    started = time.monotonic()
    engine.call(lambda b: b.reserve(make_spec(prompt=2, max_tokens=2))).result(5)
    assert ended.wait(10), "it slept through"
    assert time.monotonic() - started >= 0.2
    engine.call(lambda b: b.cancel("a")).result(5)
    assert engine.stop(5)
