"""Timed samples of several things in turn, on a machine that others may use: what they use is kept with each. Pure but
for `collect`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

from loadtest.machine import IDLE_CORES, ForeignLoad

SAMPLE_S = 0.25
"""A sample repeats its step for so long: less, and the clock ticks of /proc/stat say nothing about others."""
MIN_CLEAN = 2
"""Fewer clean samples than this and all are used, and the figure is marked."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds a step took, as the mean of a sample, and the cores that others used meanwhile."""

    step_s: float
    foreign_cores: float

    @property
    def clean(self) -> bool:
        return self.foreign_cores <= IDLE_CORES


@dataclass(slots=True)
class Series:
    """All samples of one thing."""

    samples: list[Sample] = field(default_factory=list)

    @property
    def clean(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.clean]

    @property
    def idle(self) -> bool:
        """Whether the figure was measured on an idle machine."""
        return len(self.clean) >= MIN_CLEAN

    @property
    def step_s(self) -> float:
        """The median of the clean samples, or of all where the machine was never idle."""
        return median(sample.step_s for sample in (self.clean if self.idle else self.samples))


def collect(
    steps: Mapping[str, Callable[[], None]],
    seconds: float,
    enough: int,
    clock: Callable[[], float] = time.perf_counter,
    load: Callable[[], ForeignLoad] = ForeignLoad,
) -> dict[str, Series]:
    """Sample every step in turn, round after round, each after one step that is not counted.

    Args:
        seconds: no new round is begun after this long; each step is sampled at least once.
        enough: ends sooner when every step has so many clean samples.
    """
    series = {name: Series() for name in steps}
    start = clock()
    while True:
        for name, step in steps.items():
            step()
            series[name].samples.append(_sample(step, clock, load))
        if clock() - start >= seconds or all(len(one.clean) >= enough for one in series.values()):
            return series


def _sample(step: Callable[[], None], clock: Callable[[], float], load: Callable[[], ForeignLoad]) -> Sample:
    others, begin, count = load(), clock(), 0
    while (passed := clock() - begin) < SAMPLE_S or not count:
        step()
        count += 1
    return Sample(passed / count, others.cores())
