"""How long a newcomer would wait for its first token, and when a refused one should come back. Pure.

Two views of the queue, and the worse one counts: by tokens (prompts ahead against what the pool computes a second) and
by turns (places ahead against how long a placement has lately taken), for the queue may wait for slots, not compute.
Its own prompt comes on top, by the step-time model that placement asks too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.scheduler.placement import WorkerView, chunk_of, steps_s

RETRY_MIN_S, RETRY_MAX_S = 1.0, 60.0


def prefill_rate(views: Sequence[WorkerView]) -> float:
    """Prompt tokens a second the pool computes at full steps; 0 without workers or step models."""
    total = 0.0
    for view in views:
        chunk = chunk_of(view) if view.token_budget > view.running else 0
        step_s = steps_s(view.step_model, chunk, start=0, chunk=max(1, chunk), running=view.running)
        if step_s > 0 and not view.draining:
            total += chunk / step_s
    return total


def predict_ttft_s(
    views: Sequence[WorkerView], *, tokens_ahead: int, turns_ahead: int, turn_s: float, num_tokens: int
) -> float:
    """Predicted seconds until the first token; 0 when nothing is known of the workers' speed.

    Args:
        tokens_ahead, turns_ahead: of those who stand before it, by the queue's rule.
        turn_s: seconds between placements lately.
        num_tokens: of its own prompt, which one worker computes.
    """
    rate = prefill_rate(views)
    if rate <= 0:
        return turns_ahead * turn_s
    on_workers = sum(v.queue_tokens for v in views)
    own_s = min(prompt_s(view, num_tokens) for view in views if not view.draining)
    return max((tokens_ahead + on_workers) / rate, turns_ahead * turn_s) + own_s


def prompt_s(view: WorkerView, num_tokens: int) -> float:
    """Seconds a worker takes for a prompt from its beginning, beside what it decodes."""
    return steps_s(view.step_model, num_tokens, start=0, chunk=chunk_of(view), running=view.running)


def retry_after_s(wait_s: float, bearable_s: float, jitter: float) -> float:
    """Whole seconds after which a retry is worthwhile: the excess wait plus up to 20 %, clamped to 1 to 60 s.

    Args:
        jitter: uniform in [0, 1), so that the refused do not come back together.
    """
    excess = max(0.0, wait_s - bearable_s)
    return float(math.ceil(min(RETRY_MAX_S, max(RETRY_MIN_S, excess * (1.0 + 0.2 * jitter)))))


@dataclass(slots=True)
class TurnClock:
    """A running mean of seconds between placements while somebody waited."""

    turn_s: float = 0.0
    weight: float = 0.2
    _last_s: float | None = None

    def placed(self, now: float, others_waited: bool) -> None:
        if self._last_s is not None and others_waited:
            gap = now - self._last_s
            self.turn_s = gap if self.turn_s == 0.0 else self.turn_s + self.weight * (gap - self.turn_s)
        self._last_s = now if others_waited else None
