"""The whole of Baton's protocol in one deterministic process: real cores, toy engine, faults from a seed.

Invariants: after every event of a worker, blocks are conserved there; on every commit, the committed sequence is
contiguous, is the truth, and comes from no fenced attempt; at the end, every request ended once and was charged once
for what was committed, within bounded time after the faults stopped, and every block is free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from shared.contracts import messages as m
from shared.contracts.attempt import Attempt
from shared.contracts.ids import IngressId, ScopeGeneration, WorkerId
from shared.contracts.parts import Holder
from shared.contracts.tokens import unpack_tokens
from tests.simulation.decode_node import DecodeNode
from tests.simulation.ingress_node import Client, IngressNode, Ledger
from tests.simulation.network import NO_FAULTS, Faults, Network, Node, Violation
from tests.simulation.prefill_node import PrefillNode
from tests.simulation.scheduler_node import LeaseStore, SchedulerNode
from tests.simulation.toy_model import BLOCKS, TOO_LONG, Job, Memory, make_jobs, tags_of

SETTLE_S = 60.0
"""After the faults stopped, every request ends within this time. The longest honest chain is a worker's lease, a new
epoch, its queueing and its run."""
STRAY_S = 14.0
"""An attempt nobody reads is gone from a worker that was well for so long: an ingress's lease and two beats."""
IDLE_S = 30.0
"""And every block is free after this much more: reservations nobody reads end with their ingress's lease."""
BUDGET_S = 120.0


