"""`python -m loadtest.itl`: what the prompt tokens of a step do to throughput and latency, without running a model.

The real batcher and its step-time fit drive a closed loop in virtual time; how long steps take is a machine's, as
`./baton bench engine` and `bench peers` measured them. Nothing but arithmetic: a minute of serving takes a moment.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from loadtest.closed_loop import Arrivals, Job, LoopResult, make_jobs
from loadtest.peer_plan import REQUESTS
from shared.contracts.parts import ItlTarget
from shared.contracts.sampling import SamplingParams
from shared.engine.batcher import Batcher
from shared.engine.batcher_config import BatcherConfig
from shared.engine.prompt_budget import AUTO_TARGET, NO_TARGET
from shared.engine.sequence_spec import SequenceSpec
from shared.engine.sequence_update import SequenceUpdate
from shared.engine.step_fit import StepTimeFit, fastest, fit_all
from shared.engine.step_plan import StepOutput, StepPlan
from shared.engine.step_time import StepObservation, StepTimeModel, chunk_context, context_of
from shared.kv.layout import LayerGroup, PoolLayout

MACHINES = {
    "bf16": StepTimeModel(base_s=2e-3, token_s=1.56e-3, sequence_s=0.86e-3, context_s=2.4e-7, floor_s=30.2e-3),
    "int8": StepTimeModel(base_s=12e-3, token_s=0.91e-3, sequence_s=0.35e-3, context_s=2.4e-7, floor_s=15e-3),
}
"""Step times of the random Qwen2.5-0.5B shape on two cores with AVX-512: decode at 1, 8 and 32 rows, prompts of 512 and
2,048 tokens, by docs/results/peers.txt."""
CALIBRATION = ((1, 1), (8, 8), (16, 1), (32, 1), (32, 32), (128, 1), (512, 1))
VOCABULARY = 5000


@dataclass(slots=True)
class Simulation:
    """A worker in virtual time. `noise` is the largest relative error of a step's time, drawn for each."""

    truth: StepTimeModel
    config: BatcherConfig
    noise: float = 0.03
    seed: int = 0
    now_s: float = 0.0
    steps: list[tuple[int, int, float]] = field(default_factory=list)  # decodes, prompt tokens, seconds
    _batcher: Batcher = field(init=False)
    _fit: StepTimeFit = field(init=False)
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        group = LayerGroup(name="full", layers=(0,), num_kv_heads=1, head_dim=8, block_size=32, dtype="float32")
        self._batcher = Batcher(PoolLayout((group,), (2000,)), self.config)
        self._random = random.Random(self.seed)
        seen = [self._observed(tokens, seqs, chunk_context(0, tokens // seqs) * seqs) for tokens, seqs in CALIBRATION]
        self._learn(fit_all(fastest(seen)))

    def run(self, jobs: Sequence[Job], concurrency: int) -> LoopResult:
        """A closed loop of these jobs. Raises RuntimeError when the batcher would wait for ever."""
        arrivals = Arrivals(jobs, concurrency, self.now_s)
        waiting, running = list(enumerate(jobs)), 0
        planned: list[StepPlan] = []
        while waiting or running:
            while waiting and running < concurrency:
                number, job = waiting.pop(0)
                arrivals.submitted(number, self.now_s)
                sampling = SamplingParams(max_tokens=job.max_tokens, temperature=0.0, ignore_eos=True)
                self._batcher.reserve(SequenceSpec(str(number), job.prompt, len(job.prompt), sampling))
                running += 1
            while (plan := self._batcher.plan(self.now_s)) is not None:
                planned.append(plan)
            if not planned:
                raise RuntimeError(f"nothing to run with {running} requests running")
            running -= self._finish(planned.pop(0), arrivals)
        return arrivals.close(self.now_s)

    def _finish(self, plan: StepPlan, arrivals: Arrivals) -> int:
        """Let a step's time pass and take its result; how many requests ended with it."""
        observation = self._observed(plan.num_tokens, len(plan.sequences), context_of(plan))
        self.now_s += observation.duration_s
        decodes = sum(1 for row in plan.sequences if len(row.token_ids) == 1)
        self.steps.append((decodes, plan.num_tokens - decodes, observation.duration_s))
        sampled = tuple((1,) * row.num_logits if row.sampling else () for row in plan.sequences)
        updates = self._batcher.commit(StepOutput(plan.step, sampled, duration_s=observation.duration_s))
        self._learn(self._fit.refine(observation))
        return sum(self._told(update, arrivals) for update in updates)

    def _told(self, update: SequenceUpdate, arrivals: Arrivals) -> bool:
        arrivals.came(int(update.seq_id), len(update.token_ids), self.now_s)
        if update.finish:
            arrivals.ended(int(update.seq_id))
        return bool(update.finish)

    def _observed(self, num_tokens: int, num_seqs: int, context: int) -> StepObservation:
        duration_s = self.truth.predict(num_tokens, num_seqs, context)
        return StepObservation(num_tokens, num_seqs, context, duration_s * self._random.uniform(1, 1 + self.noise))

    def _learn(self, fit: StepTimeFit) -> None:
        self._fit, self._batcher.step_model = fit, fit.model


def worker(target: ItlTarget, token_budget: int = 192, lone_token_budget: int = 512) -> BatcherConfig:
    """A decode worker as the settings' defaults make it, with this target."""
    return BatcherConfig(token_budget=token_budget, lone_token_budget=lone_token_budget, itl_target=target)


def loop(truth: StepTimeModel, config: BatcherConfig, width: int, seed: int = 0) -> LoopResult:
    """The closed loop of `./baton bench peers` with so many requests at once."""
    return Simulation(truth, config, seed=seed).run(make_jobs(REQUESTS[width], VOCABULARY, seed), width)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which a share of them lies; they must not be empty."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def line(name: str, result: LoopResult) -> str:
    """One row of the table."""
    figures = (
        result.output_tokens / result.seconds,
        median(result.first_s),
        median(result.gaps_s) * 1e3,
        quantile(result.gaps_s, 0.95) * 1e3,
        max(result.gaps_s) * 1e3,
    )
    return f"{name:28}" + "".join(f"{figure:10.2f}" for figure in figures)


def main(argv: Sequence[str]) -> int:
    """Print the table; exit code 0."""
    options = argparse.ArgumentParser(prog="loadtest.itl", description=__doc__)
    options.add_argument(
        "--try",
        dest="tried",
        type=float,
        nargs=3,
        action="append",
        default=[],
        metavar="X",
        help="another target: least milliseconds, times, and times for each live sequence",
    )
    options.add_argument("--seed", type=int, default=1, help="of lengths")
    chosen = options.parse_args(argv)
    targets = {"none, 256 a step": worker(NO_TARGET, 256, 256), "auto": worker(AUTO_TARGET)}
    for least_ms, times, each in chosen.tried:
        targets[f"{least_ms:g} {times:g} {each:g}"] = worker(ItlTarget(least_ms / 1000, times, each))
    print(f"{'':28}" + "".join(f"{name:>10}" for name in ("tokens/s", "TTFT p50", "ITL p50", "p95 ms", "most")))
    for machine, truth in MACHINES.items():
        for width in (8, 32):
            for name, config in targets.items():
                print(line(f"{machine} c{width} {name}", loop(truth, config, width, chosen.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
