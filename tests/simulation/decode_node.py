"""A decode worker in the simulator: real lease table, stream outbox, sinks and block pool around a toy engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.decode.pace import Pace
from services.decode.reservation import Drop, GoLocal, Kind, ReservationTable
from services.decode.stream_outbox import StreamOutbox
from shared.contracts import messages as m
from shared.contracts.attempt import Attempt
from shared.contracts.errors import Conflict, ContextExceeded, Overloaded, to_wire
from shared.contracts.ids import Incarnation, IngressId, RequestId, WorkerId
from shared.contracts.parts import AttemptProgress, StepModel, Totals
from shared.contracts.tokens import completion_checksum, unpack_tokens
from shared.kv.digest import span_digest
from shared.kv.handoff import Closed, Pull, Received, SendAck, SendRelease, Sink, SinkEffect, TurnLocal
from tests.simulation.network import Action, FenceWatch, Node, Violation
from tests.simulation.toy_model import BLOCKS, SLOT_BYTES, next_token
from tests.simulation.toy_pool import Tables, ToyPool

if TYPE_CHECKING:
    from tests.simulation.world import World

STEP_S = 0.02
INTERVALS_S = (0.0, 0.05, 0.2)
"""How long a worker gathers tokens: none waits, or those of three or ten steps go out together."""
TOKEN_BUDGET = 48
MODEL = StepModel(base_s=0.015, token_s=0.0004, sequence_s=0.0001)


@dataclass(eq=False)
class Lane:
    """One choice: its tokens and its blocks. The first one's prompt may come by hand-off, the others compute it."""

    tokens: list[int]
    num_prompt: int
    tables: Tables
    computed: int
    done: bool = False

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]


@dataclass(eq=False)
class Sequence:
    attempt: Attempt
    ingress: IngressId
    max_tokens: int
    lanes: list[Lane]
    lease_token: bytes
    sink: Sink | None = None
    back_at: float | None = None  # its blocks were taken before it began; it gets others from then on

    @property
    def waiting(self) -> bool:
        return self.sink is not None and self.sink.state == "waiting"


