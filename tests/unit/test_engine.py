"""The engine's threads: order, isolation of faults, wake-ups, and stopping."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from shared.contracts.errors import Unavailable
from shared.engine.batcher import Batcher
from shared.engine.block_room import NoSlot
from shared.engine.engine import Engine
from shared.engine.fake_runner import FakeRunner, made_up_token
from shared.engine.sequence_update import SequenceUpdate
from shared.engine.step_plan import StepOutput, StepPlan
from shared.engine.step_time import StepObservation
from tests.unit.batcher_support import make_batcher, make_spec

WAIT_S = 10.0


class Gate(FakeRunner):
    """A fake runner that waits at a gate before each step, and may be told to raise."""

    def __init__(self) -> None:
        super().__init__(sleep=lambda seconds: None)
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Semaphore(0)
        self.plans: list[StepPlan] = []
        self.log: list[str] = []
        self.fail: Callable[[StepPlan], bool] = lambda plan: False

    def run(self, plan: StepPlan) -> StepOutput:
        self.plans.append(plan)
        self.log.append(f"step {plan.step}")
        self.entered.release()
        assert self.open.wait(WAIT_S)
        if self.fail(plan):
            raise RuntimeError("boom")
        return super().run(plan)

    def zero_blocks(self, blocks: Sequence[tuple[int, int]]) -> None:
        self.log.append(f"zero {len(blocks)}")


class Harness:
    def __init__(self, depth: int = 1, runner: Gate | None = None, **config: Any) -> None:
        self.runner = runner or Gate()
        self.batcher = make_batcher(depth=depth, **config)
        self.updates: list[SequenceUpdate] = []
        self.errors: list[Exception] = []
        self.steps: list[StepObservation] = []
        self.changed = threading.Condition()
        self.engine = Engine(
            self.batcher,
            self.runner,
            self.on_updates,
            on_error=self.errors.append,
            on_step=self.steps.append,
            idle_tick_s=0.05,
        )

    def on_updates(self, updates: list[SequenceUpdate]) -> None:
        assert updates
        with self.changed:
            self.updates += updates
            self.changed.notify_all()

    def call(self, fn: Callable[[Batcher], Any]) -> Any:
        return self.engine.call(fn).result(WAIT_S)

    def ends(self) -> dict[str, str]:
        return {u.seq_id: u.finish for u in self.updates if u.finish}

    def wait_ends(self, count: int) -> dict[str, str]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.ends()) >= count, WAIT_S), self.ends()
        return self.ends()

    def wait_idle(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while not self.call(lambda b: b.is_idle):
            assert time.monotonic() < deadline
        self.call(lambda b: b.check())

    def tokens(self, seq_id: str) -> list[int]:
        return [t for u in self.updates if u.seq_id == seq_id for t in u.token_ids]


@pytest.fixture(params=[0, 1])
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    h = Harness(depth=request.param)
    h.engine.start()
    yield h
    h.runner.open.set()
    assert h.engine.stop(WAIT_S)


def expected(prompt: int, count: int, seed: int = 0) -> list[int]:
    return [made_up_token(seed, prompt + i, range(1000, 9000)) for i in range(count)]


def test_sequences_run_to_their_end(harness: Harness) -> None:
    for i in range(5):
        harness.call(lambda b, i=i: b.reserve(make_spec(f"s{i}", prompt=6 + i, max_tokens=5)))
    assert set(harness.wait_ends(5).values()) == {"length"}
    for i in range(5):
        assert harness.tokens(f"s{i}") == expected(6 + i, 5)
    harness.wait_idle()
    assert [plan.step for plan in harness.runner.plans] == list(range(1, len(harness.runner.plans) + 1))
    assert sum(step.num_tokens for step in harness.steps) == sum(6 + i + 4 for i in range(5))
    assert not harness.errors


def test_a_command_does_not_wait_for_the_step_in_flight(harness: Harness) -> None:
    harness.runner.open.clear()
    harness.call(lambda b: b.reserve(make_spec("a", max_tokens=9)))
    assert harness.runner.entered.acquire(timeout=WAIT_S)
    assert harness.call(lambda b: b.num_in_flight) == harness.batcher.config.depth + 1
    assert harness.call(lambda b: b.cancel("a")) is not None
    assert harness.call(lambda b: b.holds("a"))  # fenced
    harness.runner.open.set()
    harness.wait_idle()
    assert harness.tokens("a") == []


def test_the_answer_to_a_command_does_not_overtake_the_steps_before_it(harness: Harness) -> None:
    harness.runner.open.clear()
    harness.call(lambda b: b.reserve(make_spec("a", max_tokens=1)))
    assert harness.runner.entered.acquire(timeout=WAIT_S)
    held, going_on = threading.Event(), threading.Event()
    harness.engine.call(lambda b: (held.set(), going_on.wait(WAIT_S)))
    assert held.wait(WAIT_S)
    harness.runner.open.set()
    inbox, deadline = harness.engine._inbox, time.monotonic() + WAIT_S
    while inbox.empty():  # the step's end waits for the planner
        assert time.monotonic() < deadline
        time.sleep(0.001)
    told = harness.engine.call(lambda b: harness.ends())
    going_on.set()
    assert told.result(WAIT_S) == {"a": "length"}


def test_commands_raise_at_their_caller(harness: Harness) -> None:
    for i in range(8):
        harness.call(lambda b, i=i: b.reserve(make_spec(f"s{i}", await_kv=True)))
    with pytest.raises(NoSlot):
        harness.call(lambda b: b.reserve(make_spec("more")))
    harness.call(lambda b: [b.cancel(f"s{i}") for i in range(8)])
    assert not harness.errors


def test_a_failing_step_ends_its_sequences_and_no_others(harness: Harness) -> None:
    harness.runner.fail = lambda plan: plan.step == 3
    harness.call(lambda b: [b.reserve(make_spec(f"s{i}", max_tokens=8)) for i in range(3)])
    assert set(harness.wait_ends(3).values()) == {"error"}
    assert [str(error) for error in harness.errors] == ["boom"]
    harness.call(lambda b: b.reserve(make_spec("next", max_tokens=3)))
    assert harness.wait_ends(4)["next"] == "length"
    harness.wait_idle()


def test_a_sequence_beside_the_failed_ones_goes_on() -> None:
    # Given step 1 with a chunk of a, and step 2, planned before step 1 has ended, with the rest of a and with b
    h = Harness(depth=1)
    h.runner.open.clear()
    h.runner.fail = lambda plan: plan.step == 1
    h.engine.start()
    h.call(lambda b: [b.reserve(make_spec("a", prompt=40)), b.reserve(make_spec("b", prompt=41))])
    assert h.runner.entered.acquire(timeout=WAIT_S)
    assert h.call(lambda b: b.num_in_flight) == 2
    # When step 1 fails
    h.runner.open.set()
    # Then step 2 runs without a, and b ends as if nothing had been
    assert h.wait_ends(2) == {"a": "error", "b": "length"}
    assert [[row.seq_id for row in plan.sequences] for plan in h.runner.plans[:2]] == [["a"], ["b"]]
    assert h.tokens("b") == expected(41, 4)
    h.wait_idle()
    assert h.engine.stop(WAIT_S)


def test_callbacks_that_raise_change_nothing() -> None:
    h = Harness()
    seen: list[str] = []

    def broken(updates: list[SequenceUpdate]) -> None:
        seen.extend(u.finish for u in updates)
        raise RuntimeError("callback")

    engine = Engine(h.batcher, h.runner, broken, on_error=broken)  # type: ignore[arg-type]
    engine.start()
    engine.call(lambda b: b.reserve(make_spec(max_tokens=4))).result(WAIT_S)
    deadline = time.monotonic() + WAIT_S
    while "length" not in seen:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert engine.stop(WAIT_S)


def test_blocks_are_zeroed_before_the_step_that_uses_them(harness: Harness) -> None:
    harness.call(lambda b: b.reserve(make_spec("a", prompt=6, compute_only=True)))
    assert harness.wait_ends(1) == {"a": "computed"}
    assert harness.runner.log[:2] == ["zero 1", "step 1"]
    harness.call(lambda b: b.unpin("a"))
    harness.wait_idle()


def test_a_failing_cleaner_keeps_the_blocks_and_the_engine(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(blocks: Sequence[tuple[int, int]]) -> None:
        raise RuntimeError("no cleaner")

    monkeypatch.setattr(harness.runner, "zero_blocks", broken)
    harness.call(lambda b: b.reserve(make_spec("a", prompt=6, compute_only=True)))
    harness.wait_ends(1)
    harness.call(lambda b: b.cancel("a"))
    assert [c.used for c in harness.call(lambda b: b.pool.counts)] == [2]
    harness.call(lambda b: b.reserve(make_spec("b")))
    assert harness.wait_ends(2)["b"] == "length"


def test_progress_ticks_when_idle_and_stands_still_while_a_step_hangs(harness: Harness) -> None:
    engine, runner = harness.engine, harness.runner
    before = engine.progress
    deadline = time.monotonic() + WAIT_S
    while engine.progress < before + 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    runner.open.clear()
    harness.call(lambda b: b.reserve(make_spec()))
    assert runner.entered.acquire(timeout=WAIT_S)
    harness.call(lambda b: None)
    stuck = engine.progress
    for _ in range(5):
        harness.call(lambda b: None)
        time.sleep(0.03)
    assert engine.progress == stuck
    runner.open.set()
    harness.wait_ends(1)
    assert engine.progress > stuck


def test_an_idle_engine_sleeps() -> None:
    h = Harness()
    engine = Engine(h.batcher, h.runner, h.on_updates, idle_tick_s=0.2)
    engine.start()
    time.sleep(0.1)
    before, cpu = engine.progress, time.process_time()
    time.sleep(1.0)
    assert 3 <= engine.progress - before <= 6
    assert time.process_time() - cpu < 0.1
    assert engine.stop(WAIT_S)


def test_no_wake_up_is_lost_with_an_idle_tick_that_never_comes() -> None:
    h = Harness(num_blocks=200, max_num_seqs=8)
    engine = Engine(h.batcher, h.runner, h.on_updates, idle_tick_s=3600.0)
    engine.start()

    def one(seq_id: str, cancelled: bool) -> None:
        engine.call(lambda b: b.reserve(make_spec(seq_id, max_tokens=3))).result(WAIT_S)
        if cancelled:
            engine.call(lambda b: b.cancel(seq_id)).result(WAIT_S)
            return
        with h.changed:
            assert h.changed.wait_for(lambda: seq_id in h.ends(), WAIT_S)

    def client(name: int) -> None:
        for i in range(25):
            one(f"c{name}-{i}", cancelled=i % 5 == 4)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert len([u for u in h.updates if u.finish]) >= 4 * 20
    assert engine.call(lambda b: b.check()).result(WAIT_S) is None
    assert engine.stop(WAIT_S)
    assert h.batcher.is_idle


def test_stop_ends_the_steps_in_flight_and_refuses_what_comes_after() -> None:
    h = Harness()
    h.runner.open.clear()
    h.engine.start()
    h.call(lambda b: b.reserve(make_spec(max_tokens=9)))
    assert h.runner.entered.acquire(timeout=WAIT_S)
    assert not h.engine.stop(0.05)  # the step hangs
    late = h.engine.call(lambda b: b.gauges())
    h.runner.open.set()
    assert h.engine.stop(WAIT_S)
    assert h.tokens("a") == expected(6, 2)  # the two steps in flight were reported
    with pytest.raises(Unavailable):
        late.result(WAIT_S)
    with pytest.raises(Unavailable):
        h.engine.call(lambda b: b.gauges()).result(WAIT_S)


def test_an_engine_that_never_started_refuses_after_stop() -> None:
    h = Harness()
    before = h.engine.call(lambda b: b.gauges())
    assert h.engine.stop(WAIT_S)
    with pytest.raises(Unavailable):
        before.result(WAIT_S)


def test_a_command_taken_back_in_time_does_not_run() -> None:
    h = Harness()
    future = h.engine.call(lambda b: b.reserve(make_spec()))
    assert future.cancel()
    h.engine.start()
    assert h.call(lambda b: b.is_idle)
    assert h.engine.stop(WAIT_S)


def test_a_runner_that_answers_nonsense_is_a_failed_step(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness.runner, "run", lambda plan: StepOutput(plan.step, ()))
    harness.call(lambda b: b.reserve(make_spec()))
    assert harness.wait_ends(1) == {"a": "error"}
    assert isinstance(harness.errors[0], ValueError)
    harness.wait_idle()


class Launcher(Gate):
    """A runner that only launches: a step ends when its turn at the gate comes, on another thread."""

    def __init__(self) -> None:
        super().__init__()
        self.launched = threading.Semaphore(0)

    def run(self, plan: StepPlan) -> Any:
        self.launched.release()
        if self.refuse(plan):
            raise RuntimeError("not launched")
        return lambda: Gate.run(self, plan)

    refuse: Callable[[StepPlan], bool] = staticmethod(lambda plan: False)

    def zero_blocks(self, blocks: Sequence[tuple[int, int]]) -> Any:
        return lambda: self.zero_later(blocks)

    def zero_later(self, blocks: Sequence[tuple[int, int]]) -> None:
        assert self.open.wait(WAIT_S)
        self.log.append(f"zero {len(blocks)}")


@pytest.fixture
def launcher() -> Iterator[Harness]:
    harness = Harness(runner=Launcher())
    harness.engine.start()
    yield harness
    harness.runner.open.set()
    assert harness.engine.stop(WAIT_S)


def test_a_step_is_launched_while_the_one_before_runs(launcher: Harness) -> None:
    launcher.runner.open.clear()
    launcher.call(lambda batcher: batcher.reserve(make_spec("a", 5, max_tokens=4)))
    for _ in range(2):
        assert launcher.runner.launched.acquire(timeout=WAIT_S)  # type: ignore[attr-defined]
    assert launcher.runner.entered.acquire(timeout=WAIT_S)
    assert len(launcher.runner.plans) == 1
    launcher.runner.open.set()
    assert launcher.wait_ends(1) == {"a": "length"}
    assert [step.num_seqs for step in launcher.steps] == [1] * len(launcher.steps)


@pytest.mark.parametrize("how", ["fail", "refuse"])
def test_a_launched_step_that_fails_ends_its_sequences_and_no_others(launcher: Harness, how: str) -> None:
    setattr(launcher.runner, how, lambda plan: any(row.seq_id == "bad" for row in plan.sequences))
    launcher.call(lambda batcher: batcher.reserve(make_spec("bad", 5, max_tokens=4)))
    assert launcher.wait_ends(1) == {"bad": "error"}
    setattr(launcher.runner, how, lambda plan: False)
    launcher.call(lambda batcher: batcher.reserve(make_spec("good", 5, max_tokens=4)))
    assert launcher.wait_ends(2)["good"] == "length"


def test_blocks_whose_zeroing_was_launched_are_held_until_it_has_ended(launcher: Harness) -> None:
    launcher.runner.open.clear()
    launcher.call(lambda b: b.reserve(make_spec("a", prompt=6, compute_only=True)))
    assert launcher.runner.launched.acquire(timeout=WAIT_S)  # type: ignore[attr-defined]
    assert launcher.call(lambda b: b._sequences["a"].cleaning) == 1
    launcher.runner.open.set()
    assert launcher.wait_ends(1) == {"a": "computed"}
    assert launcher.runner.log == ["zero 1", "step 1"]
    launcher.call(lambda b: b.unpin("a"))
    launcher.wait_idle()


def test_blocks_whose_zeroing_fails_later_stay_held(launcher: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(blocks: Sequence[tuple[int, int]]) -> None:
        raise RuntimeError("no cleaner")

    monkeypatch.setattr(launcher.runner, "zero_later", broken)
    launcher.call(lambda b: b.reserve(make_spec("a", prompt=6, compute_only=True)))
    launcher.wait_ends(1)
    launcher.call(lambda b: b.cancel("a"))
    assert [c.used for c in launcher.call(lambda b: b.pool.counts)] == [2]
    assert [str(error) for error in launcher.errors] == ["no cleaner"]
