"""What a worker measures at its start."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from shared.contracts.errors import InvalidInput
from shared.contracts.ids import WorkerId
from shared.contracts.sampling import SamplingParams
from shared.engine import calibration
from shared.engine.sequence_spec import SequenceSpec
from shared.engine.step_plan import StepOutput, StepPlan
from shared.engine.step_time import StepTimeModel, context_of
from shared.engine.worker_engine import WorkerEngine, WorkerFacts, WorkerOptions
from shared.engine.worker_fake import FakePool
from shared.kv.layout import LayerGroup, PoolLayout

TRUTH = StepTimeModel(2e-3, 1e-4, 1e-3, 0.0)


class Machine:
    """One core for all workers: steps at the same time slow one another down."""

    def __init__(self) -> None:
        self.busy = 0
        self.timed = 0
        self.most = 0
        self.lock = threading.Lock()

    def run(self, plan: StepPlan) -> StepOutput:
        timed = plan.num_tokens > 1  # a worker's first step is not
        with self.lock:
            self.busy += 1
            self.timed += timed
            self.most = max(self.most, self.timed)
            seconds = TRUTH.predict(plan.num_tokens, len(plan.sequences), context_of(plan)) * self.busy
        time.sleep(seconds)
        with self.lock:
            self.busy -= 1
            self.timed -= timed
        sampled = tuple((1,) * row.num_logits if row.sampling else () for row in plan.sequences)
        return StepOutput(plan.step, sampled, duration_s=seconds)

    def zero_blocks(self, blocks: object) -> None:
        """Nothing to overwrite."""


def make_worker(folder: Path, name: str, machine: Machine, num_blocks: int = 32) -> WorkerEngine:
    layout = PoolLayout((LayerGroup("full", (0,), 1, 2, 32, "int8"),), (num_blocks,))
    facts = WorkerFacts(layout, "f", "n", "m", frozenset(), 8192, fake=False)
    options = WorkerOptions(folder, folder, token_budget=512)
    return WorkerEngine(options, facts, FakePool(folder, WorkerId(name), layout), machine)


def start_together(workers: list[WorkerEngine]) -> None:
    threads = [threading.Thread(target=worker.start) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_worker_without_grammars_refuses_them(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as refused:
        make_worker(tmp_path, "decode-1", Machine()).require_grammar("{}")
    assert refused.value.param == "response_format"


def test_workers_that_start_together_are_timed_one_after_the_other(tmp_path: Path) -> None:
    machine = Machine()
    workers = [make_worker(tmp_path, f"decode-{i}", machine) for i in range(3)]
    start_together(workers)
    assert machine.most == 1
    for worker in workers:
        model = worker.step_model
        predicted = StepTimeModel(model.base_s, model.token_s, model.sequence_s, model.context_s).predict(128, 1, 8256)
        assert predicted == pytest.approx(TRUTH.predict(128, 1, 8256), rel=0.5)
        worker.stop(2)
    assert list(tmp_path.iterdir()) == []


def test_a_worker_does_not_wait_for_its_turn_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "WAIT_S", 0.1)
    worker = make_worker(tmp_path, "decode-1", Machine())
    with calibration.timed_alone(tmp_path):
        worker.start()
    assert worker.step_model.base_s > 0
    worker.stop(2)


def steps_timed(folder: Path, num_blocks: int, token_s: float = 0.0) -> list[tuple[int, int, bool]]:
    """(tokens, sequences, whether it samples) of the steps a worker times at its start."""
    machine, seen = Machine(), list[tuple[int, int, bool]]()

    def run(plan: StepPlan) -> StepOutput:
        samples = any(row.sampling is not None for row in plan.sequences)
        seen.append((plan.num_tokens, len(plan.sequences), samples))
        time.sleep(token_s * plan.num_tokens)
        sampled = tuple((1,) * row.num_logits if row.sampling else () for row in plan.sequences)
        return StepOutput(plan.step, sampled, duration_s=token_s * plan.num_tokens)

    worker = make_worker(folder, "decode-1", machine, num_blocks)
    machine.run = run  # type: ignore[method-assign]
    worker.start()
    worker.stop(2)
    return seen[1:]


def test_steps_of_decodes_sample_and_those_of_prompts_do_not(tmp_path: Path) -> None:
    seen = set(steps_timed(tmp_path, 200))
    assert seen == {(1, 1, True), (8, 8, True), (32, 32, True), *((n, 1, False) for n in (16, 32, 128, 512))}


@pytest.mark.parametrize("num_blocks", [2, 3, 16, 17, 63, 64])
def test_a_small_pool_is_timed_with_what_fits(tmp_path: Path, num_blocks: int) -> None:
    seen = steps_timed(tmp_path, num_blocks)
    assert (1, 1, True) in seen
    assert ((32, 32, True) in seen) is (num_blocks >= 64)


def test_a_slow_machine_is_timed_no_longer_than_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "MOST_S", 0.2)
    seen = steps_timed(tmp_path, 200, token_s=0.002)
    # a step is slept through at least, and none is begun that would not fit
    assert 0 < sum(tokens * 0.002 for tokens, _, _ in seen) <= 0.2
    assert not [tokens for tokens, _, _ in seen if tokens >= 128]


@pytest.mark.parametrize(("device", "closed"), [("cpu", True), ("cuda", False)])
def test_a_gpus_pool_is_left_to_the_process_while_a_step_hangs(tmp_path: Path, device: str, closed: bool) -> None:
    worker = make_worker(tmp_path, "decode-1", Machine())
    worker.options = replace(worker.options, device=device)
    stops: list[str] = []
    worker.on_stop = lambda: stops.append("graphs")
    worker.pool.close = lambda: stops.append("pool")  # type: ignore[method-assign]
    go_on = threading.Event()
    worker.engine.start()
    worker.runner.run = lambda plan: go_on.wait(10)  # type: ignore[assignment,method-assign]
    spec = SequenceSpec("s", (1, 2), 2, SamplingParams(max_tokens=1))
    worker.engine.call(lambda batcher: batcher.reserve(spec)).result(10)
    worker.stop(0.05)
    assert stops == (["pool"] if closed else [])
    go_on.set()
    assert worker.engine.stop(10)
