"""Requests of all sizes before a pool that is nearly full: none waits for ever, and no room lies idle for long."""

from __future__ import annotations

import random

import pytest

from services.scheduler.effects import AskMatch, AskReserve
from services.scheduler.placer import MOST_OVERTAKEN
from shared.contracts.attempt import Attempt
from shared.contracts.ids import RequestId
from shared.contracts.parts import AttemptProgress
from tests.unit.scheduler_support import INGRESS, Bench, reserved, submit

BLOCKS, SIZE = 40, 32


class Pool:
    """One decode worker of 40 blocks; a request holds what placement reckons for it, for a random time."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.bench = Bench(max_placing=1, slo_ttft_s={})
        self.running: dict[Attempt, tuple[float, int]] = {}
        self.order: list[str] = []
        self.overtaken: list[int] = []
        self.idle_s = self.busy_s = 0.0

    @property
    def free(self) -> int:
        return BLOCKS - sum(blocks for _, blocks in self.running.values())

    def beat(self) -> None:
        self.bench.beat(
            "d1",
            free_blocks=(self.free,),
            total_blocks=(BLOCKS,),
            max_sequences=0,
            attempts=tuple(AttemptProgress(attempt, 1) for attempt in self.running),
        )
        self.place()

    def place(self) -> None:
        bench = self.bench
        while bench.count(AskMatch) + bench.count(AskReserve):
            if bench.count(AskMatch):
                bench.match()
                continue
            ask: AskReserve = bench.reserve(reserved())
            attempt = ask.message.attempt
            record = bench.table.record(attempt.request_id)
            view = bench.registry.view(ask.worker)
            assert record is not None
            assert view is not None
            (blocks,) = record.ask(0.0, {}).blocks(view)
            assert blocks <= self.free, "placed where there is no room"
            self.running[attempt] = bench.now + self.rng.uniform(0.5, 1.5), blocks
            self.order.append(attempt.request_id)
            self.overtaken.append(record.overtaken)
        bench.effects.clear()

    def step(self) -> None:
        ended = [a for a, (end_s, _) in self.running.items() if end_s <= self.bench.now]
        for attempt in ended:
            del self.running[attempt]
        self.bench.ingresses.heard(INGRESS, self.bench.now)
        self.beat()
        self.bench.tick(0.1)
        self.place()
        self.idle_s += 0.1 * self.free / BLOCKS
        self.busy_s += 0.1 * (BLOCKS - self.free) / BLOCKS


@pytest.mark.parametrize("seed", range(3))
def test_every_size_has_its_turn_and_the_pool_stays_in_use(seed: int) -> None:
    """Three tenants, small and large requests mixed: all are served, none that stood first was passed by more than
    `MOST_OVERTAKEN` others, and while there is a queue at most a third of the blocks is free, on average."""
    pool = Pool(seed)
    pool.beat()
    sizes = {}
    for number in range(150):
        blocks = pool.rng.choice((1, 1, 2, 3, 5, 20, 35))
        sizes[f"r{number}"] = blocks
        answer = pool.bench.submit(
            submit(f"r{number}", blocks * SIZE, max_tokens=1), tenant=pool.rng.choice("abc"), budget_s=1e6
        )
        assert not hasattr(answer, "error")
        pool.place()
    while len(pool.order) < 130:
        pool.step()
    assert pool.idle_s <= (pool.idle_s + pool.busy_s) / 3
    while pool.bench.table.queued + len(pool.running):
        pool.step()
    assert sorted(pool.order) == sorted(sizes)
    assert max(pool.overtaken) <= MOST_OVERTAKEN
    assert max(pool.overtaken) > 0  # some did pass
    assert pool.bench.table.record(RequestId("r0")) is None
