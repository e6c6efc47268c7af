"""The step-time model of a machine, found from its steps: least squares of *relative* errors, older ones fading away.

Relative, so that decode steps of a few milliseconds count as much as long prefill steps, and a stall counts little.
Steps are kept as sums by size, a bucket for each power of two of tokens. Each fades fast by its own steps, slowly and
never wholly by others', so that many decodes do not outweigh few prompts. Small buckets say where the floor lies, and
the others what a token costs; which are which is tried out. Pure, and without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from shared.engine.step_time import DEFAULT_MODEL, StepObservation, StepTimeModel

_MIN_DURATION_S = 1e-6
_FEATURES = 4  # 1, tokens, sequences, context
_TYPICAL = (1.0, 64.0, 8.0, 8192.0, 1.0)
"""A middling step; puts the five coefficients, which differ by orders of magnitude, on one scale."""
_CONTEXT, _FLOOR = 3, 4
_SPLIT_EVERY = 8
"""Refinements between two looks at which buckets lie on the floor."""
_KEPT = 0.25
"""Weight below which a bucket fades no further by others' steps: who only decodes still knows what a prompt costs."""
_WORTH = 1e-4
"""Mean squared relative error that a higher floor must save: the plainer model is taken otherwise."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Sums over steps, each row divided by its duration: Gram matrix, moments with 1, and weight."""

    gram: tuple[tuple[float, ...], ...] = ((0.0,) * _FEATURES,) * _FEATURES
    moment: tuple[float, ...] = (0.0,) * _FEATURES
    weight: float = 0.0

    def plus(self, o: StepObservation) -> _Bucket:
        row = [value / o.duration_s for value in (1.0, o.num_tokens, o.num_seqs, o.context_tokens)]
        gram = tuple(
            tuple(g + a * b for g, b in zip(line, row, strict=True)) for line, a in zip(self.gram, row, strict=True)
        )
        moment = tuple(m + value for m, value in zip(self.moment, row, strict=True))
        return _Bucket(gram, moment, self.weight + 1.0)

    def faded(self, memory: float) -> _Bucket:
        gram = tuple(tuple(memory * g for g in line) for line in self.gram)
        return _Bucket(gram, tuple(memory * m for m in self.moment), memory * self.weight)

    def error(self, model: StepTimeModel) -> float:
        """Squared relative error of the model at the bucket's middle, times its weight."""
        scale = self.gram[0][0]
        tokens, seqs, context = (total / scale for total in self.gram[0][1:])
        products_s = model.base_s + model.token_s * tokens + model.sequence_s * seqs
        return scale * (max(model.floor_s, products_s) + model.context_s * context - self.moment[0] / scale) ** 2


