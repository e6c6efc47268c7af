"""Stretches: decode steps planned at once, which tell their tokens as they come and end where somebody wants to be
heard."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shared.contracts.errors import Unavailable
from shared.contracts.sampling import SamplingParams
from shared.engine.batcher import Batcher
from shared.engine.engine import Engine
from shared.engine.engine_parts import Limits, Steps
from shared.engine.fake_runner import FakeRunner, made_up_token
from shared.engine.sequence import Sequence as Held
from shared.engine.sequence_update import SequenceUpdate
from shared.engine.step_plan import StepOutput, StepPlan
from shared.engine.step_time import StepObservation, StepTimeModel
from tests.unit.batcher_support import BLOCK, EOS, constant, make_batcher, make_spec, output_of, used

WAIT_S = 30.0


def ready(*prompts: int, max_tokens: int = 40, depth: int = 1, **more: Any) -> Batcher:
    """Sequences whose prompts are computed and which have a token each, with nothing in flight."""
    batcher = make_batcher(**{"stretch_s": 10.0, "depth": depth} | more)
    for number, prompt in enumerate(prompts):
        batcher.reserve(make_spec(f"s{number}", prompt, max_tokens))
    plan = batcher.plan(may_stretch=True)
    assert plan is not None
    assert plan.repeats == 1, "nobody has decoded yet"
    batcher.commit(output_of(plan, constant(50)))
    return batcher


def stretch(batcher: Batcher) -> StepPlan:
    plan = batcher.plan(may_stretch=True)
    assert plan is not None
    assert batcher.plan(may_stretch=True) is None, "nothing is planned beside a stretch"
    return plan


def test_all_who_decode_go_on_for_as_long_as_the_first_of_them_may() -> None:
    batcher = ready(3, 9, max_tokens=10)
    plan = stretch(batcher)
    assert (plan.repeats, plan.num_tokens) == (9, 2)
    assert [(row.start, row.token_ids) for row in plan.sequences] == [(3, (50,)), (9, (50,))]
    assert all(len(row.block_tables[0]) * BLOCK >= row.start + 9 for row in plan.sequences), "with blocks for all"
    updates = batcher.commit(output_of(plan, constant(51), repeats=9))
    assert [(u.token_ids, u.finish) for u in updates] == [((51,) * 9, "length")] * 2
    assert [u.num_computed_tokens for u in updates] == [3 + 9, 9 + 9]
    assert all(u.totals is not None and u.totals.wasted_tokens == 0 for u in updates)
    assert batcher.is_idle
    batcher.check()


def test_the_last_token_of_a_prompt_is_no_decode() -> None:
    """The first token is told as one: by a step's own update."""
    batcher = make_batcher(stretch_s=10.0, token_budget=12)
    batcher.reserve(make_spec("a", 13, 40))
    for start, count in ((0, 12), (12, 1)):
        plan = batcher.plan(may_stretch=True)
        assert plan is not None
        assert (plan.repeats, plan.sequences[0].start, plan.num_tokens) == (1, start, count)
        batcher.commit(output_of(plan, constant(50)) if count == 1 else StepOutput(plan.step, ((),)))
    assert stretch(batcher).repeats > 1


def test_what_a_stretch_did_not_come_to_is_not_counted() -> None:
    batcher = ready(3)
    (update,) = batcher.commit(output_of(stretch(batcher), constant(51), repeats=5))
    assert (update.token_ids, update.num_computed_tokens) == ((51,) * 5, 8)
    batcher.check()
    again = stretch(batcher)
    assert (again.sequences[0].start, again.sequences[0].token_ids) == (8, (51,))
    (update,) = batcher.commit(output_of(again, constant(EOS), repeats=again.repeats))
    assert (update.token_ids, update.finish) == ((EOS,), "stop")
    assert update.totals is not None
    assert (update.totals.computed_tokens, update.totals.completion_tokens, update.totals.wasted_tokens) == (9, 7, 0)


