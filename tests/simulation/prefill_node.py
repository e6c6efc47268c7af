"""A prefill worker in the simulator: the real table of hand-off sources and block pool around a toy engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.prefill.source_table import SourceTable
from shared.contracts import messages as m
from shared.contracts.attempt import Attempt
from shared.contracts.errors import Conflict, Overloaded, to_wire
from shared.contracts.ids import Incarnation, WorkerId
from shared.contracts.parts import AttemptProgress, BlockRef, StepModel
from shared.contracts.tokens import unpack_tokens
from shared.kv.digest import span_digest
from shared.kv.handoff import Free, SendCommit, Source, SourceEffect, SourceIdentity
from tests.simulation.network import FenceWatch, Node, Violation
from tests.simulation.toy_model import BLOCKS, SLOT_BYTES
from tests.simulation.toy_pool import Tables, ToyPool

if TYPE_CHECKING:
    from tests.simulation.world import World

STEP_S = 0.02
TOKEN_BUDGET = 128
MODEL = StepModel(base_s=0.015, token_s=0.0001, sequence_s=0.0001)


@dataclass(eq=False)
class Work:
    source: Source
    tokens: list[int]
    tables: Tables
    computed: int = 0


class PrefillNode(Node):
    def __init__(self, world: World, name: str, incarnation: int, num_tokens: int) -> None:
        super().__init__(name)
        self.world, self.net = world, world.net
        self.worker = WorkerId(name)
        self.pool = ToyPool(num_tokens)
        self.table = SourceTable()
        self.file = f"{name}-{incarnation}"
        self.identity = SourceIdentity(self.worker, Incarnation(incarnation), "f", self.file, BLOCKS)
        self.work: dict[Attempt, Work] = {}
        self.number = 0
        self.steps = 0
        self.stepping = False
        self.watch = FenceWatch()
        world.memories[self.file] = self.pool.memory
        self.net.every(self, 0.25, self._tick)
        self.net.every(self, 1.0, self._beat)

    def check(self) -> None:
        """Blocks are conserved, and every live source holds what it has named."""
        self.pool.check(work.tables for work in self.work.values())
        if {*self.table.attempts} != {*self.work}:
            raise Violation(f"{self.name}: sources and work differ")

    def run(self, message: m.PrefillRun) -> m.PrefillAccepted | m.Refusal:
        attempt = message.attempt
        accepted = m.PrefillAccepted(incarnation=self.identity.incarnation, fingerprint="f")
        if attempt in self.work:
            return accepted
        refused = self.table.refuses(attempt, message.term)
        if refused:
            return m.Refusal(error=to_wire(Conflict(refused)))
        self.watch.took(self.name, attempt, message.term)
        tokens = unpack_tokens(message.token_ids)
        taken = self.pool.take(message.tags, tokens, len(tokens), len(tokens))
        if taken is None:
            return m.Refusal(error=to_wire(Overloaded("no blocks now")))
        (tables,), hit = taken
        source = Source(
            self.identity,
            attempt,
            message.decode_worker,
            message.decode_incarnation,
            message.lease_token,
            message.first_token,
            len(tokens),
            message.lease_s,
            self.net.now,
        )
        self._do(self.table.open(source))
        self.work[attempt] = Work(source, tokens, tables, hit)
        if hit:
            self._name(attempt, self.work[attempt])
        self._wake()
        return accepted

    def cancel(self, attempt: Attempt) -> m.Cancelled:
        effects = self.table.cancel(attempt)
        self.watch.ended(attempt)
        self._do(effects)
        return m.Cancelled(held=bool(effects))

    def ack(self, message: m.HandoffAck) -> None:
        self._do(self.table.ack(message, self.net.now))

    def release(self, message: m.HandoffRelease) -> None:
        self._do(self.table.release(message))

    def decode_beat(self, beat: m.WorkerBeat) -> None:
        progress = {a.attempt: a.progress for a in beat.attempts}
        self._do(self.table.decode_beat(beat.worker, beat.incarnation, progress, self.net.now))

    def scheduler_beat(self, beat: m.SchedulerBeat) -> None:
        self.table.fences.see_term(beat.term)
        self.watch.saw(beat.term)

    def peer_died(self, worker: WorkerId) -> None:
        self._do(self.table.decode_died(worker))

    def _do(self, effects: list[SourceEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Free):
                work = self.work.pop(effect.attempt, None)
                if work is not None:
                    self.pool.give(work.tables, work.tokens, work.computed)
            elif isinstance(effect, SendCommit):
                self._send(effect)

    def _send(self, effect: SendCommit) -> None:
        node = self.world.decodes.get(effect.decode_worker)
        if node is not None:
            self.net.send(node, lambda: node.commit(effect.message))

    def _wake(self) -> None:
        if not self.stepping:
            self.stepping = True
            self.net.at(self.net.now + STEP_S, self._step, self)

    def _step(self) -> None:
        self.stepping = False
        self.steps += 1
        budget = TOKEN_BUDGET
        for attempt, work in list(self.work.items()):
            if work.computed >= len(work.tokens) or budget <= 0:
                continue
            end = min(len(work.tokens), work.computed + budget)
            budget -= end - work.computed
            self.pool.memory.compute(work.tables, work.tokens, work.computed, end)
            work.computed = end
            self._name(attempt, work)
        if any(work.computed < len(work.tokens) for work in self.work.values()):
            self._wake()

    def _name(self, attempt: Attempt, work: Work) -> None:
        due = work.source.due(work.computed)
        if any(due) or work.computed == len(work.tokens):
            refs = [[self._ref(attempt, work, g, position) for position in group] for g, group in enumerate(due)]
            self._do([work.source.name(work.computed, refs, 0, self.net.now)])

    def _ref(self, attempt: Attempt, work: Work, group: int, position: int) -> BlockRef:
        block, size = work.tables[group][position], BLOCKS[group]
        span = self.pool.memory.spans[group][block]
        valid = min(size, len(work.tokens) - position * size) * SLOT_BYTES
        if valid < len(span):  # a full block may be shared, and is never written
            span[valid:] = bytes(len(span) - valid)
        generation = self.pool.blocks.groups[group].generation(block)
        return BlockRef(block, generation, span_digest(span, attempt, group, generation, position))

    def _tick(self) -> None:
        self._do(self.table.tick(self.net.now))

    def _beat(self) -> None:
        self.number += 1
        computing = [w for w in self.work.values() if w.computed < len(w.tokens)]
        self.world.worker_beat(
            m.WorkerBeat(
                worker=self.worker,
                role="prefill",
                pool="default",
                incarnation=self.identity.incarnation,
                boot_id="b",
                host="h",
                number=self.number,
                free_blocks=self.pool.available,
                total_blocks=self.pool.num_blocks,
                block_sizes=BLOCKS,
                token_bytes=(SLOT_BYTES,) * len(BLOCKS),
                token_budget=TOKEN_BUDGET,
                running=len(computing),
                max_sequences=4,
                queue_tokens=sum(len(w.tokens) - w.computed for w in computing),
                attempts=tuple(AttemptProgress(a, self.number, w.computed) for a, w in self.work.items()),
                step_model=MODEL,
                numerics="n",
                fingerprint="f",
                kv_pool=self.file,
            )
        )
