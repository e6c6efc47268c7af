"""Who gets blocks, and whose are taken: admission, growth, preemption, return. Pure; `Batcher` owns and drives it.

Admission takes a place, the blocks of the tokens a sequence came with and one more per layer group to grow into, and
leaves one for each running sequence: the watermark. Growth takes the others one by one. Where there is none left,
`preemption` says who gives way; that sequence keeps its tokens and returns by itself, computing them again, when there
is room. Who comes or returns has what lower classes hold: see `precedence`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from operator import attrgetter

from shared.contracts.grants import CLASSES
from shared.contracts.parts import ClassRoom
from shared.engine import sequence_blocks as blocks
from shared.engine.precedence import Need, Precedence
from shared.engine.preemption import Holder, choose_idle, choose_victim, may_enter
from shared.engine.sequence import Sequence
from shared.engine.sequence_spec import SequenceSpec, larger_than_pool
from shared.engine.sequence_update import ADMITTED, PREEMPTED, RESUMED, REVOKED
from shared.kv.block_pool import BlockPool, GroupPool
from shared.kv.block_table import BlockTable


class ReservationRefused(Exception):
    """A sequence was not accepted; nothing was reserved. The message holds numbers, no tokens."""


class NeverFits(ReservationRefused):
    """It can come to need more blocks than the pool has: no waiting can help."""


class NoBlocks(ReservationRefused):
    """Too few blocks are available now."""


class NoSlot(ReservationRefused):
    """As many sequences of its class and higher ones are live as the engine runs at once."""


class BlockRoom:
    """The pool of a batcher and the sequences that share it.

    Args:
        sequences: the batcher's own, in order of arrival; only read here.
        most: sequences that run at once.
        report: called with a sequence and one of its events.
    """

    def __init__(
        self, pool: BlockPool, sequences: Mapping[str, Sequence], most: int, report: Callable[[Sequence, str], None]
    ) -> None:
        self.preemptions = 0  # so far, of sequences that had begun
        self._pool = pool
        self._sequences = sequences
        self._most = most
        self._report = report
        self._precedence = Precedence(pool, sequences, most)

    def require_possible(self, specs: Seq[SequenceSpec]) -> None:
        """Raises NeverFits when the empty pool could not hold each of `specs` to its end, or all of them to begin."""
        begin = [blocks.to_begin_alone(self._pool, spec) for spec in specs]
        most = max(self._pool.blocks_for(spec.num_slots) for spec in specs)
        for number, group in enumerate(self._pool.groups):
            if most[number] > group.num_blocks:
                raise NeverFits(_too_long(max(specs, key=lambda spec: spec.num_slots), group))
            if sum(counts[number] for counts in begin) > group.num_blocks:
                raise NeverFits(f"this model's workers cannot hold {len(specs)} choices of so long a prompt")

    def require_room(self, specs: Seq[SequenceSpec]) -> None:
        """Raises NoBlocks or NoSlot when these cannot begin together, what they would take from others included."""
        begin = [blocks.to_begin_alone(self._pool, spec) for spec in specs]
        hits = self._pool.match(specs[0].tags, specs[0].token_ids, specs[0].max_match)
        needed = tuple(max(len(hit), sum(counts)) for hit, counts in zip(hits, zip(*begin, strict=True), strict=True))
        self._way(Need(specs[0].rank, len(specs), hits, needed))

    def admit(self, spec: SequenceSpec) -> tuple[tuple[BlockTable, ...], int] | None:
        """Tables to begin with, and how many tokens of KV the shared blocks among them hold.

        None: it has a place, and its blocks come when steps in flight have ended; see `let_return`.

        Raises:
            NoBlocks, NoSlot: there is no room, or others have waited for it; nothing was taken.
        """
        homeless = [seq for seq in self._homeless() if not _of_one_request(seq.spec, spec)]
        if not may_enter(spec.rank, [(seq.spec.rank, seq.passed_over) for seq in homeless]):
            raise NoBlocks(f"{len(homeless)} preempted sequences wait for blocks")
        needed = blocks.to_begin(self._pool, spec, len(spec.token_ids))
        hits = self._pool.match(spec.tags, spec.token_ids, spec.max_match)
        # who computes for a peer is told its blocks at once, so takes from nobody
        if not self._make_way(Need(len(CLASSES) if spec.compute_only else spec.rank, 1, hits, needed)):
            for seq in homeless:  # what lower classes gave up was never theirs to return to
                seq.passed_over += 1
        if not blocks.has_room(self._pool, hits, needed, self._watermark()):
            return None
        return blocks.take(self._pool, hits, needed, spec), len(hits[0]) * self._pool.groups[0].block_size

    def admit_follower(self, spec: SequenceSpec) -> None:
        """Make sure of a place for one that begins when another has computed its prompt. Raises NoSlot."""
        nothing = (0,) * len(self._pool.groups)
        if self._precedence.free_places < 1:
            self._make_way(Need(spec.rank, 1, tuple([] for _ in nothing), nothing))

    @property
    def rooms(self) -> tuple[ClassRoom, ...]:
        """What a newcomer can have, one for each of CLASSES."""
        waiting = [(seq.spec.rank, seq.passed_over) for seq in self._homeless()]
        return self._precedence.rooms([may_enter(rank, waiting) for rank in range(len(CLASSES))])

    def _make_way(self, need: Need) -> bool:
        """Whether somebody gave way; raises as `_way`."""
        way = self._way(need)
        for seq in way:
            self._displace(seq)
        return bool(way)

    def _way(self, need: Need) -> list[Sequence]:
        """Who gives way to a newcomer. Raises NoBlocks or NoSlot where nothing that may be taken would help."""
        watermark, takes = self._watermark(), self._precedence.takes_any(need.rank)
        if (
            blocks.has_room(self._pool, need.hits, need.blocks, watermark)
            and self._precedence.free_places >= need.places
        ):
            return []
        way = self._precedence.way(need) if takes else None
        if way is not None:
            return way
        if self._precedence.places_of(need.rank) < need.places:
            raise NoSlot(f"{self._most} sequences are live")
        there = tuple(counts.available for counts in self._pool.counts)
        raise NoBlocks(f"{need.blocks} blocks needed, {there} available, {watermark} of them for others to grow into")

    def _displace(self, seq: Sequence) -> None:
        """Have a sequence give up its place, and its blocks if it holds any."""
        if seq.preempted:
            seq.placed = False
        else:
            self.take_from(seq)

    @property
    def has_homeless(self) -> bool:
        """True when a sequence waits for blocks."""
        return any(map(_IS_PREEMPTED, self._sequences.values()))

    def let_return(self, allowed: Collection[str]) -> None:
        """Give those without blocks some, the most urgent first, as far as there is room or lower classes hold it.

        Reservations whose batch has not come yet give way too: they may be what the batch before them waits for.
        """
        for seq in self._homeless():
            if not seq.arriving and (seq.awaiting_kv or not may_run(seq, allowed)):
                continue
            while not self._returns(seq):
                way = self._precedence.way(self._need(seq))
                if way is None:
                    victim = choose_idle(seq.spec.rank, self._holders(allowed), allowed)
                    way = [self._sequences[victim]] if victim is not None else []
                if not way:
                    return
                for other in way:
                    self._displace(other)

    def _need(self, seq: Sequence) -> Need:
        needed = blocks.to_begin(self._pool, seq.spec, len(seq.tokens))
        if seq.lent:
            hits = self._pool.still_held(seq.lent)
        else:
            hits = self._pool.match(blocks.known_tags(self._pool, seq), seq.tokens, seq.max_match)
        return Need(seq.spec.rank, not seq.placed, hits, needed)

    def _returns(self, seq: Sequence) -> bool:
        need = self._need(seq)
        if need.places > self._precedence.free_places:
            return False
        if not blocks.has_room(self._pool, need.hits, need.blocks, self._watermark()):
            return False
        num_shared = len(need.hits[0]) * self._pool.groups[0].block_size
        event = ADMITTED if seq.arriving else RESUMED
        told = seq.arriving or seq.num_preemptions > 0 or not seq.spec.follows
        again = bool(seq.lent) or not seq.arriving
        seq.return_to(blocks.take(self._pool, need.hits, need.blocks, seq.spec, again=again), num_shared)
        if told:
            self._report(seq, event)
        return True

    def lend(self, leader: Sequence, followers: Seq[Sequence]) -> bool:
        """Let `followers` begin behind the full blocks of a leader's prompt. False: it has not computed them yet."""
        num_tokens = blocks.num_lent(self._pool, leader.spec)
        if leader.preempted or leader.num_confirmed_tokens < num_tokens:
            return False
        for seq in followers:
            seq.waits_for = ""
            seq.lent = tuple(table.first(num_tokens) for table in leader.tables)
            if not seq.finish:  # without room now it comes back as a preempted one does
                self._returns(seq)
        return True

    def grows(self, seq: Sequence, allowed: Collection[str]) -> bool:
        """Make sure of the blocks for its next token, at others' cost if need be. False: it is not in this step."""
        missing = seq.missing_blocks(seq.num_computed_tokens + 1)
        while any(missing) and not blocks.grow(self._pool, seq, missing):
            if any(other.steps_in_flight and other.gives_back for other in self._sequences.values()):
                return False  # blocks come when those steps end: nobody has to give way
            if self._pool.will_have(missing):
                return False  # they are being zeroed
            victim = choose_victim(seq.spec.seq_id, self._holders(allowed))
            if victim is None:
                return False
            self.take_from(self._sequences[victim])
            if victim == seq.spec.seq_id:
                return False
        return True

    def reach(self, seqs: Seq[Sequence], steps: int) -> int:
        """Steps, at most so many, that all these have blocks for. More blocks are taken while an eighth of the pool is
        left for those who come."""
        spare = self._watermark() + max(group.num_blocks for group in self._pool.groups) // 8
        for seq in seqs:
            if seq.covers(seq.num_computed_tokens + steps):
                continue
            missing = seq.missing_blocks(min(seq.num_computed_tokens + steps, seq.spec.num_slots))
            if blocks.has_room(self._pool, ((),) * len(missing), missing, spare):
                blocks.grow(self._pool, seq, missing)
            steps = min(steps, seq.num_covered_tokens - seq.num_computed_tokens)
        return steps

    def take_from(self, seq: Sequence) -> bool:
        """Preempt a sequence: now, or when its steps in flight have ended. False: it has nothing that can be taken."""
        if seq.pins or not _holds_for_itself(seq):
            return False
        seq.leaving = True
        self.let_go(seq)
        return True

    def let_go(self, seq: Sequence) -> bool:
        """Take back what a sequence holds if it has ended or leaves, and no step in flight names it. True: it is over.

        Tokens of the steps in flight of one that leaves still count.
        """
        if seq.leaving and not (seq.steps_in_flight or seq.pins):
            started = seq.started
            blocks.give_back(self._pool, seq)
            seq.vacate()
            seq.num_preemptions += started
            self.preemptions += started
            self._report(seq, PREEMPTED if started else REVOKED)
        if not seq.may_be_freed:
            return False
        blocks.give_back(self._pool, seq)
        return True

    @property
    def held_back(self) -> tuple[int, ...]:
        """Available blocks per layer group that a newcomer does not get."""
        needs = [blocks.to_begin(self._pool, seq.spec, len(seq.tokens)) for seq in self._homeless()]
        return tuple(self._watermark() + sum(need[g] for need in needs) for g in range(len(self._pool.groups)))

    def _homeless(self) -> list[Sequence]:
        """Those without blocks, the one to get some first in front."""
        waiting = (seq for seq in self._sequences.values() if seq.preempted and not (seq.finish or seq.waits_for))
        return sorted(waiting, key=urgency)

    def _watermark(self) -> int:
        """Blocks to keep free in every group: one for each sequence that may come to need it."""
        return sum(seq.may_grow for seq in self._sequences.values())

    def _holders(self, allowed: Collection[str]) -> list[Holder]:
        return [
            Holder(
                seq_id=seq.spec.seq_id,
                rank=seq.spec.rank,
                order=seq.order,
                started=seq.started,
                spared=seq.spared,
                pinned=bool(seq.pins),
                can_run=may_run(seq, allowed) and not seq.awaiting_kv,
            )
            for seq in self._sequences.values()
            if _holds_for_itself(seq)
        ]


def _too_long(spec: SequenceSpec, group: GroupPool) -> str:
    """What can never fit, in a client's words."""
    room, asked = group.num_blocks * group.block_size, spec.sampling.max_tokens
    if spec.compute_only:
        return f"this model's workers hold {room} tokens of a prompt; this one has {spec.num_slots}"
    return larger_than_pool(room, spec.num_prompt_tokens, asked)


def _of_one_request(one: SequenceSpec, other: SequenceSpec) -> bool:
    """True for choices of one prompt: they come together, and none is before the other."""
    return bool(other.follows) and other.follows in (one.seq_id, one.follows)


def _holds_for_itself(seq: Sequence) -> bool:
    """True when a live sequence holds blocks that no peer knows of."""
    return not (seq.finish or seq.leaving or seq.preempted or seq.spec.compute_only)


_IS_PREEMPTED = attrgetter("preempted")
urgency = attrgetter("urgency")
"""The key by which sequences are sorted."""


def may_run(seq: Sequence, allowed: Collection[str]) -> bool:
    """`allowed`: by the batching policy. What only computes for a peer is in nobody's batch."""
    return seq.spec.compute_only or seq.spec.seq_id in allowed
