"""Who was heard when, as one gateway sees it. Pure: times are passed in, monotonic seconds."""

from __future__ import annotations

from collections.abc import Iterable

from shared.contracts.ids import WorkerId

FORGET_S = 120.0


def scheduler_of(pool: str) -> str:
    """The scheduler of a pool, as a service."""
    return f"scheduler of {pool}"


class Liveness:
    """Last news of workers and services.

    Args:
        alive_s: a service counts as alive for so long after it was heard.
        pools: the model pools that are served.
    """

    def __init__(self, alive_s: float, pools: Iterable[str] = ("default",)) -> None:
        self._alive_s = alive_s
        self._pools = tuple(pools)
        self._decoders: dict[WorkerId, tuple[str, float]] = {}
        self._services: dict[str, float] = {}
        self._workers: dict[WorkerId, float] = {}
        self.token_seen = False
        """A token of some request came through all services."""

    def heard_service(self, service: str, now: float) -> None:
        """A beat or an answer of a service."""
        self._services[service] = now

    def heard_worker(self, worker: WorkerId, now: float) -> None:
        """Anything from a worker."""
        self._workers[worker] = now

    def decoder_beat(self, worker: WorkerId, pool: str, *, serves: bool, now: float) -> None:
        """A decode worker told how it is; `serves`: it takes new requests, and its engine moves."""
        if serves:
            self._decoders[worker] = pool, now
        else:
            self._decoders.pop(worker, None)

    def worker_seen(self, worker: WorkerId) -> float | None:
        """When anything last came from a worker."""
        return self._workers.get(worker)

    def alive(self, service: str, now: float) -> bool:
        """Was the service heard lately?"""
        heard = self._services.get(service)
        return heard is not None and now - heard <= self._alive_s

    def ever(self, service: str) -> bool:
        """Was the service ever heard?"""
        return service in self._services

    def forget_old(self, now: float) -> None:
        """Drop workers silent for long; their ids never come back."""
        for worker in [w for w, heard in self._workers.items() if now - heard > FORGET_S]:
            del self._workers[worker]
            self._decoders.pop(worker, None)

    def checks(self, now: float, *, token_wanted: bool) -> dict[str, bool]:
        """What readiness depends on. The index answers only the scheduler, so a token through it stands for it."""
        serving = {pool for pool, heard in self._decoders.values() if now - heard <= self._alive_s}
        checks = {
            "policy": self.alive("policy", now),
            "scheduler": all(self.alive(scheduler_of(pool), now) for pool in self._pools),
            "decode": serving.issuperset(self._pools),
        }
        if token_wanted:
            checks["token"] = self.token_seen
        return checks
