"""The fake runner and the step-time model behind it."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from shared.contracts.sampling import SamplingParams
from shared.engine.fake_runner import FakeRunner, made_up_token
from shared.engine.step_plan import IN_FLIGHT, ScheduledSequence, StepPlan
from shared.engine.step_time import (
    DEFAULT_MODEL,
    StepObservation,
    StepTimeFit,
    StepTimeModel,
    chunk_context,
    context_of,
    fastest,
    fit_all,
)


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


def observe(model: StepTimeModel, count: int, noise: float = 0.0, seed: int = 0) -> list[StepObservation]:
    rng = random.Random(seed)
    observations = []
    for _ in range(count):
        if rng.random() < 0.5:  # decodes
            num_seqs = rng.randint(1, 32)
            num_tokens, context = num_seqs, sum(rng.randint(1, 2000) for _ in range(num_seqs))
        else:
            num_seqs, num_tokens = 1, rng.randint(16, 512)
            context = chunk_context(rng.randint(0, 1500), num_tokens)
        seconds = model.predict(num_tokens, num_seqs, context) * (1 + noise * rng.uniform(-1, 1))
        observations.append(StepObservation(num_tokens, num_seqs, context, seconds))
    return observations


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_fit_recovers_the_model_behind_its_observations(noise: float) -> None:
    truth = StepTimeModel(5e-3, 4e-4, 2e-3, 5e-8)
    fit = fit_all(observe(truth, 400, noise))
    errors = [
        abs(fit.model.predict(o.num_tokens, o.num_seqs, o.context_tokens) / o.duration_s - 1)
        for o in observe(truth, 200, seed=1)
    ]
    assert max(errors) < (0.001 if noise == 0 else 0.06)


def test_refining_follows_a_machine_that_changes() -> None:
    fit = fit_all(observe(StepTimeModel(5e-3, 4e-4, 2e-3, 5e-8), 300))
    slower = StepTimeModel(10e-3, 8e-4, 4e-3, 1e-7)
    for observation in observe(slower, 500, noise=0.05, seed=2):
        fit = fit.refine(observation)
    for o in observe(slower, 50, seed=3):
        assert fit.model.predict(o.num_tokens, o.num_seqs, o.context_tokens) == pytest.approx(o.duration_s, rel=0.1)


def test_a_fit_without_variety_predicts_what_it_saw_and_stays_positive() -> None:
    fit = StepTimeFit()
    for _ in range(50):
        fit = fit.refine(StepObservation(1, 1, 100, 4e-3))
    assert fit.model.predict(1, 1, 100) == pytest.approx(4e-3, rel=0.02)
    assert min(fit.model.base_s, fit.model.token_s, fit.model.sequence_s, fit.model.context_s) >= 0
    assert fit.refine(StepObservation(0, 0, 0, 1.0)) is fit
    assert fit.refine(StepObservation(1, 1, 1, 0.0)) is fit


def test_of_repeats_the_fastest_counts() -> None:
    slow, fast, other = StepObservation(8, 1, 36, 0.9), StepObservation(8, 1, 36, 0.2), StepObservation(1, 1, 1, 0.1)
    assert fastest([slow, other, fast, slow]) == [fast, other]


SMALL = StepTimeModel(0.05, 0.002, 1e-3, 1e-7)


def decodes(rng: random.Random) -> StepObservation:
    num_seqs = rng.randint(1, 8)
    context = sum(rng.randint(50, 1000) for _ in range(num_seqs))
    seconds = SMALL.predict(num_seqs, num_seqs, context) * rng.uniform(0.9, 1.2)
    return StepObservation(num_seqs, num_seqs, context, seconds)


def test_a_bad_start_is_mended_by_a_few_steps_with_prompts() -> None:
    shapes = ((1, 1), (32, 1), (4, 4), (128, 1))
    start = [StepObservation(n, b, n * n // (2 * b), SMALL.predict(n, b, 0) * 4) for n, b in shapes]
    fit, rng = fit_all(start), random.Random(3)
    assert fit.model.predict(128, 1, 8256) > 3 * SMALL.predict(128, 1, 8256)
    for _ in range(12):
        num_tokens = rng.randint(16, 128)
        context = chunk_context(rng.randint(0, 1000), num_tokens)
        seconds = SMALL.predict(num_tokens, 1, context) * rng.uniform(0.9, 1.2)
        fit = fit.refine(StepObservation(num_tokens, 1, context, seconds)).refine(decodes(rng))
    assert fit.model.predict(128, 1, 8256) == pytest.approx(SMALL.predict(128, 1, 8256), rel=0.25)


def test_a_worker_that_only_decodes_does_not_forget_what_a_prompt_costs() -> None:
    fit, rng = fit_all(observe(SMALL, 40)), random.Random(4)
    for _ in range(3000):
        fit = fit.refine(decodes(rng))
    assert fit.model.predict(128, 1, 8256) == pytest.approx(SMALL.predict(128, 1, 8256), rel=0.3)


def test_coefficients_never_turn_negative() -> None:
    rng = random.Random(5)
    fit = StepTimeFit()
    for _ in range(300):
        fit = fit.refine(
            StepObservation(rng.randint(1, 512), rng.randint(1, 32), rng.randint(1, 99999), rng.uniform(1e-4, 1))
        )
        assert min(fit.model.base_s, fit.model.token_s, fit.model.sequence_s, fit.model.context_s) >= 0


def test_neither_needs_torch() -> None:
    code = "import sys, shared.engine.fake_runner, shared.engine.engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
