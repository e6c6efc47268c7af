"""What a sequence takes from the block pool and gives back: its first blocks, growth, and a way back after preemption.

Plain functions over a pool and a sequence; `BlockRoom` decides when. A sequence begins with the blocks of the tokens it
came with and one more per layer group to grow into, and takes the others as it comes to need them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from shared.contracts.ids import BlockGeneration, BlockTag
from shared.engine.sequence import Sequence
from shared.engine.sequence_spec import SequenceSpec
from shared.kv.block_pool import BlockPool, GroupPool
from shared.kv.block_table import BlockTable


def to_begin(pool: BlockPool, spec: SequenceSpec, num_tokens: int) -> tuple[int, ...]:
    """Blocks per group for `num_tokens` tokens known beforehand and one to grow into; never more than it can need."""
    most = pool.blocks_for(spec.num_slots)
    if spec.compute_only:
        return most
    return tuple(min(n + 1, m) for n, m in zip(pool.blocks_for(num_tokens), most, strict=True))


def to_begin_alone(pool: BlockPool, spec: SequenceSpec) -> tuple[int, ...]:
    """As `to_begin` of a sequence as it came, without what another one computes for it."""
    needed = to_begin(pool, spec, len(spec.token_ids))
    lent = num_lent(pool, spec) if spec.follows else 0
    return tuple(n - lent // group.block_size for n, group in zip(needed, pool.groups, strict=True))


def num_lent(pool: BlockPool, spec: SequenceSpec) -> int:
    """Leading tokens of a sequence whose KV others with the same tokens may share; they compute the last one."""
    return pool.aligned(len(spec.token_ids) - 1)


def no_tables(pool: BlockPool) -> tuple[BlockTable, ...]:
    """Tables of a sequence that holds nothing."""
    return tuple(BlockTable(group.block_size, (), (), num_shared=0) for group in pool.groups)


def take(
    pool: BlockPool, hits: Seq[Seq[int]], needed: Seq[int], spec: SequenceSpec, *, again: bool = False
) -> tuple[BlockTable, ...]:
    """Tables for a sequence of `needed` blocks per group, the shared ones of `hits` first. There must be room.

    Args:
        again: it had those of `hits` before, or another part of its request has them: no second request uses them.
    """
    tables: list[BlockTable] = []
    for group, hit, count in zip(pool.groups, hits, needed, strict=True):
        group.share(hit, None if again else spec.keeping)
        table = BlockTable(group.block_size, tuple(hit), _generations(group, hit), num_shared=len(hit))
        tables.append(_grown(group, table, count - len(hit), spec))
    return tuple(tables)


def has_room(pool: BlockPool, hits: Seq[Seq[int]], needed: Seq[int], watermark: int) -> bool:
    """True if `take` would leave `watermark` blocks in every group."""
    return all(
        group.can_take(hit, count - len(hit) + watermark)
        for group, hit, count in zip(pool.groups, hits, needed, strict=True)
    )


def grow(pool: BlockPool, seq: Sequence, missing: Seq[int]) -> bool:
    """Add `missing` blocks per group to the sequence's tables, all or none."""
    if not all(group.can_take((), count) for group, count in zip(pool.groups, missing, strict=True)):
        return False
    seq.tables = tuple(
        _grown(group, table, count, seq.spec)
        for group, table, count in zip(pool.groups, seq.tables, missing, strict=True)
    )
    return True


def give_back(pool: BlockPool, seq: Sequence) -> None:
    """Drop the references of the sequence's tables; who has ended or vacates does so."""
    for group, table in zip(pool.groups, seq.tables, strict=True):
        group.free(table.block_ids)


def known_tags(pool: BlockPool, seq: Sequence) -> tuple[tuple[BlockTag, ...], ...]:
    """Per group, the tags by which a preempted sequence may find its leading blocks again.

    Those it came with, and those its own blocks were given before or since they were let go of.
    """
    return tuple(
        _tags(group, table, seq.spec.tags[number] if number < len(seq.spec.tags) else ())
        for number, (group, table) in enumerate(zip(pool.groups, seq.former, strict=True))
    )


def condemn(pool: BlockPool, seq: Sequence) -> None:
    """Its blocks lose their tags and are zeroed before any reuse, those that a preemption took among them.

    Those it shares too, once their other readers have let go: nobody knows which block it was, and a bad one that
    stayed in the cache would end every request that finds it.
    """
    for group, table in zip(pool.groups, seq.tables, strict=True):
        group.condemn(table.block_ids)
    for group, table in zip(pool.groups, seq.former, strict=False):
        for block_id, generation in zip(table.own, table.generations[table.num_shared :], strict=True):
            group.condemn_given_up(block_id, generation)


def _tags(group: GroupPool, table: BlockTable, came_with: Seq[BlockTag]) -> tuple[BlockTag, ...]:
    tags = list(came_with)
    for block_id, generation in zip(table.block_ids[len(tags) :], table.generations[len(tags) :], strict=True):
        tag = group.tag_at(block_id, generation)
        if tag is None:
            break
        tags.append(tag)
    return tuple(tags)


def _grown(group: GroupPool, table: BlockTable, count: int, spec: SequenceSpec) -> BlockTable:
    new = group.allocate(count, spec.owner, spec.keeping)
    return table.grown(new, _generations(group, new))


def _generations(group: GroupPool, block_ids: Seq[int]) -> tuple[BlockGeneration, ...]:
    return tuple(group.generation(block_id) for block_id in block_ids)
