"""Choices that follow a prompt: several outputs of one prompt, of which one sequence computes it for all."""

from __future__ import annotations

from collections.abc import Mapping

from shared.engine.block_room import BlockRoom
from shared.engine.sequence import Sequence
from shared.engine.sequence_blocks import num_lent
from shared.engine.sequence_spec import SequenceSpec
from shared.kv.block_pool import BlockPool


class Followers:
    """Sequences without blocks, each waiting for another one's prompt. False when there are none.

    Args:
        sequences: the batcher's own; only read here.
    """

    def __init__(self, pool: BlockPool, room: BlockRoom, sequences: Mapping[str, Sequence]) -> None:
        self._pool = pool
        self._room = room
        self._sequences = sequences
        self._waiting: dict[str, list[Sequence]] = {}  # by whom they wait for

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def leader_of(self, spec: SequenceSpec) -> str | None:
        """The sequence that is still to compute the prompt of one that follows it."""
        leader = self._sequences.get(spec.follows)
        if (
            leader is None
            or spec.num_scored
            or leader.finish
            or leader.num_confirmed_tokens >= num_lent(self._pool, spec)
        ):
            return None
        return spec.follows

    def add(self, seq: Sequence, leader: str) -> None:
        """`seq` waits for `leader`, which `leader_of` named."""
        seq.wait_for(leader)
        self._waiting.setdefault(leader, []).append(seq)

    def serve(self, leader: Sequence) -> None:
        """Let those of `leader` begin, if it has computed the prompt."""
        followers = self._waiting.get(leader.spec.seq_id)
        if followers and self._room.lend(leader, followers):
            del self._waiting[leader.spec.seq_id]

    def leader_gone(self, leader: str) -> None:
        """Those that still wait for `leader` compute the prompt themselves."""
        for seq in self._waiting.pop(leader, ()):
            seq.waits_for = ""
