"""Requests that ended here, remembered for a while: a late duplicate submit must not run them again. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.contracts.attempt import Attempt
from shared.contracts.ids import Epoch, RequestId


@dataclass(slots=True)
class Tombstones:
    """`remember_s` seconds of ended requests; `dropped` ones must not run on at any worker either."""

    remember_s: float = 60.0
    _entries: dict[RequestId, tuple[Epoch, bool, float]] = field(default_factory=dict)

    def add(self, request_id: RequestId, epoch: Epoch, *, dropped: bool, now: float) -> None:
        self._entries.pop(request_id, None)  # so that the order stays that of expiry
        self._entries[request_id] = (epoch, dropped, now + self.remember_s)

    def epoch(self, request_id: RequestId) -> Epoch | None:
        """The epoch in which the request ended, if it is remembered."""
        entry = self._entries.get(request_id)
        return None if entry is None else entry[0]

    def was_dropped(self, attempt: Attempt) -> bool:
        entry = self._entries.get(attempt.request_id)
        return entry is not None and entry[1] and attempt.epoch <= entry[0]

    def expire(self, now: float) -> None:
        for request_id, (_, _, until_s) in list(self._entries.items()):
            if until_s > now:
                break
            del self._entries[request_id]
