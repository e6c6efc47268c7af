"""The reservation lease table of a decode worker: who holds what, under which attempt, and until when. Pure.

It knows neither blocks nor tokens: the batcher owns blocks, `stream_outbox` owns tokens, `shared/kv/handoff` the KV on
its way. What it decides:

- which attempts are live: an older attempt or a lower leader's term is refused, a newer one re-stamps what is held;
- when a hand-off that is awaited is given up (`GoLocal`): the prefill worker died, was restarted, or its engine made no
  progress for the lease;
- when a request is dropped (`Drop`): its ingress fell silent or no longer lists it.

Every method takes `now`, seconds on a monotonic clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum

from shared.contracts.attempt import Attempt
from shared.contracts.ids import IngressId, RequestId, Term, WorkerId
from shared.engine.worker_fences import Fences
from shared.kv.lease import ProgressLease

INGRESS_LEASE_S = 10.0
"""An ingress without a beat for this long is gone: nobody would read what its requests produce."""
LISTING_GRACE_S = 2.0
"""A beat this soon after the reservation may have been sent before the request existed."""
LISTING_MISSES = 2
"""Beats in a row that must lack a request before it is dropped."""
INGRESS_SILENT = "ingress_silent"
"""Reason of a `Drop` when the ingress has made no beat for its lease."""


class Kind(Enum):
    NEW = "new"
    REPEATED = "repeated"  # this very attempt is held already: answer alike
    RESTAMPED = "restamped"  # an older attempt was held; its blocks and pulled KV now belong to this one
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The table's answer to a reserve. `old` is the attempt a re-stamp fenced; `reason` says why it was refused."""

    kind: Kind
    old: Attempt | None = None
    reason: str = ""  # "" | older_attempt | lower_term


@dataclass(frozen=True, slots=True)
class GoLocal:
    """Stop waiting for the prefill worker: prefill here, from the contiguous KV that has come."""

    attempt: Attempt
    source: WorkerId
    reason: str  # prefill_lease | prefill_died | prefill_restarted


@dataclass(frozen=True, slots=True)
class Drop:
    """End the attempt: nobody reads it any more."""

    attempt: Attempt
    reason: str  # ingress_silent | ingress_unlisted


Effect = GoLocal | Drop


@dataclass(slots=True)
class Reservation:
    """One held request. `lease` is there only while KV from `source` is awaited."""

    attempt: Attempt
    term: Term
    ingress_id: IngressId
    reserved_at: float
    source: WorkerId
    lease: ProgressLease | None = None
    misses: int = 0


@dataclass(slots=True)
class _Ingress:
    last_beat: float
    number: int = 0
    requests: set[RequestId] = field(default_factory=set)


