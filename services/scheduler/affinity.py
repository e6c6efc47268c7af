"""Which of several workers that could take a request: what they hold of its prompt weighed against what they do. Pure.

A worker costs what it takes to the first token there, other prompts' tokens before it and the delay to what it decodes
included, and what its decodes cost the output; held tokens cost nothing. So a prefix pulls requests to its home until
the queue there costs more than to compute it elsewhere, and one that all hold pulls nowhere.

Estimates come from beats, and may be wrong or late. So whoever is loaded beyond OVER times the mean, and some more for
small numbers, gets nothing while others can: no prefix is hot enough to make its home a hotspot. The next worker
computes the prefix, and is a second home. Of the cheapest, whose costs differ by less than estimates do, the least
loaded is taken.

(Consistent hashing with bounded loads: Mirrokni, Thorup, Zadimoghaddam, SODA 2018.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shared.contracts.ids import WorkerId

OVER = 1.25
SPARE_SHARE = 0.125
"""Of a worker's places, and of its blocks: how much more than OVER times the mean is nothing yet."""
ALIKE = 0.1
"""Share of the time to a first token by which costs may differ and be alike."""
TYPICAL_OUTPUT = 64
"""Output tokens that are counted at most: how long an answer becomes is not known."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker does."""

    sequences: int
    places: int  # sequences it runs at most; 0: no bound known
    used: float  # share of its blocks that sequences hold


@dataclass(frozen=True, slots=True)
class Mean:
    """Of what workers do; infinite where there are none."""

    sequences: float
    used: float

    @classmethod
    def of(cls, loads: Sequence[Load]) -> Mean:
        """Sums once, for any number of homes."""
        if not loads:
            return cls(math.inf, math.inf)
        count = len(loads)
        return cls(sum(load.sequences for load in loads) / count, sum(load.used for load in loads) / count)

    def is_passed_by(self, load: Load) -> bool:
        """True for one that has so much more that nothing is worth adding to it."""
        spare = max(1.0, load.places * SPARE_SHARE)
        return load.sequences > OVER * self.sequences + spare or load.used > OVER * self.used + SPARE_SHARE


@dataclass(frozen=True, slots=True)
class Home:
    """A worker that could take a request."""

    worker: WorkerId
    first_s: float  # to the first token, and the delay to what it decodes
    output_s: float  # what comes behind that
    held: int  # leading tokens of the prompt
    room: int  # blocks a newcomer can have
    load: Load

    @property
    def cost_s(self) -> float:
        """Everything."""
        return self.first_s + self.output_s


def choose_home(homes: Sequence[Home], loads: Sequence[Load]) -> Home:
    """The worker to take.

    Args:
        homes: at least one.
        loads: of all workers that share the work, those without room included.
    """
    mean = Mean.of(loads)
    bounded = [home for home in homes if not mean.is_passed_by(home.load)] or homes
    cheapest = min(bounded, key=lambda home: home.cost_s)
    limit_s = cheapest.cost_s + ALIKE * cheapest.first_s
    alike = [home for home in bounded if home.cost_s <= limit_s]
    return min(alike, key=lambda home: (home.load.sequences, -home.held, -home.room, home.worker))
