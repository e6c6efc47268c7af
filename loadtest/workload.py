"""A seeded open-loop load: Poisson arrivals, lengths of prompts and answers from lognormals. Pure."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

TOKEN_IDS = range(100, 300)
"""What prompts are made of: ids that every tokenizer has. Random, so that no two prompts share a prefix."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens: a lognormal by its median and the standard deviation of its logarithm, cut off at `most`."""

    median: float
    sigma: float
    most: int

    def draw(self, rng: random.Random) -> int:
        return max(1, min(self.most, round(rng.lognormvariate(math.log(self.median), self.sigma))))


@dataclass(frozen=True, slots=True)
class LoadShape:
    """What a load is drawn from."""

    requests: int
    rate: float  # arrivals a second on average
    prompt: Lengths = Lengths(median=48, sigma=0.8, most=400)
    output: Lengths = Lengths(median=40, sigma=0.6, most=160)


@dataclass(frozen=True, slots=True)
class Job:
    """One request: when it arrives, in seconds from the start, and what it asks."""

    number: int
    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int


def make_jobs(shape: LoadShape, seed: int) -> list[Job]:
    """The load of a seed: always the same. Raises ValueError for a load without requests, or that never arrives."""
    if shape.requests < 1 or shape.rate <= 0:
        raise ValueError("a load needs at least one request and a positive rate")
    rng = random.Random(seed)
    jobs, at_s = [], 0.0
    for number in range(shape.requests):
        prompt = tuple(rng.choices(TOKEN_IDS, k=shape.prompt.draw(rng)))
        jobs.append(Job(number, at_s, prompt, shape.output.draw(rng)))
        at_s += rng.expovariate(shape.rate)
    return jobs