class DecodeNode(Node):
    def __init__(self, world: World, name: str, incarnation: int, num_tokens: int) -> None:
        super().__init__(name)
        self.world, self.net = world, world.net
        self.worker, self.incarnation = WorkerId(name), Incarnation(incarnation)
        self.pool = ToyPool(num_tokens)
        self.table = ReservationTable()
        self.outbox = StreamOutbox(self.worker, self.incarnation)
        self.pace = Pace(INTERVALS_S[incarnation % len(INTERVALS_S)])
        self.told: list[tuple[Sequence, int, int]] = []  # a choice's token, not in the outbox yet
        self.live: dict[RequestId, Sequence] = {}
        self.closing: list[Sequence] = []
        self.number = 0
        self.steps = 0
        self.stepping = False
        self.watch = FenceWatch()
        self.net.every(self, 0.2, self._tick)
        self.net.every(self, 1.0, self._beat)

    def check(self) -> None:
        """Blocks are conserved, and every reservation has its sequence."""
        self.pool.check(lane.tables for s in (*self.live.values(), *self.closing) for lane in s.lanes)
        if len(self.table) != len(self.live):
            raise Violation(f"{self.name}: {len(self.table)} reservations and {len(self.live)} sequences")

    # ------------------------------------------------------------------------------------------ requests

    def reserve(self, message: m.Reserve) -> m.Reserved | m.Refusal:
        attempt, tokens, now = message.attempt, unpack_tokens(message.token_ids), self.net.now
        source = message.prefill_worker if len(tokens) > 1 else WorkerId("")
        verdict = self.table.reserve(attempt, message.term, message.ingress_id, source, message.lease_s, now)
        if verdict.kind == Kind.REFUSED:
            return m.Refusal(error=to_wire(Conflict(verdict.reason)))
        self.watch.took(self.name, attempt, message.term)
        if self.world.takers.setdefault(attempt, self) is not self:
            raise Violation(f"{attempt} was given to {self.world.takers[attempt].name} and to {self.name}")
        if verdict.kind == Kind.RESTAMPED:
            return self._restamp(message, tokens, source)
        if verdict.kind == Kind.NEW:
            self.world.count_taken_over(self, attempt)
            num_prompt, choices = message.num_prompt_tokens, len(message.sampling)
            need = num_prompt + message.sampling[0].max_tokens
            taken = self.pool.take(message.tags, tokens, need, len(tokens) - 1, choices)
            if taken is None:
                self.table.withdraw(attempt)
                never = self.pool.never(need, choices)
                error = ContextExceeded("larger than the pool") if never else Overloaded("no blocks now")
                return m.Refusal(error=to_wire(error), never=never)
            tables, hit = taken
            sequence = Sequence(
                attempt=attempt,
                ingress=message.ingress_id,
                max_tokens=message.sampling[0].max_tokens,
                lanes=[Lane(list(tokens), num_prompt, table, hit) for table in tables],
                lease_token=self._token(),
            )
            if source and hit < len(tokens) - 1:
                sequence.sink = self._sink(sequence, source, hit)
            else:
                self.table.kv_settled(attempt)
                if self.net.chance(self.net.faults.revoked):
                    self._revoke(sequence)
            self.live[attempt.request_id] = sequence
            self.outbox.open(attempt, message.ingress_id, choices, len(tokens) - num_prompt)
            self._wake()
        return self._reserved(self.live[attempt.request_id], already_running=False)

    def _restamp(self, message: m.Reserve, tokens: list[int], source: WorkerId) -> m.Reserved:
        self._take_news()
        sequence, attempt = self.live[message.attempt.request_id], message.attempt
        was_waiting = sequence.waiting
        if was_waiting and not source:
            assert sequence.sink is not None
            self._run(sequence, sequence.sink.go_local("superseded"))  # under the old attempt: its source hears of it
        sequence.attempt, sequence.ingress = attempt, message.ingress_id
        first_seq = len(tokens) - message.num_prompt_tokens
        (lane, *others) = sequence.lanes
        if len(tokens) > len(lane.tokens) and not others:
            lane.tokens = tokens  # committed elsewhere meanwhile
            self.outbox.open(attempt, message.ingress_id, 1, first_seq)
        else:
            assert self.outbox.restamp(attempt, message.ingress_id, first_seq)
        goes_on = was_waiting and bool(source)
        if goes_on and sequence.sink is not None:
            sequence.lease_token = self._token()
            self._run(sequence, sequence.sink.restamp(attempt, source, sequence.lease_token))
        elif source:
            self.table.kv_settled(attempt)
        self._wake()
        return self._reserved(sequence, already_running=not goes_on)

    def _revoke(self, sequence: Sequence) -> None:
        """Its blocks go to others: it is offered back, and begins by itself when there is room again."""
        self.net.counts["revoked"] += 1
        for lane in sequence.lanes:
            self.pool.give(lane.tables, lane.tokens, lane.computed)
            lane.tables, lane.computed = tuple([] for _ in BLOCKS), 0
        sequence.back_at = self.net.now + self.net.rng.uniform(0.0, 4.0)

    def _returns(self, sequence: Sequence) -> bool:
        """True when it has its blocks, again or still."""
        if sequence.back_at is None:
            return True
        first = sequence.lanes[0]
        need = first.num_prompt + sequence.max_tokens
        taken = None
        if self.net.now >= sequence.back_at:
            taken = self.pool.take((), first.tokens, need, 0, len(sequence.lanes))
        if taken is None:
            return False
        for lane, tables in zip(sequence.lanes, taken[0], strict=True):
            lane.tables = tables
        sequence.back_at = None
        self.net.counts["revoked began by itself"] += 1
        return True

    def cancel(self, attempt: Attempt) -> m.Cancelled:
        ended = self.table.cancel(attempt)
        self.watch.ended(attempt)
        if ended is None:
            return m.Cancelled(held=False)
        sequence = self.live[attempt.request_id]
        self._end(sequence)
        self.outbox.drop_request(attempt.request_id)
        return m.Cancelled(held=True, totals=_totals(sequence.lanes[0]))

    def finish(self, attempt: Attempt, choice: int, num_tokens: int) -> m.Finished:
        self._take_news()
        sequence = self.live.get(attempt.request_id)
        if sequence is not None and sequence.attempt == attempt:
            lane = sequence.lanes[choice]
            del lane.tokens[lane.num_prompt + num_tokens :]
            lane.done = True
            totals = _totals(lane)
        else:  # it ended by itself before the stop was found
            sequence, ended = None, self.outbox.finished(attempt, choice)
            if ended is None:
                return m.Finished(held=False)
            totals = ended
        self.outbox.settle(attempt, choice, "stop", totals)
        if sequence is not None:
            self._end_if_done(sequence)
        return m.Finished(held=True, totals=totals)

    def replay(self, attempt: Attempt, choice: int, from_seq: int) -> m.StreamReplayed:
        return self.outbox.replay(attempt, choice, from_seq)

    def ack(self, attempts: list[Attempt]) -> m.FinalAcked:
        self.outbox.acked(attempts)
        return m.FinalAcked()

    # ------------------------------------------------------------------------------------------ news

    def gateway_beat(self, beat: m.GatewayBeat) -> None:
        self._leases(self.table.ingress_beat(beat.ingress_id, beat.number, beat.requests, self.net.now))

    def prefill_beat(self, beat: m.WorkerBeat) -> None:
        progress = {a.attempt: a.progress for a in beat.attempts}
        self._leases(self.table.source_beat(beat.worker, beat.incarnation, progress, self.net.now))
        for listed in beat.attempts:
            sequence = self.live.get(listed.attempt.request_id)
            if sequence is not None and sequence.sink is not None and sequence.attempt == listed.attempt:
                self._run(sequence, sequence.sink.beat(listed.computed_tokens, self.net.now))

    def scheduler_beat(self, beat: m.SchedulerBeat) -> None:
        self.table.fences.see_term(beat.term)
        self.watch.saw(beat.term)

    def peer_died(self, worker: WorkerId) -> None:
        self._leases(self.table.source_died(worker))

    def commit(self, message: m.HandoffCommit) -> None:
        sequence = self.live.get(message.attempt.request_id)
        self.world.late_commits += sequence is None or not sequence.waiting
        if sequence is None or sequence.sink is None:
            release = m.HandoffRelease(attempt=message.attempt, worker=self.worker, reason="not_held")
            self.world.to_prefill(message.source, lambda node: node.release(release))
            return
        self.table.source_progress(message.attempt, message.source_incarnation, self.net.now)
        self._run(sequence, sequence.sink.commit(message))

    # ------------------------------------------------------------------------------------------ hand-off

    def _run(self, sequence: Sequence, effects: list[SinkEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Pull):
                seconds = self.net.rng.uniform(0.002, 0.3 if self.net.rng.random() < 0.15 else 0.03)
                self.net.at(self.net.now + seconds, self._puller(sequence, effect), self)
            elif isinstance(effect, SendAck):
                ack = effect.message
                self.world.to_prefill(effect.source, lambda node, ack=ack: node.ack(ack))  # type: ignore[misc]
            elif isinstance(effect, SendRelease):
                gone = effect.message
                self.world.to_prefill(effect.source, lambda node, gone=gone: node.release(gone))  # type: ignore[misc]
            elif isinstance(effect, Closed):
                self.closing.remove(sequence)
                for lane in sequence.lanes:
                    self.pool.give(lane.tables, lane.tokens, min(lane.computed, len(lane.tokens)))
            elif isinstance(effect, TurnLocal) or (isinstance(effect, Received) and effect.done):
                lane = sequence.lanes[0]
                lane.computed = max(lane.computed, effect.num_tokens)
                self.world.handoffs["done" if isinstance(effect, Received) else effect.reason.split(":")[0]] += 1
                self.table.kv_settled(sequence.attempt)
                self._wake()

    def _puller(self, sequence: Sequence, pull: Pull) -> Action:
        def run() -> None:
            source = self.world.memories.get(pull.pool)
            assert sequence.sink is not None
            if sequence not in self.closing and self.live.get(sequence.attempt.request_id) is not sequence:
                raise Violation(f"{self.name}: a pull writes blocks that {sequence.attempt} no longer holds")
            if source is None:
                self._run(sequence, sequence.sink.pulled(pull.ticket, (), "pool_gone"))
                return
            bad = []
            for item in pull.items:
                span = self.pool.memory.spans[item.group][sequence.lanes[0].tables[item.group][item.position]]
                valid = item.valid_tokens * SLOT_BYTES
                span[:valid] = source.spans[item.group][item.block.block_id][:valid]
                span[valid:] = bytes(len(span) - valid)
                if self.net.chance(self.net.faults.corrupt):
                    self.net.counts["pull corrupted"] += 1
                    span[self.net.rng.randrange(valid)] ^= 0x40
                digest = span_digest(span, pull.attempt, item.group, item.block.generation, item.position)
                if digest != item.block.digest:
                    bad.append((item.group, item.position))
                    self.world.bad_digests += 1
            self._run(sequence, sequence.sink.pulled(pull.ticket, bad))

        return run

    def _leases(self, effects: list[GoLocal | Drop]) -> None:
        for effect in effects:
            sequence = self.live[effect.attempt.request_id]
            if isinstance(effect, GoLocal):
                assert sequence.sink is not None
                self._run(sequence, sequence.sink.go_local(effect.reason))
            else:
                self._end(sequence)
                self.outbox.drop_request(effect.attempt.request_id)

    def _end(self, sequence: Sequence) -> None:
        """Blocks go once no pull writes them."""
        del self.live[sequence.attempt.request_id]
        self.closing.append(sequence)
        self._run(sequence, [Closed(sequence.attempt)] if sequence.sink is None else sequence.sink.close())

    def _sink(self, sequence: Sequence, source: WorkerId, hit: int) -> Sink:
        last = len(sequence.lanes[0].tokens) - 1
        return Sink(self.worker, sequence.attempt, source, sequence.lease_token, "f", BLOCKS, hit, last)

    def _token(self) -> bytes:
        return self.net.rng.randbytes(16)

    def _reserved(self, sequence: Sequence, *, already_running: bool) -> m.Reserved:
        return m.Reserved(
            incarnation=self.incarnation,
            num_cached_tokens=sequence.lanes[0].computed if sequence.sink is None else sequence.sink.contiguous,
            lease_token=sequence.lease_token,
            fingerprint="f",
            already_running=already_running,
        )

    # ------------------------------------------------------------------------------------------ engine and clock

    def _wake(self) -> None:
        if not self.stepping:
            self.stepping = True
            self.net.at(self.net.now + STEP_S, self._step, self)

    def _step(self) -> None:
        self.stepping = False
        self.steps += 1
        budget, first = TOKEN_BUDGET, {id(s) for s in self.live.values() if any(not lane.output for lane in s.lanes)}
        at_once = False
        for sequence in list(self.live.values()):
            idle = sequence.waiting or not self._returns(sequence)
            for choice, lane in enumerate(() if idle else sequence.lanes):
                if not lane.done and len(lane.output) < sequence.max_tokens and budget > 0:
                    budget -= self._compute(sequence, choice, lane, budget)
                if not lane.done and len(lane.output) >= sequence.max_tokens:
                    lane.done = at_once = True
                    self._take_news()
                    self.outbox.finish(sequence.attempt, choice, "length", _totals(lane))
            self._end_if_done(sequence)
        at_once |= any(id(sequence) in first for sequence, _, _ in self.told)
        if self.pace.due(self.net.now) or at_once:
            self._send_news()
        if any(not sequence.waiting for sequence in self.live.values()):
            self._wake()

    def _compute(self, sequence: Sequence, choice: int, lane: Lane, budget: int) -> int:
        end = min(len(lane.tokens), lane.computed + budget)
        total = self.pool.memory.compute(lane.tables, lane.tokens, lane.computed, end)
        num_tokens, lane.computed = end - lane.computed, end
        if end == len(lane.tokens):
            token = next_token(total, choice)
            lane.tokens.append(token)
            self.told.append((sequence, choice, token))
        return num_tokens

    def _take_news(self) -> None:
        told, self.told = self.told, []
        self.net.counts["tokens gathered"] += len(told) > len({(id(sequence), choice) for sequence, choice, _ in told})
        for sequence, choice, token in told:
            self.outbox.tokens(sequence.attempt, choice, [token])

    def _send_news(self) -> None:
        self._take_news()
        if frames := self.outbox.frames(self.net.now):
            self.pace.published(self.net.now)
            self._send_frames(frames)

    def _end_if_done(self, sequence: Sequence) -> None:
        if all(lane.done for lane in sequence.lanes):
            self.table.end(sequence.attempt)
            self._end(sequence)

    def _tick(self) -> None:
        self._leases(self.table.tick(self.net.now))
        self._send_frames(self.outbox.resends(self.net.now))

    def _beat(self) -> None:
        self.number += 1
        self._send_frames(self.outbox.listings())
        attempts = tuple(AttemptProgress(s.attempt, self.number, s.lanes[0].computed) for s in self.live.values())
        self.world.worker_beat(
            m.WorkerBeat(
                worker=self.worker,
                role="decode",
                pool="default",
                incarnation=self.incarnation,
                boot_id="b",
                host="h",
                number=self.number,
                free_blocks=self.pool.available,
                total_blocks=self.pool.num_blocks,
                block_sizes=BLOCKS,
                token_bytes=(SLOT_BYTES,) * len(BLOCKS),
                token_budget=TOKEN_BUDGET,
                running=len(self.live),
                max_sequences=8,
                queue_tokens=sum(
                    max(0, len(lane.tokens) - lane.computed - 1)
                    for s in self.live.values()
                    for lane in s.lanes
                    if not s.waiting
                ),
                attempts=attempts,
                revoked=tuple(s.attempt for s in self.live.values() if s.back_at is not None),
                step_model=MODEL,
                numerics="n",
                fingerprint="f",
            )
        )

    def _send_frames(self, frames: list[tuple[IngressId, m.StreamFrame]]) -> None:
        for ingress, frame in frames:
            node = self.world.ingresses.get(ingress)
            if node is not None:
                self.net.send(node, lambda node=node, frame=frame: node.frame(frame))  # type: ignore[misc]


def _totals(lane: Lane) -> Totals:
    output = lane.output
    return Totals(prompt_tokens=lane.num_prompt, completion_tokens=len(output), checksum=completion_checksum(output))
