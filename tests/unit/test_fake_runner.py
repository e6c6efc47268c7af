"""The fake runner and the step-time model behind it."""

from __future__ import annotations

import subprocess
import sys

from shared.contracts.sampling import SamplingParams
from shared.engine.fake_runner import FakeRunner, made_up_token
from shared.engine.step_plan import IN_FLIGHT, ScheduledSequence, StepPlan
from shared.engine.step_time import DEFAULT_MODEL, StepTimeModel, chunk_context, context_of


def row(start: int, num_tokens: int, num_logits: int = 1, seed: int = 1) -> ScheduledSequence:
    sampling = SamplingParams(max_tokens=4, seed=seed) if num_logits else None
    return ScheduledSequence("a", start, (IN_FLIGHT,) * num_tokens, ((0,),), num_logits, sampling)


def test_tokens_depend_on_seed_and_position_only() -> None:
    runner = FakeRunner(sleep=lambda seconds: None)
    whole = runner.run(StepPlan(1, (row(0, 9),)))
    alone = runner.run(StepPlan(2, (row(8, 1),)))
    assert whole.sampled == alone.sampled
    assert runner.run(StepPlan(3, (row(8, 1, seed=2),))).sampled != whole.sampled
    assert runner.run(StepPlan(4, (row(0, 9, num_logits=0),))).sampled == ((),)
    verified = runner.run(StepPlan(5, (row(5, 4, num_logits=3),))).sampled[0]
    assert verified == tuple(made_up_token(1, position, range(1000, 9000)) for position in (7, 8, 9))
    assert all(1000 <= token_id < 9000 for token_id in verified)


def test_a_step_takes_what_the_model_predicts() -> None:
    slept: list[float] = []
    runner = FakeRunner(step_time=StepTimeModel(1.0, 0.5, 0.25, 0.125), sleep=slept.append)
    plan = StepPlan(1, (row(2, 3), row(7, 1)))
    assert context_of(plan) == (3 + 4 + 5) + 8 == chunk_context(2, 3) + chunk_context(7, 1)
    output = runner.run(plan)
    assert slept == [1.0 + 0.5 * 4 + 0.25 * 2 + 0.125 * 20]
    assert output.duration_s == slept[0]
    assert DEFAULT_MODEL.predict(0, 0, 0) == 0.0


def test_neither_needs_torch() -> None:
    code = "import sys, shared.engine.fake_runner, shared.engine.engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
