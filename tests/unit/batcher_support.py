"""Batchers, sequences and made-up tokens for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shared.contracts.ids import BlockTag
from shared.contracts.sampling import SamplingParams
from shared.engine.batcher import Batcher
from shared.engine.batcher_config import BatcherConfig
from shared.engine.sequence_spec import SequenceSpec
from shared.engine.sequence_update import SequenceUpdate
from shared.engine.step_plan import ScheduledSequence, StepOutput, StepPlan
from shared.kv.layout import LayerGroup, PoolLayout

EOS = 7
Tokens = Callable[[str, int], int]
BLOCK = 4


def make_batcher(num_blocks: int = 64, groups: int = 1, **config: Any) -> Batcher:
    group = LayerGroup(name="full", layers=(0,), num_kv_heads=1, head_dim=8, block_size=BLOCK, dtype="float32")
    defaults: dict[str, Any] = {"token_budget": 32, "max_num_seqs": 8, "depth": 0}
    return Batcher(PoolLayout((group,) * groups, (num_blocks,) * groups), BatcherConfig(**defaults | config))


def make_spec(seq_id: str = "a", prompt: int = 6, max_tokens: int = 4, **fields: Any) -> SequenceSpec:
    fields.setdefault("token_ids", tuple(range(100, 100 + prompt)))
    fields.setdefault("num_prompt_tokens", prompt)
    sampling = fields.pop("sampling", SamplingParams(max_tokens=max_tokens))
    return SequenceSpec(seq_id=seq_id, sampling=sampling, eos_token_ids=frozenset({EOS}), **fields)


def next_token(seq_id: str, position: int) -> int:
    """A made-up model whose token depends on the sequence and the position only; now and then it ends."""
    return 8 + (sum(seq_id.encode()) + position * 5) % 11 if (sum(seq_id.encode()) + position) % 9 else EOS


def output_of(
    plan: StepPlan, tokens: Tokens = next_token, bad_rows: frozenset[int] = frozenset(), repeats: int = 1
) -> StepOutput:
    """What a runner answers: a token where one is sampled, none after a bad row, of drafts those that count. A stretch
    ends where a row does."""
    steps = [
        tuple(tokens(row.seq_id, row.start + len(row.token_ids) + n) for row in plan.sequences) for n in range(repeats)
    ]
    over = next((n for n, drawn in enumerate(steps, start=1) if not plan.ending.isdisjoint(drawn)), repeats)
    sampled = tuple(
        () if row.sampling is None or i in bad_rows else tuple(drawn[i] for drawn in steps[:over])
        for i, row in enumerate(plan.sequences)
    )
    sampled = tuple(
        row.that_count(_drawn(row, tokens)) if row.drafted and found else found
        for row, found in zip(plan.sequences, sampled, strict=True)
    )
    return StepOutput(plan.step, sampled, bad_rows, repeats=over)


def _drawn(row: ScheduledSequence, tokens: Tokens) -> tuple[int, ...]:
    end = row.start + len(row.token_ids)
    return tuple(tokens(row.seq_id, position) for position in range(end - row.drafted, end + 1))


def constant(token_id: int) -> Tokens:
    return lambda seq_id, position: token_id


fifty = constant(50)


def shape(plan: StepPlan | None) -> list[tuple[str, int, int]]:
    """(sequence, start, tokens) per row."""
    return [(row.seq_id, row.start, len(row.token_ids)) for row in plan.sequences] if plan else []


def step(batcher: Batcher, tokens: Tokens = fifty) -> list[SequenceUpdate]:
    plan = batcher.plan()
    assert plan is not None
    return batcher.commit(output_of(plan, tokens))


def run_dry(batcher: Batcher, tokens: Tokens = fifty) -> list[SequenceUpdate]:
    """Drive the batcher as the engine does, keeping depth + 1 steps in flight, until nothing runs."""
    updates: list[SequenceUpdate] = []
    flying: list[StepPlan] = []
    while True:
        while (plan := batcher.plan()) is not None:
            flying.append(plan)
        batcher.zeroed(batcher.take_blocks_to_zero())
        if not flying:
            return updates + batcher.take_updates()
        updates += batcher.commit(output_of(flying.pop(0), tokens))
        batcher.check()


def tag_all(batcher: Batcher, updates: list[SequenceUpdate]) -> list[list[BlockTag]]:
    """Tag completed blocks with their position and content, as an index would for one prompt."""
    tags: list[list[BlockTag]] = [[] for _ in batcher.pool.groups]
    for update in updates:
        for group, blocks in enumerate(update.completed):
            for block in blocks:
                tag = BlockTag(repr((block.position, block.token_ids)).encode())
                batcher.tag(group, block.block_id, block.generation, tag, block.token_ids)
                tags[group].append(tag)
    return tags


def used(batcher: Batcher) -> list[int]:
    return [counts.used for counts in batcher.pool.counts]
