"""A scheduler in the simulator: the real request table, registries and leadership around a perfect lease store."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from services.scheduler.effects import AskMatch, AskPrefill, AskReserve, CancelAt, Effect, Tell
from services.scheduler.handoff_cost import HandoffCost
from services.scheduler.ingresses import IngressRegistry
from services.scheduler.leader import Change, Leadership
from services.scheduler.request_table import RequestTable
from services.scheduler.worker_registry import WorkerRegistry
from shared.contracts import messages as m
from shared.contracts.attempt import Attempt
from shared.contracts.errors import Unavailable, to_wire
from shared.contracts.grants import Grant, Scope
from shared.contracts.ids import RequestId, TenantId, WorkerId
from tests.simulation.network import Node
from tests.simulation.toy_model import Job

if TYPE_CHECKING:
    from tests.simulation.world import World

COST = HandoffCost(hop_s=0.002)


class LeaseStore:
    """NATS KV as it promises to be."""

    def __init__(self) -> None:
        self.owner, self.term, self.expires_s = "", 0, 0.0

    def acquire(self, now: float, owner: str, ttl_s: float) -> int | None:
        if self.owner != owner and now < self.expires_s:
            return None
        if self.owner != owner or now >= self.expires_s:
            self.term += 1
        self.owner, self.expires_s = owner, now + ttl_s
        return self.term

    def release(self, owner: str) -> None:
        if self.owner == owner:
            self.owner = ""
            self.expires_s = 0.0


class SchedulerNode(Node):
    def __init__(self, world: World, name: str) -> None:
        super().__init__(name)
        self.world, self.net = world, world.net
        self.registry = WorkerRegistry("default")
        self.ingresses = IngressRegistry()
        self.leadership = Leadership(ttl_s=4.0)
        self.table: RequestTable | None = None
        self.net.every(self, self.leadership.renew_every_s, self._renew)
        self.net.every(self, 0.1, self._tick)
        self.net.every(self, 1.0, self._beat)

    def submit(self, message: m.Submit, job: Job) -> m.Queued | m.Refusal:
        if self.table is None:
            return m.Refusal(error=to_wire(Unavailable("not the leader")))
        grant = Grant(
            request_id=RequestId(job.name),
            tenant=TenantId("t"),
            scope=Scope(TenantId("t")),
            model="m",
            klass=job.klass,
            reservation_id="r",
            reserved_tokens=1,
            expires_s=0.0,
            budget_s=job.budget_s,
        )
        answer, effects = self.table.submit(self.net.now, message, grant)
        self._run(effects)
        return answer

    def withdraw(self, attempt: Attempt) -> None:
        if self.table is not None:
            held = self.table.record(attempt.request_id)
            self.net.counts["withdrawn" if held is not None else "withdrawn unknown"] += 1
            self._run(self.table.withdraw(self.net.now, attempt))

    def worker_beat(self, beat: m.WorkerBeat) -> None:
        outcome = self.registry.on_beat(self.net.now, beat)
        if self.table is not None:
            if outcome.replaced is not None:
                self._run(self.table.worker_lost(self.net.now, outcome.replaced))
            if outcome.taken:
                self._run(self.table.worker_beat(self.net.now, beat))

    def gateway_beat(self, beat: m.GatewayBeat) -> None:
        if self.table is None:
            self.ingresses.heard(beat.ingress_id, self.net.now)
        else:
            self._run(self.table.ingress_beat(self.net.now, beat))

    def scheduler_beat(self, beat: m.SchedulerBeat) -> None:
        self._change(self.leadership.seen(beat.term))

    def _renew(self) -> None:
        if self.cut or self.net.chance(self.net.faults.drop):
            return  # NATS did not answer
        term = self.world.lease.acquire(self.net.now, self.name, self.leadership.ttl_s)
        self._change(self.leadership.answered(self.net.now, term))

    def _change(self, changes: list[Change]) -> None:
        for change in changes:
            if change == Change.RELEASE:
                self.world.lease.release(self.name)
                continue
            self.table = None
            if change == Change.STARTED:
                term = self.leadership.term
                assert term is not None
                self.table = RequestTable(
                    term=term,
                    now=self.net.now,
                    registry=self.registry,
                    ingresses=self.ingresses,
                    cost=COST,
                    rng=random.Random(term),
                )
                self._beat()

    def _tick(self) -> None:
        now = self.net.now
        self._change(self.leadership.tick(now))
        for lost in self.registry.expire(now):
            if self.table is not None:
                self._run(self.table.worker_lost(now, lost))
        for view in self.registry.quiet(now):
            self._ask_quiet(view.worker)
        if self.table is not None:
            self.count_states()
            self._run(self.table.tick(now))
        else:
            self.ingresses.expire(now)

    def _ask_quiet(self, worker: WorkerId) -> None:
        """The bus says at once when nobody listens, but not through a cut cable."""
        node = self.world.decodes.get(worker) or self.world.prefills.get(worker)
        assert node is not None
        asked_s = self.net.now
        self.net.counts["quiet worker asked"] += 1

        def nobody_listens() -> None:
            lost = self.registry.nobody_listens(worker, asked_s, self.net.now)
            self.net.counts["worker found gone"] += lost is not None
            if lost is not None and self.table is not None:
                self._run(self.table.worker_lost(self.net.now, lost))

        if not node.alive and not self.cut:
            self.net.at(self.net.now + 0.001, nobody_listens, self)

    def count_states(self) -> None:
        """Ten times a second: in how many states requests are."""
        assert self.table is not None
        for client in self.world.clients:
            record = self.table.record(RequestId(client.job.name))
            if record is not None:
                self.net.counts[f"request {record.state.value}"] += 1

    def _beat(self) -> None:
        if self.table is None:
            return
        beat = m.SchedulerBeat(pool="default", term=self.table.term, scheduler_id=self.name)
        others = (s for s in self.world.schedulers if s is not self)
        workers = (*self.world.decodes.values(), *self.world.prefills.values())
        for node in (*self.world.ingresses.values(), *workers, *others):
            self.net.send(node, lambda node=node: node.scheduler_beat(beat))  # type: ignore[misc]

    def _run(self, effects: list[Effect]) -> None:
        for effect in effects:
            self._run_one(effect)

    def _run_one(self, effect: Effect) -> None:
        table, net = self.table, self.net
        assert table is not None
        net.counts[f"effect {type(effect).__name__}"] += 1

        def still() -> bool:
            return self.table is table

        if isinstance(effect, AskMatch):
            attempt = effect.attempt

            def matched(reply: m.Matched | None) -> None:
                if still():
                    self._run(table.matched(net.now, attempt, reply))

            index = self.world.index
            net.ask(self, index, lambda: self.world.match(effect.message), matched, effect.timeout_s)
        elif isinstance(effect, AskReserve):
            reserve, worker = effect.message, effect.worker
            decode = self.world.decodes.get(worker)

            def reserved(reply: m.Reserved | m.Refusal | None) -> None:
                if still():
                    self._run(table.reserve_replied(net.now, reserve.attempt, worker, reply))

            net.ask(self, decode, lambda: decode and decode.reserve(reserve), reserved, effect.timeout_s)
        elif isinstance(effect, AskPrefill):
            run = effect.message
            prefill = self.world.prefills.get(effect.worker)

            def accepted(reply: m.PrefillAccepted | m.Refusal | None) -> None:
                if still():
                    self._run(table.prefill_replied(net.now, run.attempt, reply))

            net.ask(self, prefill, lambda: prefill and prefill.run(run), accepted, effect.timeout_s)
        elif isinstance(effect, Tell):
            ingress, event = self.world.ingresses.get(effect.ingress), effect.event

            def seen(reply: m.EventsSeen | None) -> None:
                if still() and reply is not None:
                    self._run(table.events_seen(net.now, effect.ingress, reply.number))

            net.ask(self, ingress, lambda: ingress and ingress.event(event), seen, 1.0)
        elif isinstance(effect, CancelAt):
            message = effect.message
            nodes = self.world.decodes if effect.role == "decode" else self.world.prefills
            node = nodes.get(effect.worker)
            if node is not None:
                net.send(node, lambda: _ignored(node.cancel(message.attempt)))


def _ignored(_: object) -> None:
    """Nobody waits for the answer to a scheduler's cancel."""
