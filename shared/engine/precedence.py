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

    def room_of(self, rank: int, entered: bool) -> ClassRoom:
        """What a newcomer of a class can have, lower classes' included.

        Args:
            entered: False when others wait for room before it: it can have nothing.
        """
        if not entered:
            return ClassRoom(0, (0,) * len(self._pool.groups))
        taken = self._giving_way(rank)
        going = self._going() if taken else []
        places = self.free_places + sum(seq.has_place for seq in taken)
        grows = self._watermark([*going, *taken])
        freed = self._freed([*going, *taken], ((),) * len(self._pool.groups))
        counts = self._pool.counts
        cleaning = [group.num_cleaning if taken else 0 for group in self._pool.groups]
        blocks = tuple(
            max(0, c.available + more + zeroed - grows) for c, more, zeroed in zip(counts, freed, cleaning, strict=True)
        )
        return ClassRoom(max(0, places), blocks)

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
        tables = [seq.tables for seq in leaving]
        return tuple(
            group.freed_by([table[number].block_ids for table in tables], frozenset(keep))
            for number, (group, keep) in enumerate(zip(self._pool.groups, kept, strict=True))
        )

    def _watermark(self, leaving: Iterable[Sequence]) -> int:
        """Blocks to keep for those who stay to grow into; see `BlockRoom`."""
        gone = {seq.spec.seq_id for seq in leaving}
        return sum(seq.may_grow for seq in self._sequences.values() if seq.spec.seq_id not in gone)


def _gives_way(seq: Sequence) -> bool:
    """True when it has a place that may be taken, and with it the blocks that it may hold."""
    return seq.has_place and not (seq.spared or seq.pins or seq.spec.compute_only)
