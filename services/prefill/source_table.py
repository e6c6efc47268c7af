"""All hand-off sources of one prefill worker: fencing, acknowledgements, leases. Pure.

It knows neither tokens nor steps: the batcher computes, this table says which attempts are live and when their blocks
may go. `now` is seconds on a monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shared.contracts.attempt import Attempt
from shared.contracts.ids import RequestId, Term, WorkerId
from shared.contracts.messages import HandoffAck, HandoffRelease
from shared.engine.worker_fences import Fences
from shared.kv.handoff import Free, Source, SourceEffect


class SourceTable:
    """At most one source per request."""

    def __init__(self, fences: Fences | None = None) -> None:
        self.fences = fences or Fences()
        self._sources: dict[RequestId, Source] = {}

    def __len__(self) -> int:
        return len(self._sources)

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """Every live attempt, in order of arrival: computing, queued, or waiting for its acknowledgement."""
        return tuple(s.attempt for s in self._sources.values())

    @property
    def decode_workers(self) -> frozenset[WorkerId]:
        return frozenset(s.decode_worker for s in self._sources.values())

    def get(self, attempt: Attempt) -> Source | None:
        """The source of exactly this attempt, if it is live."""
        source = self._sources.get(attempt.request_id)
        return source if source is not None and source.attempt == attempt else None

    def refuses(self, attempt: Attempt, term: Term) -> str:
        """Why a run may not start: "lower_term", "older_attempt", or empty when it may."""
        if not self.fences.admits_term(term):
            return "lower_term"
        self.fences.see_term(term)
        return "" if self.fences.admits(attempt) else "older_attempt"

    def open(self, source: Source) -> list[SourceEffect]:
        """Begin. An older attempt at the same request ends by it."""
        self.fences.open(source.attempt)
        old = self._sources.get(source.attempt.request_id)
        self._sources[source.attempt.request_id] = source
        return [old.free("superseded")] if old is not None else []

    def withdraw(self, attempt: Attempt) -> None:
        """It could not start for want of room: forgotten, and may be tried again."""
        if self.get(attempt) is not None:
            del self._sources[attempt.request_id]

    def cancel(self, attempt: Attempt, reason: str = "cancelled") -> list[SourceEffect]:
        """End `attempt` and every older one of its request."""
        self.fences.close(attempt)
        source = self._sources.get(attempt.request_id)
        if source is None or source.attempt > attempt:
            return []
        return self._sweep([source.free(reason)])

    def ack(self, message: HandoffAck, now: float) -> list[SourceEffect]:
        source = self.get(message.attempt)
        return self._sweep(source.ack(message, now)) if source is not None else []

    def release(self, message: HandoffRelease) -> list[SourceEffect]:
        source = self.get(message.attempt)
        if source is None or source.decode_worker != message.worker:
            return []
        return self.cancel(message.attempt, f"released:{message.reason}")

    def decode_beat(
        self, worker: WorkerId, incarnation: int, progress: Mapping[Attempt, int], now: float
    ) -> list[SourceEffect]:
        """A decode worker's beat: renews the leases of the attempts it lists with an advanced counter."""
        effects: list[SourceEffect] = []
        for source in self._of(worker):
            effects += source.beat(incarnation, progress.get(source.attempt), now)
        return self._sweep(effects)

    def decode_died(self, worker: WorkerId) -> list[SourceEffect]:
        """The decode worker's process is gone for certain."""
        return self._sweep([s.free("decode_died") for s in self._of(worker)])

    def tick(self, now: float) -> list[SourceEffect]:
        """Resends that are due and leases that ran out. Call it a few times a second."""
        return self._sweep([e for s in tuple(self._sources.values()) for e in s.tick(now)])

    def _of(self, worker: WorkerId) -> list[Source]:
        return [s for s in self._sources.values() if s.decode_worker == worker]

    def _sweep(self, effects: Iterable[SourceEffect]) -> list[SourceEffect]:
        """Forget the sources that ended; their attempts stay fenced."""
        effects = list(effects)
        for effect in effects:
            if isinstance(effect, Free) and self.get(effect.attempt) is not None:
                del self._sources[effect.attempt.request_id]
                self.fences.close(effect.attempt)
        return effects
