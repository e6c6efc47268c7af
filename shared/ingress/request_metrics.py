"""What one request tells in metrics, and what an ingress tells of all of them.

Times are the ingress's clock, seconds. A request enters each histogram once at most, with the times its client felt:
from its arrival here, and no matter how often it was placed, lost, preempted or resumed on the way. One that was
cancelled or failed enters none of those that describe whole requests.
"""

from __future__ import annotations

from collections.abc import Iterable

from shared.contracts.errors import BatonError
from shared.contracts.ids import Epoch
from shared.telemetry import metric_names as names
from shared.telemetry.metric import Metric
from shared.telemetry.metrics import Metrics
from shared.text.stream_effects import End

FINISHED = {"stop": "stop", "length": "length", "cancelled": "abort"}
"""Our finish reasons in vLLM's words; anything else is an error."""


class RequestMetrics:
    """Counts one request. `arrived`: when it came to the ingress; `epoch`: its first."""

    def __init__(self, metrics: Metrics, model: str, *, arrived: float, epoch: Epoch) -> None:
        self._metrics = metrics
        self._itl = metrics.recorder(names.ITL, model_name=model)
        self._model = model
        self._arrived = arrived
        self._epoch = epoch
        self._placed: float | None = None
        self._first: float | None = None
        self._last = arrived
        self._tokens = 0
        self._resuming = False
        self._ended = arrived

    def admitted(self, choices: int, max_tokens: int) -> None:
        """Policy let it in."""
        self._enter(names.PARAMS_N, choices)
        self._enter(names.PARAMS_MAX_TOKENS, max_tokens)

    def submitted(self, epoch: Epoch) -> None:
        """It goes to the scheduler; with a higher epoch than before when an attempt was lost."""
        if epoch > self._epoch:
            self._epoch = epoch
            self._resuming = self._tokens > 0
            self._metrics.inc(names.EPOCHS_RAISED, model_name=self._model)

    def placed(self, now: float) -> None:
        """It has a place. Only the first counts: what comes later is part of its service."""
        if self._placed is None:
            self._placed = now

    def replayed(self) -> None:
        """Tokens were missing and were asked for again."""
        self._metrics.inc(names.REPLAYS, model_name=self._model)

    def tokens(self, now: float, count: int) -> None:
        """`count` output tokens are the client's. Several that come together share their gap evenly."""
        if count <= 0:
            return
        first = self._first is None
        if first:
            self._first = now
            self._enter(names.TTFT, now - self._arrived)
        gap = 0.0 if first else (now - self._last) / count
        for _ in range(count - first):
            self._itl.add(gap)
        if self._resuming:
            self._resuming = False
            self._metrics.inc(names.RESUMES, model_name=self._model)
        self._last = now
        self._tokens += count

    def ended(self, now: float, end: End, prompt_tokens: int) -> None:
        """It is over for the client."""
        self._ended = now
        finished = FINISHED.get(end.finish, "error")
        self._metrics.inc(names.REQUEST_SUCCESS, model_name=self._model, finished_reason=finished)
        if end.error is not None:
            family = names.CANCELLED if finished == "abort" else names.FAILED
            self._metrics.inc(family, model_name=self._model, reason=end.error.code)
        if finished in ("stop", "length"):
            self._whole(now, prompt_tokens)

    def settled(self, now: float) -> None:
        """Its settlement is stored."""
        self._metrics.recorder(names.SETTLEMENT_LAG).add(now - self._ended)

    def unsettled(self) -> None:
        """Its settlement could not be stored, or was not to be."""
        self._metrics.inc(names.SETTLEMENTS_LOST)

    def _enter(self, metric: Metric, value: float) -> None:
        self._metrics.recorder(metric, model_name=self._model).add(value)

    def _whole(self, now: float, prompt_tokens: int) -> None:
        values = {
            names.E2E: now - self._arrived,
            names.REQUEST_PROMPT_TOKENS: prompt_tokens,
            names.REQUEST_GENERATION_TOKENS: self._tokens,
        }
        if self._first is not None:
            # A frame may overtake the event that tells the place.
            placed = min(self._first, self._placed if self._placed is not None else self._first)
            values |= {
                names.QUEUE_TIME: placed - self._arrived,
                names.PREFILL_TIME: self._first - placed,
                names.DECODE_TIME: self._last - self._first,
                names.INFERENCE_TIME: self._last - placed,
            }
        for metric, value in values.items():
            self._enter(metric, value)


def count_refused(metrics: Metrics, error: BatonError) -> None:
    """A request was turned away before it had a session."""
    metrics.inc(names.REFUSED, reason=error.code)


def read_in_flight(metrics: Metrics, models: Iterable[str], in_flight: Iterable[str]) -> None:
    """Set the gauge of requests in flight from the model of each."""
    running = list(in_flight)
    for model in models:
        metrics.set(names.IN_FLIGHT, running.count(model), model_name=model)
