"""Clients that obey Retry-After, around a real request table and a worker of some slots. Virtual clock, seeded."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from typing import Any

import msgspec

from services.scheduler.effects import AskMatch, AskReserve
from shared.contracts import messages as m
from shared.contracts.attempt import Attempt
from shared.contracts.parts import AttemptOutput, AttemptProgress, StepModel
from shared.contracts.tokens import pack_tokens
from tests.unit.scheduler_support import Bench, reserved, submit

TICK_S = 0.1
FAST = StepModel(base_s=0.0001, token_s=0.00001)


@dataclass
class Client:
    name: str
    tenant: str
    service_s: float
    num_tokens: int
    tries: int = 0
    admitted_s: float = -1.0
    placed_s: float = -1.0


@dataclass
class Clients:
    """`slots` places; each request takes its `service_s`. Whoever is refused comes back when told, `patience` times."""

    slots: int
    seed: int
    patience: int = 20
    limits: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.bench = Bench(**self.limits)
        self.clients: dict[str, Client] = {}
        self.coming: list[tuple[float, int, str]] = []
        self.running: dict[Attempt, tuple[float, str]] = {}
        self.ended: list[AttemptOutput] = []
        self.returns: list[tuple[float, bool]] = []  # when somebody came back as told, and whether it was taken
        self.busy_s = 0.0

    def expect(self, client: Client, at_s: float) -> None:
        self.clients[client.name] = client
        heapq.heappush(self.coming, (at_s, len(self.clients), client.name))

    def run(self, until_s: float) -> None:
        bench, beat_s = self.bench, 0.0
        while bench.now < until_s:
            self._end()
            if bench.now >= beat_s:
                beat_s += 1.0
                self._beat()
            while self.coming and self.coming[0][0] <= bench.now:
                self._arrive(self.clients[heapq.heappop(self.coming)[2]])
            bench.tick(TICK_S)
            self._place()
            self.busy_s += TICK_S * len(self.running)

    def _beat(self) -> None:
        self.bench.beat(
            "d1",
            running=len(self.running),
            max_sequences=self.slots,
            free_blocks=(10_000,),
            total_blocks=(10_000,),
            step_model=FAST,
            attempts=tuple(AttemptProgress(attempt, 1) for attempt in self.running),
            outputs=tuple(self.ended),
        )
        self.ended.clear()
        self._place()

    def _end(self) -> None:
        for attempt in [a for a, (end_s, _) in self.running.items() if end_s <= self.bench.now]:
            del self.running[attempt]
            self.ended.append(AttemptOutput(attempt, 8, ended=True))
            self._beat()

    def _arrive(self, client: Client) -> None:
        message = submit(f"{client.name}-{client.tries}", client.num_tokens)
        # the content is the client's own, the id of each try another
        content = pack_tokens(random.Random(client.name).choices(range(1000), k=client.num_tokens))
        message = msgspec.structs.replace(message, token_ids=content)
        answer = self.bench.submit(message, tenant=client.tenant)
        if client.tries:
            self.returns.append((self.bench.now, isinstance(answer, m.Queued)))
        if isinstance(answer, m.Queued):
            client.admitted_s = self.bench.now
        elif client.tries < self.patience:
            client.tries += 1
            back_s = self.bench.now + answer.error.retry_after_s + self.rng.uniform(0.0, 0.3)
            heapq.heappush(self.coming, (back_s, len(self.clients), client.name))
        self._place()

    def _place(self) -> None:
        bench = self.bench
        while bench.count(AskMatch) + bench.count(AskReserve):
            if bench.count(AskMatch):
                bench.match()
                continue
            attempt = next(e.message.attempt for e in bench.effects if isinstance(e, AskReserve))
            client = self.clients[attempt.request_id.rsplit("-", 1)[0]]
            self.running[attempt] = bench.now + client.service_s, client.name
            client.placed_s = bench.now
            bench.reserve(reserved())
        bench.effects.clear()
