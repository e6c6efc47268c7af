"""An ingress in the simulator: the real stream core of each request, its client, and the ledger behind policy."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from services.policy import ledger
from shared.contracts import messages as m
from shared.contracts.errors import Unavailable, from_wire
from shared.contracts.grants import SignedGrant
from shared.contracts.ids import IngressId, RequestId, WorkerId
from shared.contracts.parts import StreamRecord
from shared.contracts.sampling import SamplingParams
from shared.contracts.tokens import pack_tokens
from shared.text import stream_effects as fx
from shared.text.stream_commit import StreamCommit
from tests.simulation.network import Node, Violation
from tests.simulation.toy_model import Job

if TYPE_CHECKING:
    from tests.simulation.world import World


SUBMIT_TRIES = 8
"""A submit is idempotent, so the shell asks again for as long as an election may take."""


class Ledger:
    """Policy's rows, by its own rule, and what the tenant's quota was charged for each request."""

    def __init__(self) -> None:
        self.rows: dict[RequestId, ledger.LedgerRow] = {}
        self.charged: Counter[RequestId] = Counter()
        self.charges: Counter[RequestId] = Counter()

    def settle(self, settle: m.Settle) -> None:
        request_id = settle.attempt.request_id
        self.rows[request_id], booked = ledger.apply(self.rows.get(request_id), settle)
        self.charged[request_id] += booked.token_change
        self.charges[request_id] += booked.replaced


@dataclass
class Client:
    """One request: its stream core and what the client has seen."""

    job: Job
    node: Node
    stream: StreamCommit
    delivered: list[list[int]]  # per choice
    ends: list[fx.End] = field(default_factory=list)
    settles: list[fx.SettleRequest] = field(default_factory=list)
    submits: int = 0


class IngressNode(Node):
    """Drives many `StreamCommit`s. Judges a worker's silence by whatever last came from it."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(name)
        self.world = world
        self.net = world.net
        self.clients: dict[RequestId, Client] = {}
        self.seen: dict[WorkerId, float] = {}
        self.number = 0
        self.net.every(self, 1.0, self._beat)
        self.net.every(self, 0.25, self._tick)

    def arrive(self, job: Job) -> None:
        request_id = RequestId(job.name)

        def find_stop(choice: int, first_seq: int, new: Any) -> int | None:
            return job.stop_at if job.stop_at and first_seq < job.stop_at <= first_seq + len(new) else None

        stream = StreamCommit(
            request_id,
            job.prompt,
            num_choices=len(job.truths),
            arrived=self.net.now,
            budget_s=job.budget_s,
            find_stop=find_stop,
        )
        client = self.clients[request_id] = Client(job, self, stream, [[] for _ in job.truths])
        self.world.clients.append(client)
        self._do(client, stream.start(self.net.now))
        if job.cancel_s:
            self.net.at(
                self.net.now + job.cancel_s,
                lambda: self._do(client, stream.on_client_gone("disconnect", self.net.now)),
                self,
            )

    # ------------------------------------------------------------------------------------------ news

    def frame(self, frame: m.StreamFrame) -> None:
        self.seen[frame.worker] = self.net.now
        for record in frame.records:
            client = self.clients.get(record.attempt.request_id)
            if client is not None:
                self._record(client, frame.worker, record)
        if frame.listing:
            held = {h.attempt.request_id: h for h in frame.held}
            for request_id, client in self.clients.items():
                if request_id in held or client.stream.worker == frame.worker:
                    self._do(client, client.stream.on_listing(frame.worker, held.get(request_id), self.net.now))

    def _record(self, client: Client, worker: WorkerId, record: StreamRecord) -> None:
        current, before = client.stream.attempt, client.stream.num_committed
        effects = client.stream.on_record(worker, record, self.net.now)
        if current.fences(record.attempt) and client.stream.num_committed > before:
            raise Violation(f"tokens of {record.attempt} were committed although {current} fences it")
        self._do(client, effects)

    def event(self, event: m.Placed | m.PlacementRefused | m.WorkerLost) -> m.EventsSeen:
        now = self.net.now
        why = event.error.code if isinstance(event, m.PlacementRefused) else event.reason
        self.net.counts[f"event {type(event).__name__} {why}"] += 1
        if isinstance(event, m.WorkerLost):
            for client in list(self.clients.values()):
                self._do(client, client.stream.on_worker_lost(event.worker, now))
        elif (own := self.clients.get(event.attempt.request_id)) is not None:
            if isinstance(event, m.Placed):
                self.world.paths[event.path] += 1
                self._do(own, own.stream.on_placed(event, now))
            else:
                self._do(own, own.stream.on_placement_refused(event.attempt, event.error, now))
        return m.EventsSeen(number=event.number)

    def scheduler_beat(self, beat: m.SchedulerBeat) -> None:
        for client in list(self.clients.values()):
            self._do(client, client.stream.on_scheduler_term(beat.term, self.net.now))

    def _tick(self) -> None:
        for client in list(self.clients.values()):
            seen = self.seen.get(client.stream.worker)
            self._do(client, client.stream.on_tick(self.net.now, seen))

    def _beat(self) -> None:
        self.number += 1
        live = tuple(r for r, c in self.clients.items() if not c.stream.settled)
        beat = m.GatewayBeat(ingress_id=IngressId(self.name), number=self.number, requests=live)
        for node in (*self.world.schedulers, *self.world.decodes.values()):
            self.net.send(node, lambda node=node: node.gateway_beat(beat))  # type: ignore[misc]

    # ------------------------------------------------------------------------------------------ effects

    def _do(self, client: Client, effects: list[fx.Effect]) -> None:
        for effect in effects:
            self._do_one(client, effect)

    def _do_one(self, client: Client, effect: fx.Effect) -> None:
        stream, net = client.stream, self.net
        if isinstance(effect, fx.Commit):
            delivered = client.delivered[effect.choice]
            if effect.first_seq != len(delivered):
                raise Violation(f"{client.job.name}: token {effect.first_seq} follows {len(delivered)} tokens")
            delivered += effect.token_ids
            if tuple(delivered) != client.job.truths[effect.choice][: len(delivered)]:
                raise Violation(f"{client.job.name}: the committed tokens are not the truth")
        elif isinstance(effect, fx.End):
            client.ends.append(effect)
            if effect.finish in ("cancelled", "error"):
                attempt = stream.attempt
                for node in self.world.schedulers:
                    net.send(node, lambda node=node: node.withdraw(attempt))  # type: ignore[misc]
        elif isinstance(effect, fx.SettleRequest):
            client.settles.append(effect)
            for _ in range(2 if net.chance(0.2) else 1):  # JetStream may deliver again
                self.world.ledger.settle(_settlement(effect))
        elif isinstance(effect, fx.SubmitAttempt):
            self._submit(client, effect, SUBMIT_TRIES)
        elif isinstance(effect, fx.AckFinal):
            node = self.world.decodes.get(effect.worker)
            net.ask(self, node, lambda: node and node.ack([effect.attempt]), lambda _: None, 1.0)
        elif isinstance(effect, fx.AskReplay):
            self._ask_replay(client, effect)
        elif isinstance(effect, fx.SendFinish):
            node = self.world.decodes.get(effect.worker)

            def finished(reply: m.Finished | None) -> None:
                totals = reply.totals if reply is not None else None
                self._do(client, stream.on_finish_reply(effect.choice, totals, net.now))

            net.ask(
                self,
                node,
                lambda: node and node.finish(effect.attempt, effect.choice, effect.num_tokens),
                finished,
                1.0,
            )
        elif isinstance(effect, fx.SendCancel):
            self._send_cancel(client, effect)

    def _ask_replay(self, client: Client, effect: fx.AskReplay) -> None:
        node = self.world.decodes.get(effect.worker)

        def replayed(reply: m.StreamReplayed | None) -> None:
            if reply is None:
                return
            self.seen[effect.worker] = self.net.now
            current, before = client.stream.attempt, client.stream.num_committed
            effects = client.stream.on_replayed(
                effect.attempt, effect.worker, effect.choice, reply.held, reply.records, self.net.now
            )
            if current.fences(effect.attempt) and client.stream.num_committed > before:
                raise Violation(f"a replay of {effect.attempt} was committed although {current} fences it")
            self._do(client, effects)

        self.net.ask(
            self, node, lambda: node and node.replay(effect.attempt, effect.choice, effect.from_seq), replayed, 1.0
        )

    def _send_cancel(self, client: Client, effect: fx.SendCancel) -> None:
        if effect.role == "prefill":
            source = self.world.prefills.get(effect.worker)
            self.net.ask(self, source, lambda: source and source.cancel(effect.attempt), lambda _: None, 1.0)
            return
        node = self.world.decodes.get(effect.worker)

        def cancelled(reply: m.Cancelled | None) -> None:
            totals = reply.totals if reply is not None else None
            self._do(client, client.stream.on_cancel_reply(effect.attempt, effect.worker, totals, self.net.now))

        self.net.ask(self, node, lambda: node and node.cancel(effect.attempt), cancelled, 1.0)

    def _submit(self, client: Client, effect: fx.SubmitAttempt, tries: int) -> None:
        job, stream = client.job, client.stream
        client.submits += 1
        message = m.Submit(
            attempt=effect.attempt,
            ingress_id=IngressId(self.name),
            grant=SignedGrant(job.name.encode(), b""),
            token_ids=pack_tokens(effect.token_ids),
            num_prompt_tokens=effect.num_prompt_tokens,
            sampling=tuple(SamplingParams(max_tokens=len(truth)) for truth in job.truths),
            age_s=effect.age_s,
            numerics=effect.numerics,
        )
        leader = self.world.leader()

        def replied(reply: m.Queued | m.Refusal | None) -> None:
            now = self.net.now
            if stream.end is not None or stream.attempt.epoch != effect.attempt.epoch:
                return
            if isinstance(reply, m.Queued):
                self._do(client, stream.on_queued(reply.term, now))
            elif isinstance(reply, m.Refusal) and not (tries > 1 and from_wire(reply.error).status == 503):
                self._do(client, stream.on_submit_failed(from_wire(reply.error), now))
            elif tries > 1:
                self.net.at(now + 1.0, lambda: self._submit(client, effect, tries - 1), self)
            else:
                self._do(client, stream.on_submit_failed(Unavailable("submit"), now))

        self.net.ask(self, leader, lambda: leader and leader.submit(message, job), replied, 1.0)


def _settlement(effect: fx.SettleRequest) -> m.Settle:
    return m.Settle(
        attempt=effect.attempt,
        grant=SignedGrant(b"", b""),
        prompt_tokens=effect.prompt_tokens,
        completion_tokens=effect.completion_tokens,
        cached_tokens=effect.cached_tokens,
        finish=effect.finish,
        compute=effect.compute,
    )