def test_steps_that_were_never_computed_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    batcher = ready(3)
    monkeypatch.setattr(Held, "unplan", lambda self, steps: None)
    batcher.commit(output_of(stretch(batcher), constant(51), repeats=5))
    with pytest.raises(AssertionError, match="placeholders"):
        batcher.check()


def test_a_failed_stretch_counts_one_step() -> None:
    batcher = ready(3)
    (update,) = batcher.fail_step(stretch(batcher).step, "boom")
    assert update.totals is not None
    assert (update.finish, update.totals.computed_tokens) == ("error", 4)
    assert batcher.is_idle


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=40, presence_penalty=0.5),
        SamplingParams(max_tokens=40, logprobs=2),
        SamplingParams(max_tokens=40, min_tokens=9),
        SamplingParams(max_tokens=40, grammar="json"),
        SamplingParams(max_tokens=4),
    ],
)
def test_one_who_asks_for_more_or_ends_soon_keeps_all_from_it(sampling: SamplingParams) -> None:
    batcher = ready(3)
    batcher.reserve(make_spec("more", 3, sampling=sampling))
    for _ in range(2):
        plan = batcher.plan(may_stretch=True)
        assert plan is not None
        assert plan.repeats == 1
        batcher.commit(output_of(plan, constant(50)))


def test_a_stretch_waits_for_the_steps_in_flight_and_for_nobody_who_waits() -> None:
    batcher = ready(3)
    one = batcher.plan()
    assert one is not None
    assert batcher.plan(may_stretch=True) is None
    batcher.commit(output_of(one, constant(50)))
    batcher.reserve(make_spec("late", 3, await_kv=True))
    plan = batcher.plan(may_stretch=True)
    assert plan is not None
    assert plan.repeats == 1
    assert batcher.plan(may_stretch=True) is not None, "steps are planned ahead while somebody waits"


def test_blocks_that_others_need_bound_a_stretch() -> None:
    # 16 blocks of 4: 2 + 1 each to begin with, and 2 are kept for the two to grow into
    batcher = ready(8, 8, max_tokens=16, num_blocks=8)
    plan = batcher.plan(may_stretch=True)
    assert plan is not None
    assert plan.repeats == 4, "to the end of the blocks they have"
    assert used(batcher) == [6]


def test_a_stretch_takes_no_longer_than_it_may() -> None:
    batcher = ready(3, stretch_s=0.1)
    batcher.step_model = StepTimeModel(base_s=0.01, token_s=0.0, sequence_s=0.0, context_s=0.0)
    assert stretch(batcher).repeats == 10
    batcher = ready(3, stretch_s=0.1)
    batcher.step_model = StepTimeModel(base_s=0.03, token_s=0.0, sequence_s=0.0, context_s=0.0)
    plan = batcher.plan(may_stretch=True)
    assert plan is not None
    assert plan.repeats == 1


def test_an_eighth_of_the_pool_is_left_for_those_who_come() -> None:
    # 16 of 64 blocks are left behind the 48 of somebody else, and 4 of 12 behind what it takes to begin
    batcher = make_batcher(stretch_s=10.0, num_blocks=64)
    batcher.reserve(make_spec("other", 48 * BLOCK, 1, compute_only=True, token_ids=tuple(range(48 * BLOCK))))
    while (step := batcher.plan()) is not None:
        batcher.commit(output_of(step, constant(50)))
    batcher.reserve(make_spec("a", 3, 60))
    one = batcher.plan()
    assert one is not None
    batcher.commit(output_of(one, constant(50)))
    assert stretch(batcher).repeats == 2 * BLOCK - 3, "60 would take more than it may, so it takes none"
    assert used(batcher) == [50]


# ------------------------------------------------------------------------------------------ in the engine


