"""A virtual clock, nodes that can be killed, paused and cut off, and a network that loses, repeats, delays, reorders.

Deterministic: one heap of events, one seeded generator. Messages are the plain structs of the contracts.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shared.contracts.attempt import Attempt
from shared.contracts.ids import RequestId

Action = Callable[[], None]


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Faults:
    """What the network and the machines do to us, until `until_s`."""

    drop: float = 0.03
    duplicate: float = 0.03
    late: float = 0.10  # share of messages delayed by up to `late_s`, which also reorders
    late_s: float = 1.5
    corrupt: float = 0.03  # share of pulls with a flipped byte
    kills: int = 4
    pauses: int = 4
    leader_pauses: int = 1  # the leader, for longer than its lease: it wakes up believing that it leads
    cuts: int = 1  # nodes that run on but hear and reach nobody for a while
    ingress_kills: int = 0
    revoked: float = 0.15  # share of local reservations that lose their blocks before they begin
    index_faults: float = 0.2  # share of matches that say too much or too little
    until_s: float = 60.0


NO_FAULTS = Faults(
    drop=0.0,
    duplicate=0.0,
    late=0.0,
    corrupt=0.0,
    kills=0,
    pauses=0,
    leader_pauses=0,
    cuts=0,
    index_faults=0.0,
    revoked=0.0,
)


@dataclass
class FenceWatch:
    """What a worker may no longer take: judged apart from the worker's own fences."""

    floor: dict[RequestId, tuple[int, int]] = field(default_factory=dict)
    term: int = 0

    def saw(self, term: int) -> None:
        """The worker heard a leader of `term`."""
        self.term = max(self.term, term)

    def took(self, who: str, attempt: Attempt, term: int) -> None:
        """The worker took `attempt`: it must be the newest it saw, of the newest leader."""
        key = (attempt.epoch, attempt.dispatch)
        if key < self.floor.get(attempt.request_id, (0, 0)) or term < self.term:
            raise Violation(f"{who} took {attempt} of term {term} although it is fenced")
        self.floor[attempt.request_id], self.term = key, term

    def ended(self, attempt: Attempt) -> None:
        key = (attempt.epoch, attempt.dispatch + 1)
        self.floor[attempt.request_id] = max(key, self.floor.get(attempt.request_id, key))


@dataclass
class Node:
    """One process. A dead one does nothing any more, a paused one everything later, and one cut off is not heard."""

    name: str
    alive: bool = True
    paused: bool = False
    cut: bool = False
    healthy_s: float = 0.0  # since when it is neither paused nor cut off
    backlog: list[Action] = field(default_factory=list)

    def check(self) -> None:
        """Invariants of this node, after each of its events."""


class Network:
    """The world's clock and wires."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self.faults = faults
        self.events = 0
        self.counts: Counter[str] = Counter()  # what happened how often
        self._running: Node | None = None  # whose event this is: the sender of what is sent
        self._heap: list[tuple[float, int, Node | None, Action]] = []
        self._order = 0

    @property
    def faulty(self) -> bool:
        return self.now < self.faults.until_s

    def at(self, when_s: float, action: Action, node: Node | None = None) -> None:
        """Run `action` at a time, on a node (if it lives, and is not paused, then)."""
        self._order += 1
        heapq.heappush(self._heap, (when_s, self._order, node, action))

    def every(self, node: Node, period_s: float, action: Action) -> None:
        """A timer of a node, with a random phase."""

        def turn() -> None:
            action()
            self.at(self.now + period_s, turn, node)

        self.at(self.now + self.rng.random() * period_s, turn, node)

    def chance(self, probability: float) -> bool:
        return self.faulty and self.rng.random() < probability

    def send(self, node: Node, action: Action) -> None:
        """Deliver a message: not at all, once, or twice, and perhaps late."""
        if node.cut or (self._running is not None and self._running.cut):
            self.counts["message cut off"] += 1
            return
        if self._fault("message dropped", self.faults.drop):
            return
        for _ in range(2 if self._fault("message duplicated", self.faults.duplicate) else 1):
            delay = self.rng.uniform(0.0005, 0.003)
            if self._fault("message late", self.faults.late):
                delay += self.rng.random() * self.faults.late_s
            self.at(self.now + delay, action, node)

    def _fault(self, name: str, probability: float) -> bool:
        happens = self.chance(probability)
        self.counts[name] += happens
        return happens

    def ask(
        self,
        asker: Node,
        answerer: Node | None,
        answer: Callable[[], Any],
        replied: Callable[[Any], None],
        timeout_s: float,
    ) -> None:
        """A request: `replied` is called once, with the answer or, after `timeout_s` or when nobody listens, None."""
        done = False

        def reply(value: Any) -> None:
            nonlocal done
            if not done:
                done = True
                replied(value)

        def deliver() -> None:
            value = answer()
            self.send(asker, lambda: reply(value))

        if (answerer is None or not answerer.alive) and not asker.cut:
            self.at(self.now + 0.001, lambda: reply(None), asker)
            return
        if answerer is not None:
            self.send(answerer, deliver)
        self.at(self.now + timeout_s, lambda: reply(None), asker)

    def kill(self, node: Node) -> None:
        self.counts[f"{_kind(node)} killed"] += 1
        node.alive = False
        node.backlog.clear()

    def cut(self, node: Node, seconds: float) -> None:
        """The machine's cable is pulled, and put back."""
        self.counts[f"{_kind(node)} cut off"] += 1
        node.cut = True

        def mend() -> None:
            node.cut, node.healthy_s = False, self.now

        self.at(self.now + seconds, mend)

    def pause(self, node: Node, seconds: float) -> None:
        self.counts[f"{_kind(node)} paused"] += 1
        node.paused = True
        self.at(self.now + seconds, lambda: self._resume(node))

    def _resume(self, node: Node) -> None:
        node.paused, node.healthy_s = False, self.now
        backlog, node.backlog = node.backlog, []
        self.rng.shuffle(backlog)  # which of timers and sockets a process looks at first is nobody's promise
        for action in backlog:
            self.at(self.now, action, node)

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Run events until `until` holds (asked every 64 events). False when `limit_s` came first."""
        while self._heap and self._heap[0][0] <= limit_s:
            when_s, _, node, action = heapq.heappop(self._heap)
            self.now = max(self.now, when_s)
            if node is not None:
                if not node.alive:
                    continue
                if node.paused:
                    node.backlog.append(action)
                    continue
            self.events += 1
            self._running = node
            action()
            if node is not None:
                node.check()
            if self.events % 64 == 0 and until():
                return True
        return until()


def _kind(node: Node) -> str:
    return node.name.partition("-")[0]
