"""Affinity: prefixes keep their homes while that pays, and no home becomes a hotspot. Four simulated workers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest

from services.scheduler.affinity import OVER, SPARE_SHARE, Home, Load, Mean, choose_home
from services.scheduler.handoff_cost import HandoffCost
from services.scheduler.placement import Ask, WorkerView, choose, first_token_s, load_of, local_cost_s, output_s
from shared.contracts.ids import WorkerId
from tests.unit.scheduler_support import view

COST = HandoffCost()
BLOCK, BLOCKS, PLACES, OUTPUT = 32, 2000, 32, 48
NAMES = [WorkerId(f"d{i}") for i in range(4)]


@dataclass
class Worker:
    """Runs what it is given for as long as the estimate says, and keeps every prefix."""

    name: WorkerId
    running: list[tuple[float, int]] = field(default_factory=list)  # (end, blocks)
    held: dict[str, int] = field(default_factory=dict)
    served: int = 0

    def view(self) -> WorkerView:
        return view(
            self.name,
            running=len(self.running),
            free_blocks=(BLOCKS - sum(blocks for _, blocks in self.running),),
            total_blocks=(BLOCKS,),
            max_sequences=PLACES,
        )


def is_over(load: Load, loads: Sequence[Load]) -> bool:
    return Mean.of(loads).is_passed_by(load)


@dataclass
class Pool:
    """Four workers, and what became of the requests."""

    workers: dict[WorkerId, Worker] = field(default_factory=lambda: {name: Worker(name) for name in NAMES})
    hits: int = 0
    placed: Counter[tuple[str, WorkerId]] = field(default_factory=Counter)

    def ask(self, now: float, prefix: str, shared: int, own: int) -> WorkerId:
        """Place one request of `shared` tokens of a prefix and `own` of its own."""
        for worker in self.workers.values():
            worker.running = [(end, blocks) for end, blocks in worker.running if end > now]
        views = [worker.view() for worker in self.workers.values()]
        held = {w.name: w.held[prefix] // BLOCK * BLOCK for w in self.workers.values() if prefix in w.held}
        ask = Ask(num_tokens=shared + own, max_new_tokens=OUTPUT, held=held)
        choice = choose(ask, views, COST)
        assert choice is not None
        worker = self.workers[choice.decode_worker]
        there = next(v for v in views if v.worker == worker.name)
        loads = [load_of(v) for v in views]
        assert not is_over(load_of(there), loads)
        end = now + first_token_s(there, ask) + output_s(there, ask)
        worker.running.append((end, sum(ask.blocks(there))))
        worker.held[prefix] = max(worker.held.get(prefix, 0), shared)
        worker.served += 1
        self.hits += choice.matched_tokens > 0
        self.placed[prefix, worker.name] += 1
        return worker.name


def test_one_hot_prefix_spreads_and_is_computed_once_a_worker() -> None:
    pool, now, rng = Pool(), 0.0, random.Random(1)
    for _ in range(600):
        now += rng.expovariate(12.0)
        pool.ask(now, "hot", 1000, 40)
        counts = [len(worker.running) for worker in pool.workers.values()]
        assert max(counts) <= OVER * sum(counts) / 4 + PLACES * SPARE_SHARE + 1
    assert pool.hits == 600 - 4
    served = [worker.served for worker in pool.workers.values()]
    assert max(served) <= OVER * sum(served) / 4


def test_at_little_load_a_prefix_stays_at_its_home() -> None:
    pool = Pool()
    homes = {pool.ask(10.0 * i, "only", 1000, 40) for i in range(50)}
    assert len(homes) == 1
    assert pool.hits == 49


def test_distinct_prefixes_stick_and_share_the_workers() -> None:
    pool, now, rng = Pool(), 0.0, random.Random(2)
    for _ in range(1200):
        now += rng.expovariate(6.0)
        pool.ask(now, f"conversation {rng.randrange(60)}", 800, 60)
    assert pool.hits >= 0.9 * (1200 - 60)
    served = [worker.served for worker in pool.workers.values()]
    assert max(served) <= 1.5 * sum(served) / 4
    for number in range(60):  # a conversation has a home or two, not four
        assert sum(pool.placed[f"conversation {number}", name] > 2 for name in NAMES) <= 2


def test_a_hot_prefix_among_others_leaves_them_their_homes() -> None:
    pool, now, rng = Pool(), 0.0, random.Random(3)
    for _ in range(1200):
        now += rng.expovariate(8.0)
        hot = rng.random() < 0.5
        pool.ask(now, "hot" if hot else f"conversation {rng.randrange(40)}", 800, 60)
    assert pool.hits >= 0.85 * (1200 - 44)
    served = [worker.served for worker in pool.workers.values()]
    assert max(served) <= 1.4 * sum(served) / 4


def test_a_prefix_that_all_hold_pulls_nowhere() -> None:
    busy, idle = view("a", running=3), view("b", running=1)
    everywhere = Ask(num_tokens=600, max_new_tokens=OUTPUT, held={WorkerId("a"): 576, WorkerId("b"): 576})
    nowhere = replace(everywhere, held={})
    for ask in (everywhere, nowhere):
        choice = choose(ask, [busy, idle], COST)
        assert choice is not None
        assert choice.decode_worker == "b"


@pytest.mark.parametrize("queued", [0, 200, 2000])
def test_a_home_is_left_when_its_queue_costs_more_than_the_prefix_saves(queued: int) -> None:
    home, other = view("a", queue_tokens=queued), view("b")
    ask = Ask(num_tokens=600, held={WorkerId("a"): 576})
    choice = choose(ask, [home, other], COST)
    assert choice is not None
    saved = local_cost_s(other, 600, 0) > local_cost_s(home, 24, 576)
    assert choice.decode_worker == ("a" if saved else "b")
    assert saved == (queued < 600)


def test_who_has_much_more_than_the_mean_gets_nothing_while_others_can() -> None:
    loads = [Load(10, 32, 0.5), Load(2, 32, 0.1), Load(2, 32, 0.1)]
    assert [is_over(load, loads) for load in loads] == [True, False, False]
    assert not is_over(Load(9, 32, 0.1), [Load(9, 32, 0.1), Load(8, 32, 0.1)])
    assert is_over(Load(2, 32, 0.9), [Load(2, 32, 0.9), Load(2, 32, 0.1)])  # few, but they fill it
    assert not is_over(Load(1, 0, 0.0), [Load(1, 0, 0.0), Load(0, 0, 0.0)])  # one is not much more than none
    hot = Home(WorkerId("a"), 0.1, 0.0, 1000, 10, loads[0])
    cold = Home(WorkerId("b"), 3.0, 0.0, 0, 90, loads[1])
    assert choose_home([hot, cold], loads) is cold
    assert choose_home([hot], loads) is hot  # nobody else can
    assert choose_home([hot, cold], []) is hot


def test_the_mean_is_summed_once_for_any_number_of_homes() -> None:
    class Counted(list[Load]):
        looks = 0

        def __iter__(self) -> Iterator[Load]:
            self.looks += 1
            return super().__iter__()

    loads = Counted(Load(2, 32, 0.1) for _ in range(50))
    choose_home([Home(WorkerId(f"w{at}"), 1.0, 0.0, 0, 90, load) for at, load in enumerate(list(loads))], loads)
    assert loads.looks <= 3  # and one of the list above


def test_costs_that_are_alike_are_told_apart_by_load_then_match_then_room() -> None:
    idle = Load(0, 32, 0.0)
    dear = Home(WorkerId("a"), 1.05, 5.0, 0, 90, idle)
    cheap = Home(WorkerId("b"), 1.0, 5.0, 64, 10, Load(1, 32, 0.0))
    assert choose_home([dear, cheap], [idle, cheap.load]) is dear
    # what a long output takes makes a prefix worth no less
    assert choose_home([replace(dear, first_s=1.2), cheap], [idle, cheap.load]) is cheap
    held = replace(cheap, load=idle)
    assert choose_home([dear, held], [idle, idle]) is held
    assert choose_home([dear, replace(held, held=0)], [idle, idle]) is dear