class Going(FakeRunner):
    """A fake runner that can go on, and does each step of a stretch when it is told to."""

    def __init__(self) -> None:
        super().__init__(sleep=lambda seconds: None)
        self.go = threading.Semaphore(0)
        self.free = True  # waits for nobody
        self.at = threading.Semaphore(0)  # raised before each step of a stretch behind the first
        self.fault: Exception | None = None
        self.repeats: list[int] = []
        self.together = 1  # steps of one call
        self.limits: list[Limits] = []
        self._plan: StepPlan | None = None
        self._done = 0

    def run(self, plan: StepPlan) -> StepOutput:
        self._plan, self._done = plan, 1
        self.repeats.append(plan.repeats)
        return super().run(plan)

    def again(self, ready: Callable[[], object], limits: Limits) -> Steps | None:
        fault = self.fault  # as it was before anybody heard of this step
        ready()
        self.limits.append(limits)
        steps: list[tuple[float, list[int]]] = []
        while not steps or (len(steps) < min(self.together, limits.most) and not limits.halt.value):
            self.at.release()
            if not self.free:
                assert self.go.acquire(timeout=WAIT_S)
            if fault is not None:
                raise fault
            steps.append((time.monotonic(), self._drawn()))
        return steps

    def _drawn(self) -> list[int]:
        assert self._plan is not None
        self._done += 1
        rows = self._plan.sequences
        return [made_up_token(0, row.start + self._done, range(1000, 9000)) for row in rows]


class Harness:
    def __init__(self, start: bool = True) -> None:
        self.runner = Going()
        self.batcher = make_batcher(stretch_s=1e9, depth=1)
        self.news: list[tuple[str, tuple[int, ...]]] = []  # drawn | told, and tokens
        self.errors: list[Exception] = []
        self.steps: list[StepObservation] = []
        self.ended = threading.Event()
        self.engine = Engine(
            self.batcher,
            self.runner,
            self.on_updates,
            on_error=self.errors.append,
            on_step=self.steps.append,
            again=self.runner.again,
        )
        self.engine.on_drawn = self.on_drawn
        if start:
            self.engine.start()

    def on_drawn(self, plan: StepPlan, steps: Steps) -> None:
        self.news += [("drawn", tuple(drawn)) for _, drawn in steps]

    def on_updates(self, updates: list[SequenceUpdate]) -> None:
        self.news += [("told", u.token_ids) for u in updates]
        if any(u.finish for u in updates):
            self.ended.set()

    def begin(self, max_tokens: int = 40) -> None:
        spec = make_spec("a", 6, max_tokens)
        self.engine.call(lambda b: b.reserve(spec)).result(WAIT_S)

    def told(self) -> list[int]:
        return [token for kind, tokens in self.news for token in tokens if kind == "told"]


@pytest.fixture
def harness() -> Iterator[Harness]:
    h = Harness()
    yield h
    h.runner.free = True
    h.runner.go.release(100)
    assert h.engine.stop(WAIT_S)


def expected(count: int) -> list[int]:
    return [made_up_token(0, 6 + i, range(1000, 9000)) for i in range(count)]


@pytest.mark.parametrize("together", [1, 3, 64])
def test_tokens_are_told_as_they_come_and_once_more_in_the_end(harness: Harness, together: int) -> None:
    harness.runner.together = together
    harness.begin()
    assert harness.ended.wait(WAIT_S)
    assert harness.told() == expected(40)
    drawn = [tokens[0] for kind, tokens in harness.news if kind == "drawn"]
    assert drawn
    assert set(drawn) <= set(expected(40))
    assert len(harness.steps) == 40, "each step of a stretch counts"
    assert max(harness.runner.repeats) > 1
    assert sum(step.num_tokens for step in harness.steps) == 6 + 39
    assert not harness.errors


def test_no_token_of_a_stretch_overtakes_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(start=False)
    put = harness.engine._work.put

    class Gated:
        """A queue whose planner is held up behind each stretch until the executor has told a token of it."""

        get = harness.engine._work.get

        def put(self, item: object) -> None:
            put(item)  # type: ignore[arg-type]
            if isinstance(item, StepPlan) and item.repeats > 1:
                assert harness.runner.at.acquire(timeout=WAIT_S)

    monkeypatch.setattr(harness.engine, "_work", Gated())
    harness.engine.start()
    harness.begin()
    assert harness.ended.wait(WAIT_S)
    assert harness.engine.stop(WAIT_S)
    heard: list[int] = []
    for kind, tokens in harness.news:  # as a worker hears them: what was drawn comes once more in the update
        ahead = [token for token in tokens if token not in heard]
        assert kind == "told" or len(ahead) == 1
        heard += ahead
    assert heard == expected(40)


