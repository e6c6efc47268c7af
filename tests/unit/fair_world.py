"""A pool of slots around the real queue: requests of random lengths arrive, wait, run, and end. One clock, one seed."""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.scheduler.queue import FairQueue
from services.scheduler.shares import Charge
from shared.contracts.ids import RequestId, TenantId


@dataclass(slots=True)
class Job:
    """Times in seconds, costs in tokens; `guess` is what is known of `cost` before it ends."""

    name: RequestId
    tenant: TenantId
    arrival_s: float
    cost: float
    guess: float
    klass: str = "interactive"
    began_s: float = -1.0


@dataclass
class Pool:
    """Runs jobs in `slots` places; a token takes a second there."""

    slots: int
    weights: Mapping[TenantId, float]
    max_wait_s: Mapping[str, float] = field(default_factory=dict)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.queue = FairQueue(max_wait_s=self.max_wait_s)
        self.waiting: dict[RequestId, Job] = {}
        self.ends: list[tuple[float, int, Job, Charge]] = []
        self.served = dict.fromkeys(self.weights, 0.0)  # true cost of what began, over the weight
        self.order: list[Job] = []

    def arrive(self, job: Job) -> None:
        self.waiting[job.name] = job
        weight = self.weights[job.tenant]
        number = len(self.order) + len(self.waiting)
        self.queue.push(job.name, job.klass, job.arrival_s, number, tenant=job.tenant, weight=weight, cost=job.guess)

    def backlogged(self) -> set[TenantId]:
        return {job.tenant for job in self.waiting.values()}

    def fill(self) -> list[Job]:
        """Begin what there are slots for."""
        began = []
        while len(self.ends) < self.slots and (head := self.queue.head(self.now)) is not None:
            job = self.waiting.pop(head)
            late = self.queue.is_late(head, self.now)
            self.queue.remove(head)
            charge = self.queue.charge(job.klass, job.tenant, self.weights[job.tenant], job.guess)
            if late:
                self.queue.began_late(job.guess)
            self.queue.count_placed(job.klass, job.guess, late=late)
            job.began_s = self.now
            self.served[job.tenant] += job.cost / self.weights[job.tenant]
            heapq.heappush(self.ends, (self.now + job.cost, len(self.order), job, charge))
            self.order.append(job)
            began.append(job)
        return began

    def end_next(self) -> Job:
        """The next one ends, and its true cost is known."""
        self.now, _, job, charge = heapq.heappop(self.ends)
        self.queue.correct(job.klass, charge, job.cost)
        self.queue.close(job.klass, charge)
        return job


def worst_gap(pool: Pool, arrivals: list[Job]) -> float:
    """Run all; the most by which two tenants of a class were served apart while both waited without a break."""
    worst, since = 0.0, dict[tuple[TenantId, TenantId], tuple[float, float]]()
    coming = sorted(arrivals, key=lambda job: (job.arrival_s, job.name), reverse=True)
    while coming or pool.ends:
        if not pool.ends or (coming and coming[-1].arrival_s <= pool.ends[0][0]):
            pool.now = max(pool.now, coming[-1].arrival_s)
            pool.arrive(coming.pop())
        else:
            pool.end_next()
        while True:
            both = sorted(pool.backlogged())
            pairs = [(a, b) for i, a in enumerate(both) for b in both[i + 1 :]]
            since = {p: since.get(p, (pool.served[p[0]], pool.served[p[1]])) for p in pairs}
            for (a, b), (from_a, from_b) in since.items():
                worst = max(worst, abs((pool.served[a] - from_a) - (pool.served[b] - from_b)))
            # one at a time: who waits no more is out of the comparison from that moment on
            slots, pool.slots = pool.slots, min(pool.slots, len(pool.ends) + 1)
            began = pool.fill()
            pool.slots = slots
            if not began:
                break
    return worst


def random_jobs(rng: random.Random, tenants: list[TenantId], *, exact: bool, count: int = 150) -> list[Job]:
    """Bursts and trickles, requests up to 50 times as long as others, each tenant with habits of its own."""
    jobs = []
    for tenant in tenants:
        now, giant = rng.uniform(0, 200), rng.random()
        for number in range(rng.randrange(1, count)):
            now += rng.choice(
                (0.0, 0.0, rng.expovariate(1 / 20), rng.expovariate(1 / 400) if rng.random() < 0.1 else 0.0)
            )
            cost = float(rng.choice((1, 2, 5)) * (rng.choice((10, 50)) if rng.random() < giant else 1))
            guess = cost if exact else cost * rng.choice((0.2, 1.0, 3.0))
            jobs.append(Job(RequestId(f"{tenant}-{number:03}"), tenant, now, cost, guess))
    return jobs
