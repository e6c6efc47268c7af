"""The queue: order in a class, order of classes, and the stated bound against starving."""

from __future__ import annotations

import itertools
import random

from services.scheduler.queue import PASSES, FairQueue
from shared.contracts.ids import RequestId


def drain(queue: FairQueue, klass_of: dict[str, str], limit: int = 10_000) -> list[str]:
    order: list[str] = []
    while (head := queue.head()) is not None and len(order) < limit:
        queue.remove(head)
        queue.count_placed(klass_of[head])
        order.append(str(head))
    return order


def test_first_in_first_out_by_arrival_within_a_class() -> None:
    queue = FairQueue()
    for order, (name, arrival) in enumerate([("b", 2.0), ("a", 1.0), ("c", 2.0)]):
        queue.push(RequestId(name), "interactive", arrival, order)
    assert drain(queue, dict.fromkeys("abc", "interactive")) == ["a", "b", "c"]


def test_a_request_put_back_stands_where_it_stood() -> None:
    queue = FairQueue()
    queue.push(RequestId("a"), "batch", 1.0, 0)
    queue.push(RequestId("b"), "batch", 2.0, 1)
    queue.remove(RequestId("a"))
    queue.push(RequestId("a"), "batch", 1.0, 0)
    queue.push(RequestId("a"), "interactive", 0.0, 9)  # queued already: no change
    assert list(queue) == ["a", "b"]


def test_classes_go_in_order_and_unknown_ones_last() -> None:
    queue = FairQueue()
    for order, klass in enumerate(("mystery", "batch", "analysis", "interactive")):
        queue.push(RequestId(klass), klass, 0.0, order)
    assert drain(queue, {k: k for k in ("mystery", "batch", "analysis", "interactive")}) == [
        "interactive",
        "analysis",
        "mystery",
        "batch",
    ]
    assert len(queue) == 0
    assert queue.head() is None


def test_a_lower_class_gets_every_ninth_turn_under_a_flood() -> None:
    queue, klass_of = FairQueue(), {}
    for i in range(40):
        klass_of[f"i{i}"] = "interactive"
        queue.push(RequestId(f"i{i}"), "interactive", 0.0, i)
    klass_of["slow"] = "batch"
    queue.push(RequestId("slow"), "batch", 0.0, 99)
    assert drain(queue, klass_of).index("slow") == PASSES


def test_no_class_waits_longer_than_the_bound() -> None:
    rng = random.Random(5)
    queue, klass_of = FairQueue(), {}
    for i in range(2_000):
        klass = rng.choices(("interactive", "analysis", "batch"), (8, 3, 1))[0]
        klass_of[f"r{i}"] = klass
        queue.push(RequestId(f"r{i}"), klass, float(i), i)
    order = [klass_of[name] for name in drain(queue, klass_of)]
    for klass in ("analysis", "batch"):
        turns = [i for i, k in enumerate(order) if k == klass]
        gaps = [b - a for a, b in itertools.pairwise(turns)]
        assert max([turns[0] + 1, *gaps]) <= PASSES + 2


def test_only_placements_count_as_turns() -> None:
    queue = FairQueue()
    queue.push(RequestId("i"), "interactive", 0.0, 0)
    queue.push(RequestId("b"), "batch", 0.0, 1)
    for _ in range(3 * PASSES):  # the head is tried and put back, again and again
        queue.remove(RequestId("i"))
        queue.push(RequestId("i"), "interactive", 0.0, 0)
    assert queue.head() == "i"
    assert list(queue.ahead("interactive")) == ["i"]
    assert list(queue.ahead("batch")) == ["i", "b"]
    assert not queue.remove(RequestId("nobody"))
