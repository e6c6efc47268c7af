"""Which processes hold something of requests now, as their beats tell. Pure: times are monotonic seconds."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from shared.contracts.ids import IngressId, WorkerId

SCHEDULER_GONE_S = 15.0
"""A leader that said nothing for so long has lost its lease, and has dropped its table or will before it does
anything else."""

WORKER_SILENT_S = 15.0
"""Nobody may say of a worker heard since that its memory is lost."""


class Place(msgspec.Struct, frozen=True):
    """Where a worker's pool lies: in the memory of a machine, until that is started anew."""

    host: str
    boot_id: str


class Copies:
    """Schedulers that lead and workers that have a pool, beside the ingresses of `IngressWatch`."""

    def __init__(self) -> None:
        self._leaders: dict[str, float] = {}
        self._workers: dict[WorkerId, float] = {}
        self._places: dict[WorkerId, Place] = {}
        self._ingresses: frozenset[IngressId] = frozenset()
        self.new_workers: dict[WorkerId, Place] = {}
        """Heard of, and not `kept` yet."""
        self.newcomers = False
        """A process was heard of for the first time; whoever has told it of purges takes that back."""

    def scheduler_beat(self, scheduler_id: str, now: float) -> None:
        """It leads a pool."""
        self.newcomers |= scheduler_id not in self._leaders
        self._leaders[scheduler_id] = now

    def worker_beat(self, worker: WorkerId, place: Place, now: float) -> None:
        """It has a pool."""
        if worker not in self._workers:
            self.new_workers[worker] = place
            self.newcomers = True
        self._workers[worker] = now
        self._places[worker] = place

    def is_heard(self, worker: WorkerId, now: float) -> bool:
        """Whether it said something of late."""
        return now - self._workers.get(worker, float("-inf")) < WORKER_SILENT_S

    def forget(self, worker: WorkerId) -> None:
        """Its pool is taken for lost; should it beat all the same, it is new again."""
        self._workers.pop(worker, None)
        self._places.pop(worker, None)
        self.new_workers.pop(worker, None)

    def lost_with_their_boot(self, pools: Mapping[WorkerId, Place | None], now: float) -> list[WorkerId]:
        """Of these pools, those of silent workers whose machine was started anew, as the beats from there tell.
        Machines of one name are told apart as long as a worker of each is heard."""
        boots: dict[str, set[str]] = {}
        for worker, place in self._places.items():
            if self.is_heard(worker, now):
                boots.setdefault(place.host, set()).add(place.boot_id)
        return [
            worker
            for worker, place in pools.items()
            if place is not None
            and place.host in boots
            and place.boot_id not in boots[place.host]
            and not self.is_heard(worker, now)
        ]

    def ingresses(self, living: Collection[IngressId]) -> None:
        """Those that may live now; one that was taken for gone and is back missed what was told meanwhile."""
        self.newcomers |= not self._ingresses.issuperset(living)
        self._ingresses = frozenset(living)

    def kept(self, workers: Collection[WorkerId]) -> None:
        """These are noted where they outlive this process."""
        self.new_workers = {name: place for name, place in self.new_workers.items() if name not in workers}

    def leaders(self, now: float) -> list[str]:
        """Schedulers that may have requests in their table; others are forgotten."""
        self._leaders = {name: heard for name, heard in self._leaders.items() if now - heard < SCHEDULER_GONE_S}
        return list(self._leaders)
