"""A closed loop against one engine: so many requests running at once, the next begins when one ends.

Pure but for `serve`, and standard library only: the drivers of peers run it in environments of their own.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TextIO

PROMPTS = (64, 128, 256, 512)
OUTPUTS = (32, 64, 96)
FIRST_ID = 300
"""Ids below are often special."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request: random token ids, so that no two share a prefix, and how many tokens must come."""

    prompt: tuple[int, ...]
    max_tokens: int


def make_jobs(count: int, vocab_size: int, seed: int, salt: str = "") -> list[Job]:
    """Always the same for a seed. Another salt gives other ids, for prompts of the same lengths."""
    lengths = random.Random(seed)
    sizes = [(lengths.choice(PROMPTS), lengths.choice(OUTPUTS)) for _ in range(count)]
    return _filled(sizes, vocab_size, f"{seed} {salt}")


def even_jobs(count: int, prompt: int, output: int, vocab_size: int, salt: str = "") -> list[Job]:
    """Requests of one size, for a static batch."""
    return _filled([(prompt, output)] * count, vocab_size, salt)


def _filled(sizes: Sequence[tuple[int, int]], vocab_size: int, seed: str) -> list[Job]:
    draw = random.Random(seed)
    ids = range(FIRST_ID, vocab_size) if vocab_size > 2 * FIRST_ID else range(3, vocab_size)
    return [Job(tuple(draw.choices(ids, k=prompt)), output) for prompt, output in sizes]


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
    """What came of a loop. Times in seconds; a gap is between two arrivals of one request's
    tokens, one or several together.

    Attributes:
        prefill_s: from the start to the first token of the last request to have one.
        full_tokens, full_s: what came, and in how long, while all requests were at their outputs: from then on until
            the first of them ended. Nothing where requests wait for others to end.
    """

    concurrency: int
    prompt_tokens: int
    output_tokens: int = 0
    seconds: float = 0.0
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    prefill_s: float = 0.0
    full_tokens: int = 0
    full_s: float = 0.0

    def body(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Arrivals:
    """Tokens of a loop as they arrive, whoever drives it. With `whole`, an answer is as long as asked, or an error."""

    jobs: Sequence[Job]
    concurrency: int
    start: float
    whole: bool = True
    result: LoopResult = field(init=False)
    _submitted: dict[int, float] = field(init=False, default_factory=dict)
    _last: dict[int, float] = field(init=False, default_factory=dict)
    _came: list[int] = field(init=False)
    _full_from: float | None = field(init=False, default=None)
    _ended: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.result = LoopResult(self.concurrency, sum(len(job.prompt) for job in self.jobs))
        self._came = [0] * len(self.jobs)

    def submitted(self, number: int, now: float) -> None:
        """A request was sent."""
        self._submitted[number] = now

    def came(self, number: int, tokens: int, now: float) -> None:
        """Tokens of a request arrived at once."""
        result = self.result
        if not tokens:
            return
        if self._came[number]:
            result.gaps_s.append(now - self._last[number])
        else:
            result.first_s.append(now - self._submitted[number])
            if len(result.first_s) == len(self.jobs):
                result.prefill_s = now - self.start
                self._full_from = None if self._ended else now
        if self._full_from is not None and now > self._full_from and not self._ended:
            result.full_tokens += tokens
            result.full_s = now - self._full_from
        self._came[number] += tokens
        self._last[number] = now

    def ended(self, number: int) -> None:
        """A request ended. Raises ValueError when it should be whole and is not: it was not the same work."""
        self._ended += 1
        if self.whole and self._came[number] != self.jobs[number].max_tokens:
            raise ValueError(f"request {number}: {self._came[number]} tokens instead of {self.jobs[number].max_tokens}")

    def close(self, now: float) -> LoopResult:
        """The loop is over."""
        self.result.seconds, self.result.output_tokens = now - self.start, sum(self._came)
        return self.result


def run_loop(
    driver: Driver, jobs: Sequence[Job], concurrency: int, clock: Callable[[], float] = time.perf_counter
) -> LoopResult:
    """Run all jobs, `concurrency` at once.

    Raises:
        ValueError: a request ended with another number of tokens than asked: it was not the same work.
    """
    arrivals = Arrivals(jobs, concurrency, clock())
    waiting, running = list(enumerate(jobs)), 0
    while waiting or running:
        while waiting and running < concurrency:
            number, job = waiting.pop(0)
            arrivals.submitted(number, clock())
            driver.submit(number, job)
            running += 1
        moves = driver.step()
        now = clock()
        for number, tokens, _ in moves:
            arrivals.came(number, tokens, now)
        for number, _, ended in moves:
            if ended:
                arrivals.ended(number)
                running -= 1
    return arrivals.close(clock())


def serve(driver: Driver, build: str, orders: TextIO, answers: TextIO) -> None:
    """Say what was built, then run the loop of every line that comes, until there are no more.

    An order is `{"concurrency": N, "jobs": [[[id, ...], max_tokens], ...]}`; its answer the loop's result.
    """
    _tell(answers, {"build": build})
    for line in orders:
        order = json.loads(line)
        jobs = [Job(tuple(prompt), max_tokens) for prompt, max_tokens in order["jobs"]]
        _tell(answers, run_loop(driver, jobs, order["concurrency"]).body())


def order_of(jobs: Sequence[Job], concurrency: int) -> str:
    """A line that `serve` carries out."""
    return json.dumps({"concurrency": concurrency, "jobs": [[job.prompt, job.max_tokens] for job in jobs]}) + "\n"


def own_stdout() -> TextIO:
    """Standard output for answers only: whatever else a library prints goes to stderr from now on."""

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return answers


def _tell(answers: TextIO, body: dict[str, Any]) -> None:
    answers.write(json.dumps(body) + "\n")
    answers.flush()
