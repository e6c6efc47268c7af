"""The step-time model and how it is found from steps: the floor, what a token costs, what context can cost at most."""

from __future__ import annotations

import random

import pytest

from shared.contracts.parts import StepModel
from shared.engine.step_fit import StepTimeFit, fastest, fit_all
from shared.engine.step_time import StepObservation, StepTimeModel, chunk_context, from_wire


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


BF16 = StepTimeModel(base_s=2e-3, token_s=1.6e-3, sequence_s=8e-4, context_s=2.4e-7, floor_s=30e-3)
INT8 = StepTimeModel(base_s=12e-3, token_s=9e-4, sequence_s=4e-4, context_s=2.4e-7)
SHAPES = ((1, 1), (8, 8), (16, 1), (32, 1), (32, 32), (128, 1), (512, 1))


def measured(truth: StepTimeModel, noise: float, seed: int) -> StepTimeFit:
    rng = random.Random(seed)
    steps = []
    for tokens, seqs in SHAPES * 3:
        context = chunk_context(0, tokens // seqs) * seqs
        seconds = truth.predict(tokens, seqs, context) * rng.uniform(1, 1 + noise)
        steps.append(StepObservation(tokens, seqs, context, seconds))
    return fit_all(fastest(steps), most_context_s=3e-6)


@pytest.mark.parametrize("truth", [BF16, INT8], ids=["floor", "linear"])
@pytest.mark.parametrize("seed", range(5))
def test_a_few_steps_at_start_tell_what_beside_decodes_costs(truth: StepTimeModel, seed: int) -> None:
    model = measured(truth, 0.05, seed).model
    for decodes in (1, 4, 8, 16, 31):
        for prompt in (0, 16, 24, 40, 96):
            tokens, seqs, context = decodes + prompt, decodes + (prompt > 0), 300 * decodes + chunk_context(0, prompt)
            assert model.predict(tokens, seqs, context) == pytest.approx(truth.predict(tokens, seqs, context), rel=0.15)


def test_a_floor_is_found_where_there_is_one_and_only_there() -> None:
    assert measured(BF16, 0.0, 0).model.floor_s == pytest.approx(BF16.floor_s, rel=0.05)
    linear = measured(INT8, 0.0, 0).model
    assert linear.floor_s <= linear.predict(1, 1, 0)
    assert linear.predict(1, 1, 1) == pytest.approx(INT8.predict(1, 1, 1), rel=0.02)


def test_decodes_on_the_floor_say_nothing_of_what_a_prompt_costs() -> None:
    fit, rng = measured(BF16, 0.02, 1), random.Random(6)
    for _ in range(1000):
        decodes = rng.randint(1, 8)
        context = decodes * rng.randint(50, 500)
        seconds = BF16.predict(decodes, decodes, context) * rng.uniform(1, 1.05)
        fit = fit.refine(StepObservation(decodes, decodes, context, seconds))
    assert fit.model.predict(40, 9, 900) == pytest.approx(BF16.predict(40, 9, 900), rel=0.1)


def test_a_floor_that_was_measured_too_high_comes_down_with_the_steps() -> None:
    fit, rng = measured(StepTimeModel(2e-3, 1.6e-3, 8e-4, 2.4e-7, 0.12), 0.0, 2), random.Random(7)
    for _ in range(40):
        for tokens, seqs in ((8, 8), (32, 9), (rng.randint(1, 8), 1)):
            seconds = BF16.predict(tokens, seqs, 900)
            fit = fit.refine(StepObservation(tokens, seqs, 900, seconds))
    for tokens, seqs in ((8, 8), (32, 9)):
        assert fit.model.predict(tokens, seqs, 900) == pytest.approx(BF16.predict(tokens, seqs, 900), rel=0.1)


def test_context_costs_no_more_than_reading_it_can() -> None:
    # a long step that was disturbed would say that context is dear, and deep prompts would get no tokens
    steps = [StepObservation(n, 1, chunk_context(0, n), BF16.predict(n, 1, 0)) for n in (1, 16, 32, 128)]
    disturbed = [*steps, StepObservation(512, 1, chunk_context(0, 512), 3 * BF16.predict(512, 1, 0))]
    assert fit_all(disturbed).model.context_s > 5e-6
    assert fit_all(disturbed, most_context_s=1e-6).model.context_s == 1e-6


def test_the_model_travels_whole() -> None:
    assert from_wire(BF16.wire()) == BF16
    assert BF16.wire() == StepModel(base_s=2e-3, token_s=1.6e-3, sequence_s=8e-4, context_s=2.4e-7, floor_s=30e-3)
    assert BF16.faster(2).predict(64, 3, 4000) == pytest.approx(BF16.predict(64, 3, 4000) / 2)
