"""What a gateway knows of the stack's load: the last beat of every worker, ingress and leading scheduler. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Any

from shared.contracts.ids import IngressId, WorkerId
from shared.contracts.messages import GatewayBeat, SchedulerBeat, WorkerBeat

FORGET_S = 10.0
"""Who was silent for so long is gone: the lease that workers have at the scheduler by default."""


class Cluster:
    """The newest beats. Times are passed in, monotonic seconds."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, tuple[WorkerBeat, float]] = {}
        self._ingresses: dict[IngressId, tuple[GatewayBeat, float]] = {}
        self._schedulers: dict[str, tuple[SchedulerBeat, float]] = {}

    def on_worker_beat(self, beat: WorkerBeat, now: float) -> None:
        """A worker told how it is."""
        self._workers[beat.worker] = (beat, now)

    def on_scheduler_beat(self, beat: SchedulerBeat, now: float) -> None:
        """A pool's leader told what it has queued and placed. One of an older term changes nothing."""
        known = self._schedulers.get(beat.pool)
        if known is None or beat.term >= known[0].term:
            self._schedulers[beat.pool] = (beat, now)

    def on_ingress_beat(self, beat: GatewayBeat, now: float) -> None:
        """A gateway, or the batch service, told which requests it holds."""
        self._ingresses[beat.ingress_id] = (beat, now)

    def forget_old(self, now: float) -> None:
        """Drop workers and ingresses that fell silent."""
        for worker in [w for w, (_, heard) in self._workers.items() if now - heard > FORGET_S]:
            del self._workers[worker]
        for ingress in [i for i, (_, heard) in self._ingresses.items() if now - heard > FORGET_S]:
            del self._ingresses[ingress]

    def has_fake_workers(self, pool: str) -> bool:
        """True if a pool's tokens may be made up."""
        return any(beat.fake for beat, _ in self._workers.values() if beat.pool == pool)

    def made_of(self, pool: str) -> dict[str, list[str]]:
        """What a pool's live workers compute: digests of weights, and ids of kernels and number formats."""
        beats = [beat for beat, _ in self._workers.values() if beat.pool == pool]
        return {
            "weights": sorted({beat.model_digest for beat in beats if beat.model_digest}),
            "kernels": sorted({beat.numerics for beat in beats if beat.numerics}),
        }

    def body(self, now: float) -> dict[str, Any]:
        """What was heard lately; `age_s`: since the beat.

        `scheduler`, of all pools together (None when silent), `pools` with the scheduler of each, `ingresses` by id,
        `workers` by role and id.
        """
        self.forget_old(now)
        known = sorted(self._workers.values(), key=lambda entry: (entry[0].role, entry[0].worker))
        heard = {
            pool: _scheduler(beat, now - at) for pool, (beat, at) in self._schedulers.items() if now - at <= FORGET_S
        }
        pools = sorted(heard.keys() | {beat.pool for beat, _ in known})
        return {
            "scheduler": _together([heard[pool] for pool in pools if pool in heard]),
            "pools": [{"pool": pool, "scheduler": heard.get(pool)} for pool in pools],
            "ingresses": [_ingress(*self._ingresses[ingress], now) for ingress in sorted(self._ingresses)],
            "workers": [_worker(beat, now - at) for beat, at in known],
        }


def _scheduler(beat: SchedulerBeat, age_s: float) -> dict[str, Any]:
    return {
        "id": beat.scheduler_id,
        "term": beat.term,
        "queued": beat.queued,
        "queued_by_class": beat.queued_by_class,
        "tenants": [
            {"tenant": t.tenant, "class": t.klass, "weight": t.weight, "waiting": t.waiting, "running": t.running}
            for t in beat.tenants
        ],
        "running": beat.running,
        "age_s": round(age_s, 3),
    }


def _together(schedulers: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The schedulers of several pools as one: sums, the latest term, the longest silence."""
    if len(schedulers) < 2:
        return schedulers[0] if schedulers else None
    by_class: Counter[str] = Counter()
    for scheduler in schedulers:
        by_class.update(scheduler["queued_by_class"])
    return {
        "id": ", ".join(scheduler["id"] for scheduler in schedulers),
        "term": max(scheduler["term"] for scheduler in schedulers),
        "queued": sum(scheduler["queued"] for scheduler in schedulers),
        "queued_by_class": dict(by_class),
        "tenants": sorted((t for s in schedulers for t in s["tenants"]), key=lambda t: -t["waiting"]),
        "running": sum(scheduler["running"] for scheduler in schedulers),
        "age_s": max(scheduler["age_s"] for scheduler in schedulers),
    }


def _ingress(beat: GatewayBeat, heard: float, now: float) -> dict[str, Any]:
    kind = beat.ingress_id.partition("-")[0]
    return {"id": beat.ingress_id, "kind": kind, "requests": len(beat.requests), "age_s": round(now - heard, 3)}


def _worker(beat: WorkerBeat, age_s: float) -> dict[str, Any]:
    return {
        "id": beat.worker,
        "role": beat.role,
        "pool": beat.pool,
        "incarnation": beat.incarnation,
        "fake": beat.fake,
        "draining": beat.draining,
        "stalled": beat.stalled,
        "classes": list(beat.classes),
        "running": beat.running,
        "waiting": beat.waiting,
        "max_sequences": beat.max_sequences,
        "attempts": len(beat.attempts),
        "queue_tokens": beat.queue_tokens,
        "free_blocks": list(beat.free_blocks),
        "total_blocks": list(beat.total_blocks),
        "block_sizes": list(beat.block_sizes),
        "numerics": beat.numerics,
        "preemptions": beat.preemptions,
        "age_s": round(age_s, 3),
    }
