"""Whose blocks are taken when a running sequence needs one and none is left, and who may be let in meanwhile. Pure.

Why nothing livelocks: a sequence that was preempted comes back to blocks with room for one more of its own making, and
is spared until it has made it. So every stay but the first yields a block of tokens, and a sequence is preempted at
most once more than it makes blocks. One that needs a block is never spared itself; if it is the only one that could go
on, it keeps what it has and waits for what outsiders hold (pulls, steps in flight), and alone it fits: that was checked
when it was accepted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

PASSES = 8
"""Newcomers of higher classes that may be let in before one that waits for room."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A live sequence that holds blocks and samples. Who computes for peers is none: peers know its blocks."""

    seq_id: str
    rank: int  # of its class; 0 is the highest
    order: int  # of arrival
    started: bool  # KV was computed or pulled for it
    spared: bool
    pinned: bool  # its blocks are written or read from outside
    can_run: bool  # it would go on if others had to wait


def choose_victim(requester: str, holders: Sequence[Holder]) -> str | None:
    """Who gives way to `requester`, which may be itself; None when it has to wait.

    Reservations that have not begun go first, unless they are of a higher class; then the newest sequence of the
    lowest class. Where nobody else could go on, a reservation of any class gives way.
    """
    own = next(h for h in holders if h.seq_id == requester)
    takeable = [h for h in holders if not (h.spared or h.pinned)]
    waiting = [h for h in takeable if not h.started]
    victim = newest_of_lowest(h for h in waiting if h.rank >= own.rank)
    if victim is None:
        victim = newest_of_lowest(h for h in takeable if h.started)
    if victim is own and not any(h.can_run for h in holders if h is not own):
        victim = newest_of_lowest(waiting)
    return victim.seq_id if victim is not None else None


def choose_idle(rank: int, holders: Sequence[Holder], allowed: Collection[str]) -> str | None:
    """Which reservation whose turn has not come gives way to one of class `rank` that comes back; None: none does.

    One of a higher class only where nobody could go on otherwise.

    Args:
        allowed: who may run by the batching policy.
    """
    idle = [h for h in holders if h.seq_id not in allowed and not (h.started or h.pinned)]
    victim = newest_of_lowest(h for h in idle if h.rank >= rank)
    if victim is None and not any(h.can_run for h in holders):
        victim = newest_of_lowest(idle)
    return victim.seq_id if victim is not None else None


def may_enter(rank: int, waiting: Iterable[tuple[int, int]]) -> bool:
    """Whether a newcomer of class `rank` may take blocks before those that wait for theirs: (rank, passed over) each.

    Only before lower classes, and into free room before each of them `PASSES` times.
    """
    return all(rank < other and passed < PASSES for other, passed in waiting)


def newest_of_lowest(holders: Iterable[Holder]) -> Holder | None:
    """The newest of the lowest class among them; None when there is nobody."""
    return max(holders, key=lambda h: (h.rank, h.order), default=None)
