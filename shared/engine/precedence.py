"""What a class has before the lower ones: their places among the sequences that run at once, and their blocks. Pure.

Sequences of lower classes give way to one that comes or comes back: those that have not begun first, then the newest of
the lowest class. Nobody gives way whose blocks are read or written from outside, nor one between a preemption and the
block it makes next: so who gives way again and again still comes to its end. Among equals nobody gives way here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from shared.contracts.parts import ClassRoom
from shared.engine.sequence import Sequence
from shared.kv.block_pool import BlockPool


@dataclass(frozen=True, slots=True)
class Need:
    """What one who comes asks for, to be had at once or when steps in flight have ended."""

    rank: int  # of its class
    places: int
    hits: tuple[list[int], ...]  # per layer group, blocks it shares
    blocks: tuple[int, ...]  # per layer group, those shared included


class Precedence:
    """Args:
    sequences: the batcher's own; only read here.
    most: sequences that may have a place.
    """

    def __init__(self, pool: BlockPool, sequences: Mapping[str, Sequence], most: int) -> None:
        self._pool = pool
        self._sequences = sequences
        self._most = most

    @property
    def free_places(self) -> int:
        """How many more sequences may have a place."""
        return self._most - sum(seq.has_place for seq in self._sequences.values())

    def way(self, need: Need) -> list[Sequence] | None:
        """Who has to give way so that `need` can be met, as far as steps in flight and blocks being zeroed do not see
        to it by themselves.

        None: not even all lower classes together have what is missing. Empty: wait, or take it.
        """
        going = self._going()
        candidates = self._giving_way(need.rank)
        victims: list[Sequence] = []
        missing = need.places - self.free_places
        while missing > 0 or not self._would_fit(need, [*going, *victims]):
            victim = next((seq for seq in candidates if missing > 0 or not seq.preempted), None)
            if victim is None:
                return None
            candidates.remove(victim)
            victims.append(victim)
            missing -= victim.has_place
        return victims

    def takes_any(self, rank: int) -> bool:
        """True when a lower class has something that can be taken."""
        return any(seq.spec.rank > rank and _gives_way(seq) for seq in self._sequences.values())

    def places_of(self, rank: int) -> int:
        """Places that a newcomer of a class can have, lower classes' included."""
        return max(0, self.free_places + sum(seq.has_place for seq in self._giving_way(rank)))

    def rooms(self, entered: Seq[bool]) -> tuple[ClassRoom, ...]:
        """What a newcomer of each class can have, lower classes' included. Every table is read once.

        Args:
            entered: by rank; False when others wait for room before it: it can have nothing.
        """
        nothing = ClassRoom(0, (0,) * len(self._pool.groups))
        taken = [self._giving_way(rank) if may else [] for rank, may in enumerate(entered)]
        freed = self._freed_for(taken)
        return tuple(
            self._room(lower, more) if may else nothing for may, lower, more in zip(entered, taken, freed, strict=True)
        )

    def _room(self, taken: Seq[Sequence], freed: Iterable[int]) -> ClassRoom:
        grows = self._watermark([*self._going(), *taken] if taken else [])
        there = [c.available + more - grows for c, more in zip(self._pool.counts, freed, strict=True)]
        if taken:
            there = [blocks + group.num_cleaning for blocks, group in zip(there, self._pool.groups, strict=True)]
        places = self.free_places + sum(seq.has_place for seq in taken)
        return ClassRoom(max(0, places), tuple(max(0, blocks) for blocks in there))

    def _freed_for(self, taken: Seq[Seq[Sequence]]) -> list[tuple[int, ...]]:
        """Blocks per layer group that come back with those taken for each class, who go anyway included; 0 where
        nobody is taken. A class takes all that the one below it takes."""
        stages: list[list[Sequence]] = []
        counted: set[str] = set()
        for lower in reversed(taken):
            leaving = _once((*self._going(), *lower)) if lower else {}
            stages.append([seq for seq_id, seq in leaving.items() if seq_id not in counted])
            counted |= leaving.keys()
        by_group = [
            group.freed_in_turn([seq.tables[number].block_ids for seq in stage] for stage in stages)
            for number, group in enumerate(self._pool.groups)
        ]
        totals = list(zip(*by_group, strict=True))[::-1]
        nothing = (0,) * len(self._pool.groups)
        return [total if lower else nothing for lower, total in zip(taken, totals, strict=True)]

    def _going(self) -> list[Sequence]:
        """Those whose blocks come back when the steps in flight have ended."""
        return [s for s in self._sequences.values() if s.steps_in_flight and s.gives_back and not s.pins]

    def _giving_way(self, rank: int) -> list[Sequence]:
        """Lower classes' sequences, the one to give way first in front."""
        lower = [seq for seq in self._sequences.values() if seq.spec.rank > rank and _gives_way(seq)]
        return sorted(lower, key=lambda seq: (seq.started, -seq.spec.rank, -seq.order))

    def _would_fit(self, need: Need, leaving: Seq[Sequence]) -> bool:
        """True if there is room for `need` and for others to grow, once those that leave have left."""
        freed, grows = self._freed(leaving, need.hits), self._watermark(leaving)
        for group, hit, count, more in zip(self._pool.groups, need.hits, need.blocks, freed, strict=True):
            if not group.can_take(hit, count - len(hit) + grows - more - group.num_cleaning):
                return False
        return True

    def _freed(self, leaving: Iterable[Sequence], kept: Iterable[Iterable[int]]) -> tuple[int, ...]:
        tables = [seq.tables for seq in _once(leaving).values()]
        return tuple(
            group.freed_by([table[number].block_ids for table in tables], frozenset(keep))
            for number, (group, keep) in enumerate(zip(self._pool.groups, kept, strict=True))
        )

    def _watermark(self, leaving: Iterable[Sequence]) -> int:
        """Blocks to keep for those who stay to grow into; see `BlockRoom`."""
        gone = {seq.spec.seq_id for seq in leaving}
        return sum(seq.may_grow for seq in self._sequences.values() if seq.spec.seq_id not in gone)


def _once(sequences: Iterable[Sequence]) -> dict[str, Sequence]:
    """By id: one whose last step is in flight goes by itself, and can still be told to."""
    return {seq.spec.seq_id: seq for seq in sequences}


def _gives_way(seq: Sequence) -> bool:
    """True when it has a place that may be taken, and with it the blocks that it may hold."""
    return seq.has_place and not (seq.spared or seq.pins or seq.spec.compute_only)
