"""A closed loop against one engine: so many requests running at once, the next begins when one ends.

Pure, and standard library only: the drivers of peers run it in environments of their own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

PROMPTS = (64, 128, 256, 512)
OUTPUTS = (32, 64, 96)
FIRST_ID = 300
"""Ids below are often special."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request: random token ids, so that no two share a prefix, and how many tokens must come."""

    prompt: tuple[int, ...]
    max_tokens: int


def make_jobs(count: int, vocab_size: int, seed: int) -> list[Job]:
    """Always the same for a seed."""
    rng = random.Random(seed)
    ids = range(FIRST_ID, vocab_size) if vocab_size > 2 * FIRST_ID else range(3, vocab_size)
    return [Job(tuple(rng.choices(ids, k=rng.choice(PROMPTS))), rng.choice(OUTPUTS)) for _ in range(count)]


class Driver(Protocol):
    """An engine as the loop drives it."""

    def submit(self, number: int, job: Job) -> None:
        """Begin a request."""
        ...

    def step(self) -> Sequence[tuple[int, int, bool]]:
        """Wait for progress: (request, tokens that came, whether it ended)."""
        ...


@dataclass(slots=True)
class LoopResult:
    """What came of a loop. Times in seconds; a gap is between two arrivals of one request's tokens."""

    concurrency: int
    prompt_tokens: int
    output_tokens: int = 0
    seconds: float = 0.0
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    def body(self) -> dict[str, Any]:
        return asdict(self)


def run_loop(
    driver: Driver, jobs: Sequence[Job], concurrency: int, clock: Callable[[], float] = time.perf_counter
) -> LoopResult:
    """Run all jobs, `concurrency` at once.

    Raises:
        ValueError: a request ended with another number of tokens than asked: it was not the same work.
    """
    result = LoopResult(concurrency, sum(len(job.prompt) for job in jobs))
    waiting, came = list(enumerate(jobs)), [0] * len(jobs)
    submitted, last = dict[int, float](), dict[int, float]()
    start, running = clock(), 0
    while waiting or running:
        while waiting and running < concurrency:
            number, job = waiting.pop(0)
            submitted[number] = clock()
            driver.submit(number, job)
            running += 1
        for number, tokens, ended in driver.step():
            now = clock()
            if tokens and not came[number]:
                result.first_s.append(now - submitted[number])
            elif tokens:
                result.gaps_s.append(now - last[number])
            came[number] += tokens
            last[number] = now
            running -= ended
            if ended and came[number] != jobs[number].max_tokens:
                raise ValueError(f"request {number}: {came[number]} tokens instead of {jobs[number].max_tokens}")
    result.seconds, result.output_tokens = clock() - start, sum(came)
    return result