class ReservationTable:
    """All reservations of one decode worker, at most one per request."""

    def __init__(self, fences: Fences | None = None, ingress_lease_s: float = INGRESS_LEASE_S) -> None:
        self.fences = fences or Fences()
        self._ingress_lease_s = ingress_lease_s
        self._held: dict[RequestId, Reservation] = {}
        self._ingress: dict[IngressId, _Ingress] = {}
        self._waiting: dict[WorkerId, set[RequestId]] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """Every live attempt, in order of reservation."""
        return tuple(r.attempt for r in self._held.values())

    @property
    def sources(self) -> tuple[WorkerId, ...]:
        """Prefill workers KV is awaited from."""
        return tuple(self._waiting)

    def get(self, attempt: Attempt) -> Reservation | None:
        """The reservation of exactly this attempt, if it is live."""
        held = self._held.get(attempt.request_id)
        return held if held is not None and held.attempt == attempt else None

    def live_attempt(self, request_id: RequestId) -> Attempt | None:
        held = self._held.get(request_id)
        return held.attempt if held is not None else None

    # ------------------------------------------------------------------------------------------ life of a reservation

    def reserve(
        self, attempt: Attempt, term: Term, ingress_id: IngressId, source: WorkerId, lease_s: float, now: float
    ) -> Verdict:
        """Hold `attempt`, awaiting KV from `source` (empty: local). On NEW the caller asks the batcher for blocks and
        calls `withdraw` when it refuses; on RESTAMPED it moves what it holds from `old` to `attempt`."""
        if not self.fences.admits_term(term):
            return Verdict(Kind.REFUSED, reason="lower_term")
        self.fences.see_term(term)
        if not self.fences.admits(attempt):
            return Verdict(Kind.REFUSED, reason="older_attempt")
        held = self._held.get(attempt.request_id)
        if held is not None and held.attempt == attempt:
            return Verdict(Kind.REPEATED)
        self.fences.open(attempt)
        if held is not None:
            self._settle_source(held)
        fresh = Reservation(attempt, term, ingress_id, now, source)
        self._held[attempt.request_id] = fresh
        self._watch(ingress_id, attempt.request_id, held, now)
        if source:
            fresh.lease = ProgressLease.start(lease_s, now)
            self._waiting.setdefault(source, set()).add(attempt.request_id)
        return Verdict(Kind.NEW) if held is None else Verdict(Kind.RESTAMPED, old=held.attempt)

    def withdraw(self, attempt: Attempt) -> None:
        """The batcher had no room: the attempt is not held, and may be tried again."""
        held = self.get(attempt)
        if held is not None:
            self._forget(held)

    def cancel(self, attempt: Attempt) -> Attempt | None:
        """End `attempt` and every older one of its request. Returns the live attempt this ended, if any."""
        self.fences.close(attempt)
        held = self._held.get(attempt.request_id)
        if held is None or held.attempt > attempt:
            return None
        self._forget(held)
        return held.attempt

    def end(self, attempt: Attempt) -> None:
        """The attempt ran to its end: its reservation is over, and late messages about it are dropped."""
        held = self.get(attempt)
        if held is not None:
            self._forget(held)
        self.fences.close(attempt)

    def kv_settled(self, attempt: Attempt) -> None:
        """No more KV is awaited for the attempt: all of it came, or it goes on locally."""
        held = self.get(attempt)
        if held is not None:
            self._settle_source(held)

    # ------------------------------------------------------------------------------------------ news of peers

    def source_beat(
        self, worker: WorkerId, incarnation: int, progress: Mapping[Attempt, int], now: float
    ) -> list[Effect]:
        """A prefill worker's beat: renews the leases of the attempts it lists with an advanced counter."""
        effects: list[Effect] = []
        for request_id in tuple(self._waiting.get(worker, ())):
            held = self._held[request_id]
            if held.lease is not None and not held.lease.beat(incarnation, progress.get(held.attempt), now):
                effects.append(self._give_up(held, "prefill_restarted"))
        return effects

    def source_progress(self, attempt: Attempt, incarnation: int, now: float) -> None:
        """A new commit came from the source: as good as a beat."""
        held = self.get(attempt)
        if held is not None and held.lease is not None and held.lease.beat(incarnation, None, now):
            held.lease.renew(now)

    def source_died(self, worker: WorkerId) -> list[Effect]:
        """The prefill worker's process is gone for certain (its pool file's lock was released)."""
        return [self._give_up(self._held[r], "prefill_died") for r in tuple(self._waiting.get(worker, ()))]

    def ingress_beat(
        self, ingress_id: IngressId, number: int, requests: Collection[RequestId], now: float
    ) -> list[Effect]:
        """An ingress is alive and lists its requests; those it lacks twice in a row are dropped."""
        ingress = self._ingress.get(ingress_id)
        if ingress is None or number <= ingress.number:
            return []
        ingress.last_beat, ingress.number = now, number
        listed = frozenset(requests)
        effects: list[Effect] = []
        for request_id in tuple(ingress.requests):
            held = self._held[request_id]
            if request_id in listed:
                held.misses = 0
            elif now - held.reserved_at >= LISTING_GRACE_S:
                held.misses += 1
                if held.misses >= LISTING_MISSES:
                    effects.append(self._drop(held, "ingress_unlisted"))
        return effects

    def tick(self, now: float) -> list[Effect]:
        """Leases that ran out. Call it a few times a second; costs one pass over what is awaited."""
        effects: list[Effect] = []
        for ingress in tuple(self._ingress.values()):
            if now - ingress.last_beat >= self._ingress_lease_s:
                effects += [self._drop(self._held[r], INGRESS_SILENT) for r in tuple(ingress.requests)]
        for requests in tuple(self._waiting.values()):
            for request_id in tuple(requests):
                held = self._held[request_id]
                if held.lease is not None and held.lease.expired(now):
                    effects.append(self._give_up(held, "prefill_lease"))
        return effects

    # ------------------------------------------------------------------------------------------ inside

    def _watch(self, ingress_id: IngressId, request_id: RequestId, old: Reservation | None, now: float) -> None:
        if old is not None:
            self._unwatch(old.ingress_id, request_id)
        ingress = self._ingress.setdefault(ingress_id, _Ingress(last_beat=now))
        ingress.requests.add(request_id)

    def _unwatch(self, ingress_id: IngressId, request_id: RequestId) -> None:
        ingress = self._ingress.get(ingress_id)
        if ingress is not None:
            ingress.requests.discard(request_id)
            if not ingress.requests:
                del self._ingress[ingress_id]

    def _settle_source(self, held: Reservation) -> None:
        requests = self._waiting.get(held.source)
        if requests is not None:
            requests.discard(held.attempt.request_id)
            if not requests:
                del self._waiting[held.source]
        held.lease = None

    def _forget(self, held: Reservation) -> None:
        self._settle_source(held)
        self._unwatch(held.ingress_id, held.attempt.request_id)
        del self._held[held.attempt.request_id]

    def _give_up(self, held: Reservation, reason: str) -> GoLocal:
        self._settle_source(held)
        return GoLocal(held.attempt, held.source, reason)

    def _drop(self, held: Reservation, reason: str) -> Drop:
        self._forget(held)
        self.fences.close(held.attempt)
        return Drop(held.attempt, reason)
