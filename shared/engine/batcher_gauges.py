"""What a batcher holds and what waits in it, as numbers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from shared.contracts.grants import CLASSES
from shared.contracts.parts import ClassRoom
from shared.engine.block_room import BlockRoom
from shared.engine.sequence import Sequence, SequenceStatus
from shared.engine.speculation import Speculation
from shared.kv.block_pool import BlockCounts, BlockPool


@dataclass(frozen=True, slots=True)
class Gauges:
    """A snapshot for beats and metrics."""

    running: int
    waiting: int
    ended: int  # finished, blocks still held
    leaving: int  # of those the ones whose blocks are free as soon as the steps in flight are done
    queue_tokens: int  # prompt tokens to compute here that are not yet planned
    blocks: tuple[BlockCounts, ...]  # one per layer group
    held_back: tuple[int, ...]  # available blocks that no newcomer gets, per layer group
    preempted: int  # those waiting for room, among `waiting`
    preemptions: int  # so far
    drafts: int  # verified so far, by steps of sequences that speculate
    drafted: int  # their tokens
    accepted: int  # those of them that were right
    rooms: tuple[ClassRoom, ...] = ()  # what a newcomer can have, one for each of CLASSES
    class_tokens: tuple[int, ...] = ()  # queue_tokens, one for each of CLASSES


def read_gauges(sequences: Collection[Sequence], pool: BlockPool, room: BlockRoom, speculation: Speculation) -> Gauges:
    """Of the sequences held, in the blocks of `pool`."""
    statuses = [seq.status for seq in sequences]
    class_tokens = [0] * len(CLASSES)
    for seq in sequences:
        class_tokens[seq.spec.rank] += seq.num_waiting_tokens
    return Gauges(
        running=statuses.count(SequenceStatus.RUNNING),
        waiting=statuses.count(SequenceStatus.WAITING) + statuses.count(SequenceStatus.PREEMPTED),
        ended=statuses.count(SequenceStatus.FINISHED),
        leaving=sum(bool(seq.finish and seq.steps_in_flight) for seq in sequences),
        queue_tokens=sum(class_tokens),
        class_tokens=tuple(class_tokens),
        blocks=pool.counts,
        held_back=room.held_back,
        preempted=statuses.count(SequenceStatus.PREEMPTED),
        preemptions=room.preemptions,
        drafts=speculation.drafts,
        drafted=speculation.drafted,
        accepted=speculation.accepted,
        rooms=room.rooms,
    )
