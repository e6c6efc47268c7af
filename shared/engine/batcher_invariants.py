"""What always holds between the steps of a batcher; a fault in it shows here before it shows in a text."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shared.engine.batcher_config import BatcherConfig
from shared.engine.sequence import Sequence
from shared.engine.step_plan import StepPlan
from shared.kv.block_pool import BlockPool


def require_sound(
    sequences: Mapping[str, Sequence], plans: Collection[StepPlan], pool: BlockPool, config: BatcherConfig
) -> None:
    """Raises AssertionError where sequences, the steps in flight and the blocks contradict each other.

    Args:
        plans: the steps in flight, at most `config.depth` + 1.
    """
    assert sum(seq.has_place for seq in sequences.values()) <= config.max_num_seqs, "more run at once than may"
    in_flight = [row.seq_id for plan in plans for row in plan.sequences]
    steps = config.depth + max((plan.repeats for plan in plans), default=1)
    for seq_id, seq in sequences.items():
        assert seq.steps_in_flight == in_flight.count(seq_id), f"{seq_id}: steps in flight miscounted"
        assert seq.num_placeholders <= steps, f"{seq_id}: too many placeholders"
        assert seq.num_confirmed_tokens <= seq.num_computed_tokens <= seq.spec.num_slots
        assert not any(seq.missing_blocks(seq.num_computed_tokens)), f"{seq_id}: computes beyond its blocks"
        assert not (seq.leaving and not seq.steps_in_flight), f"{seq_id}: nothing keeps it from leaving"
        assert not (seq.preempted and (any(map(len, seq.tables)) or seq.steps_in_flight or seq.num_placeholders))
        assert seq.preempted or seq.placed, f"{seq_id}: holds blocks without a place"
        assert seq.preempted or not seq.arriving
        assert not seq.may_be_freed, f"{seq_id}: over, but its blocks are held"
        assert not (seq.finish and seq.num_placeholders), f"{seq_id}: over, but it waits for tokens"
    for row in (row for plan in plans for row in plan.sequences):
        assert row.seq_id in sequences, f"{row.seq_id}: blocks freed under a step in flight"
    _require_counted(sequences, pool)


def _require_counted(sequences: Mapping[str, Sequence], pool: BlockPool) -> None:
    for number, group in enumerate(pool.groups):
        references = [0] * group.num_blocks
        for seq in sequences.values():
            for block_id in seq.tables[number].block_ids:
                references[block_id] += 1
        group.check(references)