class World:
    """Two schedulers, two ingresses, some workers, and clients; all chance comes from `seed`."""

    def __init__(
        self,
        seed: int,
        faults: Faults | None = None,
        *,
        requests: int = 120,
        decodes: int = 3,
        prefills: int = 2,
        decode_tokens: int = 1536,  # of a decode worker's pool
        prefill_tokens: int = 768,
        same_names: bool = False,
    ) -> None:
        self.faults = faults or Faults()
        self.net = Network(seed, self.faults)
        self.lease = LeaseStore()
        self.ledger = Ledger()
        self.memories: dict[str, Memory] = {}
        self.clients: list[Client] = []
        self.paths: Counter[str] = Counter()
        self.handoffs: Counter[str] = Counter()
        self.bad_digests = 0
        self.takers: dict[Attempt, DecodeNode] = {}
        self._strays: dict[tuple[WorkerId, Attempt], float] = {}
        self.late_commits = 0  # named by a prefill worker when nobody wanted them any more
        self.index = Node("index")
        self.decodes: dict[WorkerId, DecodeNode] = {}
        self.prefills: dict[WorkerId, PrefillNode] = {}
        self.schedulers: list[SchedulerNode] = []
        self.ingresses: dict[IngressId, IngressNode] = {}
        self._tokens = {"decode": decode_tokens, "prefill": prefill_tokens}
        self._same_names = same_names
        self._starts = 0
        for i in range(2):
            self.ingresses[IngressId(f"gateway-{i}")] = IngressNode(self, f"gateway-{i}")
            self.schedulers.append(SchedulerNode(self, f"scheduler-{i}"))
        for i in range(decodes):
            self.start_worker("decode", f"decode-{i}")
        for i in range(prefills):
            self.start_worker("prefill", f"prefill-{i}")
        net, rng = self.net, self.net.rng
        for job in make_jobs(rng, requests, self.faults.until_s, BUDGET_S):
            ingress = rng.choice(list(self.ingresses.values()))
            # not before the first leader has been elected and has gathered
            net.at(6.0 + job.arrival_s, lambda i=ingress, j=job: i.arrive(j), ingress)  # type: ignore[misc]
        for _ in range(self.faults.kills):
            net.at(rng.uniform(8.0, self.faults.until_s), self._kill_someone)
        if self.faults.kills:
            net.at(rng.uniform(12.0, self.faults.until_s), self._kill_leader)
        for _ in range(self.faults.ingress_kills):
            net.at(rng.uniform(12.0, self.faults.until_s), self._kill_ingress)
        for _ in range(self.faults.pauses):
            net.at(rng.uniform(8.0, self.faults.until_s), self._pause_someone)
        for _ in range(self.faults.leader_pauses):
            net.at(rng.uniform(12.0, self.faults.until_s), self._pause_leader)
        net.at(1.0, self._look_for_strays)
        for _ in range(self.faults.cuts):
            net.at(rng.uniform(8.0, self.faults.until_s), self._cut_someone)

    # ------------------------------------------------------------------------------------------ wires

    def leader(self) -> SchedulerNode | None:
        """Who serves submits: perhaps two for a moment, and then either may answer."""
        serving = [s for s in self.schedulers if s.alive and s.table is not None]
        return self.net.rng.choice(serving) if serving else None

    def match(self, message: m.Match) -> m.Matched:
        """The index, which now and then is behind: then it says what was never, or is no longer, there."""
        tokens = unpack_tokens(message.token_ids)
        tags = tags_of(tokens)
        holders = []
        workers: list[DecodeNode | PrefillNode] = [*self.decodes.values(), *self.prefills.values()]
        for node in workers:
            blocks = node.pool.held(tags, tokens)
            if self.net.chance(self.faults.index_faults):
                self.net.counts["match wrong"] += 1
                blocks = tuple(self.net.rng.randint(0, len(tokens) // size) for size in BLOCKS)
            if any(blocks):
                holders.append(Holder(node.worker, blocks))
        return m.Matched(scope_generation=ScopeGeneration(1), tags=tags, holders=tuple(holders))

    def to_prefill(self, worker: WorkerId, action: Callable[[PrefillNode], None]) -> None:
        node = self.prefills.get(worker)
        if node is not None:
            self.net.send(node, lambda: action(node))

    def worker_beat(self, beat: m.WorkerBeat) -> None:
        for scheduler in self.schedulers:
            self.net.send(scheduler, lambda s=scheduler: s.worker_beat(beat))  # type: ignore[misc]
        if beat.role == "prefill":
            for decode in self.decodes.values():
                self.net.send(decode, lambda n=decode: n.prefill_beat(beat))  # type: ignore[misc]
        else:
            for prefill in self.prefills.values():
                self.net.send(prefill, lambda n=prefill: n.decode_beat(beat))  # type: ignore[misc]

    # ------------------------------------------------------------------------------------------ chaos

    def start_worker(self, role: str, name: str) -> None:
        self._starts += 1
        if role == "decode":
            self.decodes[WorkerId(name)] = DecodeNode(self, name, self._starts, self._tokens[role])
        else:
            self.prefills[WorkerId(name)] = PrefillNode(self, name, self._starts, self._tokens[role])

    def kill(self, node: Node) -> None:
        """kill -9: peers see it at once by the pool file's lock, or only by leases; a new process comes later."""
        net = self.net
        net.kill(node)
        back_s = net.now + net.rng.uniform(0.5, 15.0)
        if isinstance(node, SchedulerNode):
            self.schedulers.remove(node)
            net.at(back_s, lambda: self.schedulers.append(SchedulerNode(self, f"{node.name}x")))
        elif node is self.index:
            net.at(back_s, self._start_index)
        elif isinstance(node, (DecodeNode, PrefillNode)):
            role = "decode" if isinstance(node, DecodeNode) else "prefill"
            name = node.name if self._same_names else f"{node.name}x"
            net.at(back_s, lambda: self.start_worker(role, name))
            if isinstance(node, PrefillNode) and net.rng.random() < 0.5:
                del self.memories[node.file]
            if net.rng.random() < 0.5:
                peers = self.prefills.values() if role == "decode" else self.decodes.values()
                for peer in list(peers):
                    net.at(net.now + 0.05, lambda p=peer: p.peer_died(node.worker), peer)  # type: ignore[misc]

    def _start_index(self) -> None:
        self.index = Node("index")

    def _victims(self) -> list[Node]:
        workers = [*self.decodes.values(), *self.decodes.values(), *self.prefills.values()]
        nodes: list[Node] = [*workers, *self.schedulers, self.index]
        return [n for n in nodes if n.alive and not n.paused and not n.cut]

    def _kill_someone(self) -> None:
        victims = self._victims()
        if victims:
            self.kill(self.net.rng.choice(victims))

    def _kill_ingress(self) -> None:
        live = [i for i in self.ingresses.values() if i.alive]
        if len(live) > 1:
            self.kill(self.net.rng.choice(live))

    def _kill_leader(self) -> None:
        leader = next((s for s in self.schedulers if s.alive and s.table is not None), None)
        if leader is not None:
            self.kill(leader)

    def _pause_someone(self) -> None:
        victims = [*self._victims(), *(i for i in self.ingresses.values() if i.alive and not i.paused)]
        self.net.pause(self.net.rng.choice(victims), self.net.rng.choice((0.5, 3.0, 9.0, 14.0, 25.0)))

    def _pause_leader(self) -> None:
        leader = next((s for s in self.schedulers if s.alive and not s.paused and s.table is not None), None)
        if leader is not None:
            self.net.pause(leader, self.net.rng.uniform(4.5, 14.0))

    def _cut_someone(self) -> None:
        victims = [*self._victims(), *(i for i in self.ingresses.values() if i.alive and not i.cut)]
        self.net.cut(self.net.rng.choice(victims), self.net.rng.choice((2.0, 6.0, 12.0, 25.0)))

    # ------------------------------------------------------------------------------------------ judgement

    def _look_for_strays(self) -> None:
        """Work that nobody reads must end at every worker that is well: its ingress is gone, it is over or fenced."""
        now, clients = self.net.now, {client.job.name: client for client in self.clients}
        seen: dict[tuple[WorkerId, Attempt], float] = {}
        for node in self.decodes.values():
            for sequence in node.live.values() if node.alive and not node.paused and not node.cut else ():
                client = clients[sequence.attempt.request_id]
                wanted = client.node.alive and client.stream.end is None
                if wanted and not client.stream.attempt.fences(sequence.attempt):
                    continue
                key = node.worker, sequence.attempt
                seen[key] = since_s = max(self._strays.get(key, now), node.healthy_s, client.node.healthy_s)
                if client.node.paused or client.node.cut or self._unled():
                    seen[key] = now
                elif now - since_s > STRAY_S:
                    raise Violation(
                        f"{node.name} still runs {sequence.attempt}, which nobody reads since {since_s:.1f}"
                    )
        self._strays = seen
        self.net.counts["stray seen"] += len(seen)
        self.net.at(now + 1.0, self._look_for_strays)

    def _unled(self) -> bool:
        return not any(s.alive and s.table is not None and not s.paused and not s.cut for s in self.schedulers)

    def run(self) -> World:
        """Run to the end and check everything. Raises Violation, or whatever a core raises."""
        calm_s = self.faults.until_s + 6.0

        def over() -> bool:
            # what a paused ingress was sent meanwhile arrives when it goes on
            frozen = any(i.paused for i in self.ingresses.values() if i.alive)
            return self.net.now >= calm_s and not frozen and not self._open()

        if not self.net.run(over, calm_s + SETTLE_S):
            left = [(c.job.name, c.stream.attempt, c.stream.worker) for c in self._open()]
            raise Violation(f"{len(left)} requests did not end: {left[:3]}")
        if not self.net.run(self._idle, max(self.net.now, calm_s) + IDLE_S):
            raise Violation(f"not idle at the end: {self._held()}")
        if self.faults is NO_FAULTS and (self.bad_digests or {*self.handoffs} - {"done"}):
            raise Violation(f"hand-offs failed without a fault: {dict(self.handoffs)}")
        for client in self.clients:
            if client.node.alive:
                self._judge(client)
                calm = self.faults is NO_FAULTS and len(client.job.prompt) != TOO_LONG
                if calm and (client.ends[0].finish == "error" or client.stream.lost):
                    raise Violation(f"{client.job.name}: {client.ends[0]} after {client.stream.lost} losses, no fault")
        return self

    def _open(self) -> list[Client]:
        """Requests that have not ended, of ingresses that are there to say so."""
        return [c for c in self.clients if c.node.alive and not c.stream.settled]

    def _held(self) -> dict[str, object]:
        held: dict[str, object] = {}
        workers: list[DecodeNode | PrefillNode] = [*self.decodes.values(), *self.prefills.values()]
        for node in workers:
            if node.alive and (len(node.table) or not node.pool.idle):
                held[node.name] = (len(node.table), node.pool.blocks.counts)
        for decode in self.decodes.values():
            # finals for an ingress that is gone are given up much later
            if decode.alive and len(decode.outbox) and not self.faults.ingress_kills:
                held[f"{decode.name} outbox"] = len(decode.outbox)
        for scheduler in self.schedulers:
            if not scheduler.alive or (table := scheduler.table) is None:
                continue
            if records := table._book.records:
                held[scheduler.name] = [record.state.value for record in records.values()]
            if table.unseen_events and not self.faults.ingress_kills:
                held[f"{scheduler.name} events"] = table.unseen_events
        return held

    def _idle(self) -> bool:
        return not self._held()

    def _judge(self, client: Client) -> None:
        job, stream = client.job, client.stream
        if len(client.ends) != 1 or len(client.settles) != 1:
            raise Violation(f"{job.name}: {len(client.ends)} ends and {len(client.settles)} settlements")
        (end,), (settle,) = client.ends, client.settles
        committed = [stream.committed(choice) for choice in range(len(job.truths))]
        request_id = settle.attempt.request_id
        charged, charges = self.ledger.charged[request_id], self.ledger.charges[request_id]
        if charges != 1 or charged != settle.prompt_tokens + settle.completion_tokens:
            raise Violation(f"{job.name}: {charges} charges, of {charged} tokens in all")
        counts = [len(tokens) for tokens in committed]
        if not settle.completion_tokens == sum(counts) == sum(len(tokens) for tokens in client.delivered):
            raise Violation(f"{job.name}: settled {settle.completion_tokens} tokens, committed {counts}")
        if any(tuple(tokens) != truth[: len(tokens)] for tokens, truth in zip(committed, job.truths, strict=True)):
            raise Violation(f"{job.name}: the committed tokens are not the truth")
        if len(job.prompt) == TOO_LONG and end.finish not in ("error", "cancelled"):
            raise Violation(f"{job.name}: a prompt no pool can hold ended with {end.finish}")
        wanted = {"stop": job.stop_at, "length": job.max_tokens}.get(end.finish)
        if wanted is not None and counts != [wanted] * len(counts):
            raise Violation(f"{job.name}: ended with {end.finish} after {counts} of {wanted} tokens")

    def arrive(self, job: Job, at_s: float, ingress: str = "gateway-0") -> None:
        """Add a client by hand."""
        node = self.ingresses[IngressId(ingress)]
        self.net.at(at_s, lambda: node.arrive(job), node)

    def count_taken_over(self, node: DecodeNode, attempt: Attempt) -> None:
        """`node` is asked for what may wait at another decode worker that has no blocks for it."""
        for other in self.decodes.values():
            held = other.live.get(attempt.request_id)
            if other is not node and held is not None and held.back_at is not None and attempt.fences(held.attempt):
                self.net.counts["revoked placed elsewhere"] += 1

    @property
    def resumed(self) -> int:
        """Requests that went on at another worker."""
        return sum(client.stream.attempt.epoch > 1 for client in self.clients)

    @property
    def finishes(self) -> Counter[str]:
        return Counter(client.ends[0].finish for client in self.clients if client.ends)


PROFILES = (
    Faults(),
    Faults(drop=0.08, duplicate=0.08, late=0.25, late_s=3.0, kills=0, pauses=0, leader_pauses=0, cuts=0),
    Faults(kills=9, pauses=2),
    Faults(kills=1, pauses=8, cuts=4),
    Faults(drop=0.05, late=0.15, corrupt=0.15, kills=4, pauses=4),
    Faults(kills=3, pauses=3, ingress_kills=1),
)


def simulate(seed: int) -> World:
    """The world of a seed, run to its end. A failure names the seed and how to replay it."""
    try:
        # workers come back under a new name in production; under their old one the incarnation alone must do
        return World(seed, PROFILES[seed % len(PROFILES)], same_names=seed % 2 == 1).run()
    except Exception as exc:
        again = f"BATON_SIM_SEED={seed} python -m pytest tests/simulation/test_protocol.py"
        raise Violation(f"seed {seed}: {type(exc).__name__}: {exc}\nreplay: {again}") from exc