@dataclass(frozen=True, slots=True)
class StepTimeFit:
    """A model refined by observations. What they say nothing about stays as it is.

    Attributes:
        most_context_s: the most that seeing one position can cost: a bound of the machine's, as steps with short
            contexts tell little of it.
    """

    model: StepTimeModel = DEFAULT_MODEL
    memory: float = 0.99  # weight an observation keeps with each later one: looks back about 100 steps
    own_memory: float = 0.95  # the same, with each later one of its own bucket
    ridge: float = 1e-3  # pull towards the model so far, in observations
    most_context_s: float = inf
    _buckets: Mapping[int, _Bucket] = field(default_factory=dict)
    _split: int = 0  # buckets below it lie on the floor
    _refined: int = 0

    def refine(self, observation: StepObservation) -> StepTimeFit:
        """The fit after one more step; observations without tokens or duration change nothing."""
        if not _tells(observation):
            return self
        faded = dict(self._buckets)
        for size, bucket in self._buckets.items():
            if size == _size(observation):
                faded[size] = bucket.faded(self.own_memory)
            elif bucket.weight > _KEPT:
                faded[size] = bucket.faded(self.memory)
        return self._with(faded, [observation], anew=self._refined % _SPLIT_EVERY == 0)

    def of_all(self, observations: Iterable[StepObservation]) -> StepTimeFit:
        """The fit after many more steps, none of which fades."""
        taken = [o for o in observations if _tells(o)]
        return self._with(self._buckets, taken, anew=True) if taken else self

    def _with(self, before: Mapping[int, _Bucket], observations: Sequence[StepObservation], anew: bool) -> StepTimeFit:
        buckets = dict(before)
        for o in observations:
            buckets[_size(o)] = buckets.get(_size(o), _Bucket()).plus(o)
        split, model = self._best(buckets) if anew else (self._split, self._solved(buckets, self._split))
        refined = self._refined + len(observations)
        return replace(self, model=model, _buckets=buckets, _split=split, _refined=refined)

    def _best(self, buckets: Mapping[int, _Bucket]) -> tuple[int, StepTimeModel]:
        """The split whose model errs least, and that model."""
        worth = _WORTH * sum(bucket.weight for bucket in buckets.values())
        best: tuple[float, int, StepTimeModel] | None = None
        for split in (0, *(size + 1 for size in sorted(buckets))):
            model = self._solved(buckets, split)
            error = sum(bucket.error(model) for bucket in buckets.values())
            if best is None or error < best[0] - worth:
                best = error, split, model
        assert best is not None
        return best[1:]

    def _solved(self, buckets: Mapping[int, _Bucket], split: int) -> StepTimeModel:
        m = self.model
        before = (m.base_s, m.token_s, m.sequence_s, m.context_s, m.floor_s if split else 0.0)
        typical_s = max(_MIN_DURATION_S, m.predict(64, 8, 8192))
        pull = [self.ridge * (feature / typical_s) ** 2 for feature in _TYPICAL]
        gram = [[pull[i] if i == j else 0.0 for j in range(5)] for i in range(5)]
        moment = [p * b for p, b in zip(pull, before, strict=True)]
        for size, bucket in buckets.items():
            # on the floor, neither tokens nor sequences count
            places = ((0, _FLOOR), (_CONTEXT, _CONTEXT)) if size < split else tuple((i, i) for i in range(_FEATURES))
            for i, to in places:
                moment[to] += bucket.moment[i]
                for j, other in places:
                    gram[to][other] += bucket.gram[i][j]
        return StepTimeModel(*_bounded(gram, moment, self.most_context_s))


def fastest(observations: Iterable[StepObservation]) -> list[StepObservation]:
    """Of repeats of the same step the fastest: what others did on the machine meanwhile only makes a step slower."""
    best: dict[tuple[int, int, int], StepObservation] = {}
    for o in observations:
        known = best.setdefault((o.num_tokens, o.num_seqs, o.context_tokens), o)
        if o.duration_s < known.duration_s:
            best[o.num_tokens, o.num_seqs, o.context_tokens] = o
    return list(best.values())


def fit_all(
    observations: Iterable[StepObservation], prior: StepTimeModel = DEFAULT_MODEL, most_context_s: float = inf
) -> StepTimeFit:
    """A fit of many steps at once, as measured at start; all weigh the same in it."""
    return StepTimeFit(prior, most_context_s=most_context_s).of_all(observations)


def _tells(o: StepObservation) -> bool:
    return o.num_tokens > 0 and o.duration_s >= _MIN_DURATION_S


def _size(o: StepObservation) -> int:
    """Its bucket: 0 for one token, then one for each power of two."""
    return (o.num_tokens - 1).bit_length()


def _bounded(gram: Sequence[Sequence[float]], moment: Sequence[float], most_context_s: float) -> list[float]:
    """The least squares within bounds: what comes out beyond its bound is set to it, and the rest solved again."""
    free, fixed = list(range(5)), dict[int, float]()
    while True:
        right = [moment[i] - sum(gram[i][j] * value for j, value in fixed.items()) for i in free]
        found = dict(zip(free, _solve([[gram[i][j] for j in free] for i in free], right), strict=True))
        negative = [i for i in free if found[i] < 0.0]
        if negative:
            worst = min(negative, key=lambda i: found[i] * _TYPICAL[i])
        elif found.get(_CONTEXT, 0.0) > most_context_s:
            worst = _CONTEXT
        else:
            return [found.get(i, fixed.get(i, 0.0)) for i in range(5)]
        fixed[worst] = 0.0 if negative else most_context_s
        free.remove(worst)


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
