"""How long a newcomer would wait for its first token, and when a refused one should come back. Pure.

Ahead of it is what the fair order puts there: its tenant's backlog, and of the others' as much as their shares come to
meanwhile. Three views of that, and the worst one counts: by tokens (prompts ahead against what the pool computes a
second), by turns (places ahead against how long a placement has lately taken), for the queue may wait for slots, not
compute, and by memory (the KV of those ahead beyond what is free, against how fast KV has lately been placed). Its own
prompt comes on top, by the step-time model that placement asks too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.scheduler.placement import WorkerView, chunk_of, steps_s
from shared.contracts.grants import CLASSES, class_rank
from shared.contracts.ids import TenantId

RETRY_MIN_S, RETRY_MAX_S = 1.0, 600.0


@dataclass(frozen=True, slots=True)
class Ahead:
    """What stands before a request. `num_slots`: KV slots those come to, prompts and outputs, the request's own too."""

    num_tokens: int = 0  # of prompts, which are computed first
    turns: int = 0
    num_slots: float = 0.0

    def stretched(self, share: float) -> Ahead:
        """The same as if only a share of the pool worked on it."""
        return Ahead(math.ceil(self.num_tokens / share), math.ceil(self.turns / share), self.num_slots / share)

    def at_least(self, other: Ahead) -> Ahead:
        """The larger of each."""
        return Ahead(
            max(self.num_tokens, other.num_tokens), max(self.turns, other.turns), max(self.num_slots, other.num_slots)
        )


@dataclass(slots=True)
class Takers:
    """Who has had the places lately: parts of one, by tenant and class, that fade. Who comes now and then takes places
    by requests that no queue shows yet."""

    weight: float = 0.05
    _parts: dict[tuple[TenantId, str], float] = field(default_factory=dict)

    def placed(self, tenant: TenantId, klass: str) -> None:
        """A place was taken."""
        faded = {line: part * (1 - self.weight) for line, part in self._parts.items() if part > 0.001}
        faded[tenant, klass] = faded.get((tenant, klass), 0.0) + self.weight
        self._parts = faded

    def others(self, tenant: TenantId, klass: str) -> float:
        """The part that others took of the same class and higher ones."""
        rank = class_rank(klass)
        own = tenant, klass
        return sum(part for line, part in self._parts.items() if line != own and class_rank(line[1]) <= rank)


def free_slots(views: Sequence[WorkerView], rank: int = len(CLASSES) - 1) -> float:
    """Tokens' KV that a class can have at decode workers now, what lower ones would give up included."""
    decodes = (view for view in views if view.role == "decode" and not view.draining)
    rooms = ((view.room_for(rank), view.block_sizes) for view in decodes)
    slots = (min((n * s for n, s in zip(r.blocks, sizes, strict=False)), default=0) for r, sizes in rooms)
    return float(sum(max(0, n) for n in slots))


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
    views: Sequence[WorkerView], ahead: Ahead, turns: TurnClock, num_tokens: int, rank: int = len(CLASSES) - 1
) -> float:
    """Predicted seconds until the first token; that of turns alone when nothing is known of the workers' speed.

    Args:
        turns: placements lately.
        num_tokens: of its own prompt, which one worker computes.
        rank: of its class, which takes from lower ones.
    """
    rate = prefill_rate(views)
    by_turns_s = ahead.turns * turns.turn_s
    if rate <= 0:
        return by_turns_s
    on_workers = sum(v.tokens_before(rank) for v in views)
    by_memory_s = max(0.0, ahead.num_slots - free_slots(views, rank)) * turns.slot_s
    own_s = min(prompt_s(view, num_tokens) for view in views if not view.draining)
    return max((ahead.num_tokens + on_workers) / rate, by_turns_s, by_memory_s) + own_s


def prompt_s(view: WorkerView, num_tokens: int) -> float:
    """Seconds a worker takes for a prompt from its beginning, beside what it decodes."""
    return steps_s(view.step_model, num_tokens, start=0, chunk=chunk_of(view), running=view.running)


def retry_after_s(wait_s: float, bearable_s: float, jitter: float) -> float:
    """Whole seconds after which a retry is worthwhile: the excess wait plus up to 20 %, clamped to 1 s to 10 min.

    Args:
        jitter: uniform in [0, 1), so that the refused do not come back together.
    """
    excess = max(0.0, wait_s - bearable_s)
    return float(math.ceil(min(RETRY_MAX_S, max(RETRY_MIN_S, excess * (1.0 + 0.2 * jitter)))))


@dataclass(slots=True)
class TurnClock:
    """Running means of placements while somebody waited: seconds between two, and KV slots of one."""

    turn_s: float = 0.0
    weight: float = 0.2
    num_slots: float = 0.0
    _last_s: float | None = None

    @property
    def slot_s(self) -> float:
        """Seconds for each token's KV that is placed; 0 when nothing is known."""
        return self.turn_s / self.num_slots if self.num_slots > 0 else 0.0

    def placed(self, now: float, others_waited: bool, num_slots: float = 0.0) -> None:
        if self._last_s is not None and others_waited:
            first, weight = self.turn_s == 0.0, self.weight
            gap = now - self._last_s
            self.turn_s = gap if first else self.turn_s + weight * (gap - self.turn_s)
            self.num_slots = num_slots if first else self.num_slots + weight * (num_slots - self.num_slots)
        self._last_s = now if others_waited else None
