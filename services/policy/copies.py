"""Which processes hold something of requests now, as their beats tell. Pure: times are monotonic seconds."""

from __future__ import annotations

from collections.abc import Collection

from shared.contracts.ids import WorkerId

SCHEDULER_GONE_S = 15.0
"""A leader that said nothing for so long has lost its lease, and has dropped its table or will before it does
anything else."""


class Copies:
    """Schedulers that lead and workers that have a pool, beside the ingresses of `IngressWatch`."""

    def __init__(self) -> None:
        self._leaders: dict[str, float] = {}
        self._workers: set[WorkerId] = set()
        self.new_workers: tuple[WorkerId, ...] = ()
        """Heard of, and not `kept` yet."""
        self.newcomers = False
        """A process was heard of for the first time; whoever has told it of purges takes that back."""

    def scheduler_beat(self, scheduler_id: str, now: float) -> None:
        """It leads a pool."""
        self.newcomers |= scheduler_id not in self._leaders
        self._leaders[scheduler_id] = now

    def worker_beat(self, worker: WorkerId) -> None:
        """It has a pool."""
        if worker not in self._workers:
            self._workers.add(worker)
            self.new_workers += (worker,)
            self.newcomers = True

    def kept(self, workers: Collection[WorkerId]) -> None:
        """These are noted where they outlive this process."""
        self.new_workers = tuple(worker for worker in self.new_workers if worker not in workers)

    def leaders(self, now: float) -> list[str]:
        """Schedulers that may have requests in their table; others are forgotten."""
        self._leaders = {name: heard for name, heard in self._leaders.items() if now - heard < SCHEDULER_GONE_S}
        return list(self._leaders)
