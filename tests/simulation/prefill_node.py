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
from shared.kv.block_pool import GroupPool
from shared.kv.digest import span_digest
from shared.kv.handoff import Free, SendCommit, Source, SourceEffect, SourceIdentity
from tests.simulation.network import FenceWatch, Node, Violation
from tests.simulation.toy_model import BLOCK, SLOT_BYTES, Memory

if TYPE_CHECKING:
    from tests.simulation.world import World

STEP_S = 0.02
TOKEN_BUDGET = 128
MODEL = StepModel(base_s=0.015, token_s=0.0001, sequence_s=0.0001)


@dataclass(eq=False)
class Work:
    source: Source
    tokens: list[int]
    blocks: list[int]
    computed: int = 0


class PrefillNode(Node):
    def __init__(self, world: World, name: str, incarnation: int, num_blocks: int) -> None:
        super().__init__(name)
        self.world, self.net = world, world.net
        self.worker = WorkerId(name)
        self.memory = Memory(num_blocks)
        self.pool = GroupPool(num_blocks, BLOCK)
        self.table = SourceTable()
        self.file = f"{name}-{incarnation}"
        self.identity = SourceIdentity(self.worker, Incarnation(incarnation), "f", self.file, (BLOCK,))
        self.work: dict[Attempt, Work] = {}
        self.number = 0
        self.steps = 0
        self.checks = 0
        self.stepping = False
        self.watch = FenceWatch()
        world.memories[self.file] = self.memory
        self.net.every(self, 0.25, self._tick)
        self.net.every(self, 1.0, self._beat)

    def check(self) -> None:
        """Blocks are conserved, and every live source holds what it has named."""
        counts = self.pool.counts
        held = sum(len(w.blocks) for w in self.work.values())
        if counts.free + held != self.pool.num_blocks:
            raise Violation(f"{self.name}: {counts.free} free and {held} held of {self.pool.num_blocks} blocks")
        if {*self.table.attempts} != {*self.work}:
            raise Violation(f"{self.name}: sources and work differ")
        self.checks += 1
        if self.checks % 64 == 0:
            references = [0] * self.pool.num_blocks
            for work in self.work.values():
                for block in work.blocks:
                    references[block] += 1
            self.pool.check(references)

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
        need = -(-len(tokens) // BLOCK)
        if need > self.pool.counts.free:
            return m.Refusal(error=to_wire(Overloaded("no blocks now")))
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
        self.work[attempt] = Work(source, tokens, self.pool.allocate(need))
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

    def peer_died(self, worker: WorkerId) -> None:
        self._do(self.table.decode_died(worker))

    def _do(self, effects: list[SourceEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Free):
                work = self.work.pop(effect.attempt, None)
                if work is not None:
                    self.pool.free(work.blocks)
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
            self.memory.compute(work.blocks, work.tokens, work.computed, end)
            work.computed = end
            (due,) = work.source.due(end)
            if due or end == len(work.tokens):
                refs = [self._ref(attempt, work, position) for position in due]
                self._do([work.source.name(end, [refs], 0, self.net.now)])
        if any(work.computed < len(work.tokens) for work in self.work.values()):
            self._wake()

    def _ref(self, attempt: Attempt, work: Work, position: int) -> BlockRef:
        block = work.blocks[position]
        span = self.memory.spans[block]
        valid = min(BLOCK, len(work.tokens) - position * BLOCK) * SLOT_BYTES
        span[valid:] = bytes(len(span) - valid)
        generation = self.pool.generation(block)
        return BlockRef(block, generation, span_digest(span, attempt, 0, generation, position))

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
                free_blocks=(self.pool.counts.free,),
                total_blocks=(self.pool.num_blocks,),
                block_sizes=(BLOCK,),
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
