"""The one step-time model: T = base + token * n + sequence * B + context * C, in seconds.

n is the tokens of a step, B its sequences, and C its attended positions: for each token the positions it sees, summed.
For a decode row that is its sequence's length; a chunk of n tokens from `start` on sees n * start + n (n + 1) / 2.

Everything that asks how long something takes asks this: token budget, admission, placement, fake workers, planner.
Pure, and without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shared.engine.step_plan import StepPlan

_MIN_DURATION_S = 1e-6
Features = tuple[float, float, float, float]
Matrix = tuple[Features, Features, Features, Features]
_ZERO: Features = (0.0, 0.0, 0.0, 0.0)
_TYPICAL: Features = (1.0, 64.0, 8.0, 8192.0)
"""A middling step; puts the four coefficients, which differ by orders of magnitude, on one scale."""


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Coefficients in seconds; none is negative. The defaults are a small CPU's guess, until a fit replaces them."""

    base_s: float = 2e-3
    token_s: float = 1e-3
    sequence_s: float = 1e-4
    context_s: float = 1e-7

    def predict(self, num_tokens: int, num_seqs: int, context_tokens: int) -> float:
        """Seconds a step takes; an empty step takes none.

        Args:
            num_tokens: tokens computed in the step.
            num_seqs: sequences they belong to.
            context_tokens: positions attended to, summed over those tokens; see `context_of`.
        """
        if num_tokens == 0:
            return 0.0
        return self.base_s + self.token_s * num_tokens + self.sequence_s * num_seqs + self.context_s * context_tokens


DEFAULT_MODEL = StepTimeModel()


@dataclass(frozen=True, slots=True)
class StepObservation:
    """One finished step."""

    num_tokens: int
    num_seqs: int
    context_tokens: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class StepTimeFit:
    """A model refined by observations: least squares of *relative* errors, older ones fading away.

    Relative, so that decode steps of a few milliseconds count as much as long prefill steps, and a stall counts little.
    What the observations say nothing about stays as it is: a worker that only decodes does not forget what a prompt
    costs.
    """

    model: StepTimeModel = DEFAULT_MODEL
    memory: float = 0.99  # weight an observation keeps with each later one: 0.99 looks back about 100 steps
    ridge: float = 1e-3  # pull towards the model so far, in observations
    _gram: Matrix = (_ZERO, _ZERO, _ZERO, _ZERO)
    _moment: Features = _ZERO

    def refine(self, observation: StepObservation) -> StepTimeFit:
        """The fit after one more step; observations without tokens or duration change nothing."""
        return self._with([observation], self.memory)

    def _with(self, observations: Iterable[StepObservation], memory: float) -> StepTimeFit:
        gram, moment, taken = self._gram, self._moment, 0
        for o in observations:
            if o.num_tokens > 0 and o.duration_s >= _MIN_DURATION_S:
                taken += 1
                gram, moment = _add(gram, moment, o, memory)
        if not taken:
            return self
        model = _solve_non_negative(gram, moment, self.model, self.ridge)
        return StepTimeFit(model, self.memory, self.ridge, gram, moment)


def _add(gram: Matrix, moment: Features, o: StepObservation, memory: float) -> tuple[Matrix, Features]:
    raw = (1.0, o.num_tokens, o.num_seqs, o.context_tokens)
    row = tuple(value / o.duration_s for value in raw)
    new_gram = tuple(tuple(memory * g + row[i] * row[j] for j, g in enumerate(line)) for i, line in enumerate(gram))
    return new_gram, tuple(memory * m + row[i] for i, m in enumerate(moment))  # type: ignore[return-value]


def fastest(observations: Iterable[StepObservation]) -> list[StepObservation]:
    """Of repeats of the same step the fastest: what others did on the machine meanwhile only makes a step slower."""
    best: dict[tuple[int, int, int], StepObservation] = {}
    for o in observations:
        known = best.setdefault((o.num_tokens, o.num_seqs, o.context_tokens), o)
        if o.duration_s < known.duration_s:
            best[o.num_tokens, o.num_seqs, o.context_tokens] = o
    return list(best.values())


def fit_all(observations: Iterable[StepObservation], prior: StepTimeModel = DEFAULT_MODEL) -> StepTimeFit:
    """A fit of many steps at once, as measured at start; all weigh the same in it."""
    return StepTimeFit(prior)._with(observations, memory=1.0)


def context_of(plan: StepPlan) -> int:
    """Positions attended to by a step's tokens, summed: the `context_tokens` of `predict`."""
    return sum(chunk_context(row.start, len(row.token_ids)) for row in plan.sequences)


def chunk_context(start: int, num_tokens: int) -> int:
    """Positions that `num_tokens` tokens from position `start` on attend to, summed."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


def _solve_non_negative(
    gram: Sequence[Sequence[float]], moment: Sequence[float], prior: StepTimeModel, ridge: float
) -> StepTimeModel:
    """Least squares with a pull towards the prior; what comes out negative is set to 0 and the rest solved again."""
    before = (prior.base_s, prior.token_s, prior.sequence_s, prior.context_s)
    typical_s = max(_MIN_DURATION_S, sum(c * f for c, f in zip(before, _TYPICAL, strict=True)))
    pull = [ridge * (feature / typical_s) ** 2 for feature in _TYPICAL]
    active = list(range(4))
    solution = [0.0] * 4
    while active:
        matrix = [[gram[i][j] + (pull[i] if i == j else 0.0) for j in active] for i in active]
        values = _solve(matrix, [moment[i] + pull[i] * before[i] for i in active])
        solution = [0.0] * 4
        for i, value in zip(active, values, strict=True):
            solution[i] = value
        negative = [i for i in active if solution[i] < 0.0]
        if not negative:
            break
        active.remove(min(negative, key=lambda i: solution[i] * _TYPICAL[i]))
    return StepTimeModel(*(max(0.0, value) for value in solution))


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination with diagonal scaling; the matrix is symmetric and positive definite."""
    size = len(right)
    scale = [matrix[i][i] ** -0.5 for i in range(size)]
    rows = [[matrix[i][j] * scale[i] * scale[j] for j in range(size)] + [right[i] * scale[i]] for i in range(size)]
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for below in range(i + 1, size):
            factor = rows[below][i] / rows[i][i]
            rows[below] = [b - factor * a for a, b in zip(rows[i], rows[below], strict=True)]
    values = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(rows[i][j] * values[j] for j in range(i + 1, size))
        values[i] = (rows[i][size] - rest) / rows[i][i]
    return [value * s for value, s in zip(values, scale, strict=True)]