def test_steps_are_told_together_as_long_as_nobody_wants_to_hear_of_them(harness: Harness) -> None:
    asked: list[tuple[float, float]] = []

    def quiet_until(ended_at: float, step_s: float) -> float:
        asked.append((ended_at, step_s))
        return ended_at + 7.5

    harness.runner.together, harness.engine.quiet_until = 5, quiet_until
    harness.begin()
    assert harness.ended.wait(WAIT_S)
    assert harness.told() == expected(40)
    assert [one.until for one in harness.runner.limits] == [at + 7.5 for at, _ in asked]
    assert all(step_s >= 0 for _, step_s in asked)
    assert all(1 <= one.most < max(harness.runner.repeats) for one in harness.runner.limits)
    assert {one.ending for one in harness.runner.limits} == {frozenset({EOS})}


@pytest.mark.parametrize("together", [1, 64])
def test_an_order_ends_a_stretch_with_the_step_it_is_at(harness: Harness, together: int) -> None:
    harness.runner.free, harness.runner.together = False, together
    harness.begin()
    assert harness.runner.at.acquire(timeout=WAIT_S)
    quiet = harness.engine.call(lambda b: b.num_in_flight, at_once=False)
    harness.runner.go.release()
    assert harness.runner.at.acquire(timeout=WAIT_S), "who is not in a hurry waits for its end"
    assert not quiet.done()
    cut = harness.engine.call(lambda b: b.finish("a", 2))
    harness.runner.go.release()
    totals = cut.result(WAIT_S)
    assert quiet.result(WAIT_S) == 0, "orders keep their order"
    assert totals is not None
    assert totals.completion_tokens == 2
    kinds = [kind for kind, _ in harness.news]
    assert kinds[-1] == "told", "what was drawn is told before the order's answer"
    assert harness.told() == expected(len(harness.told()))
    harness.engine.call(lambda b: b.check()).result(WAIT_S)


def test_a_step_that_fails_within_a_stretch_fails_by_itself_or_not_at_all(harness: Harness) -> None:
    harness.runner.fault = RuntimeError("boom")
    harness.begin()
    assert harness.runner.at.acquire(timeout=WAIT_S)
    harness.runner.fault = None
    assert harness.ended.wait(WAIT_S)
    assert harness.told() == expected(40)
    assert [str(error) for error in harness.errors] == ["boom"] * len(harness.errors)
    assert harness.errors


def test_steps_that_take_longer_than_thought_end_a_stretch(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1e9
        return now

    monkeypatch.setattr("shared.engine.engine.time.monotonic", clock)
    harness.begin()
    assert harness.ended.wait(WAIT_S)
    assert harness.told() == expected(40)
    assert max(harness.runner.repeats) > 1
    assert not any(kind == "drawn" for kind, _ in harness.news), "each ended with its first step"


def test_a_stop_ends_a_stretch(harness: Harness) -> None:
    harness.runner.free = False
    harness.begin()
    assert harness.runner.at.acquire(timeout=WAIT_S)
    waiting = harness.engine.call(lambda b: b.num_in_flight, at_once=False)
    stopping = threading.Thread(target=harness.engine.stop, args=(WAIT_S,))
    stopping.start()
    deadline = time.monotonic() + WAIT_S
    while not harness.engine._interrupted.value:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    harness.runner.go.release()
    stopping.join(WAIT_S)
    assert waiting.result(WAIT_S) == 0, "it was posted before"
    with pytest.raises(Unavailable):
        harness.engine.call(lambda b: b.is_idle).result(WAIT_S)


def test_without_a_listener_every_step_is_planned_by_itself(harness: Harness) -> None:
    harness.engine.on_drawn = None
    harness.begin()
    assert harness.ended.wait(WAIT_S)
    assert set(harness.runner.repeats) == {1}
