"""Whether a request may wait at all: its predicted wait against what its class bears, and its share of the queue. Pure.

Who is turned away is told when to come back; see `promises.py` for why that is worth it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from services.scheduler import forecast
from services.scheduler.book import Book
from services.scheduler.forecast import Ahead
from services.scheduler.placement import Ask, WorkerView, decode_candidates, room_of_idle, within_pools
from services.scheduler.placer import Placer, TableLimits
from services.scheduler.promises import Line, Promises, digest_of
from services.scheduler.queue import sane_weight
from services.scheduler.record import Record
from services.scheduler.worker_registry import WorkerRegistry
from shared.contracts import messages as m
from shared.contracts.errors import BatonError, ContextExceeded, Overloaded
from shared.contracts.grants import Grant, class_rank
from shared.engine.sequence_spec import larger_than_pool

BACK_AGAIN = 1.25
"""A request that was told to come back may find the wait so many times what its class bears."""


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """`reason` names a metric's label."""

    reason: str  # queue_full | slo | context_length_exceeded
    error: BatonError


class Door:
    """Judges newcomers of one table."""

    def __init__(
        self, book: Book, registry: WorkerRegistry, placer: Placer, limits: TableLimits, rng: random.Random
    ) -> None:
        self._book = book
        self._registry = registry
        self._turns, self._takers = placer.turns, placer.takers
        self._limits = limits
        self._rng = rng
        self._key = rng.randbytes(32)
        self.promises = Promises()

    def predict(self, submit: m.Submit, grant: Grant) -> tuple[int, float]:
        """Requests that have a turn before it, and seconds until its first token, if it waits or from where it does."""
        position, ahead = self._ahead(submit, grant)
        num_tokens = len(submit.token_ids) // 4
        rank = class_rank(grant.klass)
        return position, forecast.predict_ttft_s(self._views(grant), ahead, self._turns, num_tokens, rank)

    def _views(self, grant: Grant) -> list[WorkerView]:
        return [view for view in self._registry.views() if view.takes(grant.klass)]

    def judge(self, now: float, submit: m.Submit, grant: Grant, left_s: float) -> TurnedAway | None:
        """None: it may wait. `left_s`: what is left of its budget."""
        if (error := self._too_large(submit, grant)) is not None:
            return TurnedAway(error.code, error)
        digest = digest_of(self._key, grant.tenant, submit.token_ids)
        line: Line = (grant.tenant, grant.klass)
        (position, wait_s), own_s = self.predict(submit, grant), self._own_s(submit, grant)
        due = self.promises.due(now, digest)
        at_once = position == 0 and self._has_room(submit, grant)  # no promise keeps what is idle idle
        place = due if due is not None else self.promises.known(line, digest)
        promised_s = 0.0 if at_once else self.promises.ahead_s(line, place)
        slo_s = self._limits.slo_ttft_s.get(grant.klass, 0.0)
        bearable_s = min(left_s, slo_s) if slo_s > 0 else left_s
        bears_s = bearable_s * (BACK_AGAIN if due is not None else 1.0)
        if self._is_full(grant):
            reason, message, excess_s = "queue_full", "the queue is full", own_s + promised_s
        elif wait_s + promised_s > min(left_s, bears_s):
            reason, excess_s = "slo", wait_s + promised_s - bearable_s
            message = f"predicted wait {wait_s + promised_s:.1f} s exceeds {bearable_s:.1f} s"
        else:
            self.promises.keep(place)
            return None
        retry_s = forecast.retry_after_s(excess_s, 0.0, self._rng.random())
        self.promises.give(now, line, digest, retry_s, own_s, place)
        return TurnedAway(reason, Overloaded(message, retry_after_s=retry_s))

    def _too_large(self, submit: m.Submit, grant: Grant) -> ContextExceeded | None:
        """What no worker could hold alone is told so at once, however many wait."""
        views = self._registry.pools()
        ask = within_pools(_ask(submit, grant), views)
        room = room_of_idle(views, ask)
        return None if room is None else ContextExceeded(larger_than_pool(room, ask.num_tokens, ask.max_new_tokens))

    def _has_room(self, submit: m.Submit, grant: Grant) -> bool:
        """True if a worker would take it now."""
        views = self._registry.pools()
        return bool(decode_candidates(within_pools(_ask(submit, grant), views), views))

    def _ahead(self, submit: m.Submit, grant: Grant) -> tuple[int, Ahead]:
        queue, own = self._book.queue, submit.attempt.request_id
        slots = self._slots(submit, grant)
        before = queue.before(own) if own in queue else queue.ahead(grant.klass, grant.tenant, grant.weight, slots)
        ahead = [self._book.records[request_id] for request_id in before]
        mine = [record for record in ahead if record.grant.tenant == grant.tenant]
        all_of_them = _sum(ahead, slots)
        own_part = _sum(mine, slots) if len(mine) < len(ahead) else all_of_them
        return len(ahead), all_of_them.at_least(own_part.stretched(self._share(grant)))

    def _slots(self, submit: m.Submit, grant: Grant) -> float:
        """Tokens the request will come to, prompt and outputs."""
        longest = max((s.max_tokens for s in submit.sampling), default=1)
        guess = self._book.outputs.guess(grant.tenant, grant.klass, longest)
        return len(submit.token_ids) // 4 + guess * max(1, len(submit.sampling))

    def _share(self, grant: Grant) -> float:
        """What part of the pool is the tenant's: what others leave of late, and its fair share at least."""
        return max(self._fair_share(grant), 1.0 - self._takers.others(grant.tenant, grant.klass))

    def _fair_share(self, grant: Grant) -> float:
        weights = self._book.queue.weights(grant.klass) | {grant.tenant: sane_weight(grant.weight)}
        return weights[grant.tenant] / sum(weights.values())

    def _own_s(self, submit: m.Submit, grant: Grant) -> float:
        """Seconds by which the request lengthens the wait of its tenant's next."""
        rate = forecast.prefill_rate(self._views(grant))
        by_tokens_s = len(submit.token_ids) // 4 / rate if rate > 0 else 0.0
        by_memory_s = self._slots(submit, grant) * self._turns.slot_s
        return max(by_tokens_s, self._turns.turn_s, by_memory_s) / self._share(grant)

    def _is_full(self, grant: Grant) -> bool:
        """Full for a tenant that has its share of the queue: one that floods it takes no place of the others'."""
        queue, bound = self._book.queue, self._limits.queue_bound
        if len(queue) < bound:
            return False
        return queue.waiting_of(grant.klass, grant.tenant) >= bound * self._fair_share(grant)


def _ask(submit: m.Submit, grant: Grant) -> Ask:
    return Ask(
        num_tokens=len(submit.token_ids) // 4,
        max_new_tokens=max((s.max_tokens for s in submit.sampling), default=1),
        choices=max(1, len(submit.sampling)),
        klass=grant.klass,
        open_ended=all(s.open_ended for s in submit.sampling),
    )


def _sum(records: list[Record], slots: float) -> Ahead:
    """`slots`: of the request that those stand before."""
    num_tokens = sum([record.num_tokens for record in records])
    return Ahead(num_tokens, len(records), slots + num_tokens + sum([record.guessed_output for record in records]))
