"""What grammars allow the rows of a device's steps, worked out on the host while the step computes.

A mask needs all tokens before it. The one in flight is read when the step that draws it has ended: by then the next
step, which reads it on the device, has been launched up to its logits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from shared.engine.device_results import DeviceResults
from shared.engine.device_sampling import mask_words
from shared.engine.sampler import constrained_rows
from shared.engine.sampling_lines import StepLines
from shared.engine.step_plan import IN_FLIGHT, ScheduledSequence, StepPlan
from shared.grammar.row_masks import Bits, RowMasks

log = logging.getLogger("baton.worker")


@dataclass(frozen=True, slots=True)
class StepBefore:
    """The step launched last."""

    rows: Mapping[str, tuple[int, int]]  # per sequence that samples its first row drawn from and how many it has
    results: DeviceResults
    wait: Callable[[], object]  # until it has ended
    gone: frozenset[str] = frozenset()  # sequences with a grammar that drew nothing that counts


@dataclass(frozen=True, slots=True)
class FoundMasks:
    """Masks of a step's lines: [lines, ceil(vocab_size / 32)]; what is nobody's allows everything."""

    bits: Bits
    stuck: frozenset[int]  # by index, sequences that cannot go on under their grammars
    gone: frozenset[str]


class DeviceMasks:
    """Masks for one runner's steps, in their order.

    Args:
        masks: None: no sequence may have a grammar.
        max_lines: masks of a step.
    """

    def __init__(self, masks: RowMasks | None, max_lines: int, vocab_size: int) -> None:
        self._masks = masks
        self._max_lines = max_lines
        self._words = mask_words(vocab_size)

    def place(self, plan: StepPlan, lines: StepLines) -> None:
        """Give the step's rows with a grammar their lines.

        Raises:
            ValueError: there are more than there is room for, or nobody here reads grammars.
        """
        count = 0
        for i, row in enumerate(plan.sequences):
            if row.sampling is not None and row.sampling.grammar and row.num_sampled:
                if self._masks is None:
                    raise ValueError(f"step {plan.step}: {row.seq_id} has a grammar, and nothing here reads it")
                lines.masks[i] = count
                count += row.num_sampled
        if count > self._max_lines:
            raise ValueError(f"step {plan.step}: {count} masks, at most {self._max_lines} have room")

    def find(self, plan: StepPlan, lines: StepLines, before: StepBefore | None) -> FoundMasks:
        """Work the masks out. Waits for the step before where one of its tokens is needed."""
        assert self._masks is not None
        tokens: list[tuple[int, ...]] = [row.token_ids for row in plan.sequences]
        lost: set[int] = set()
        for i in lines.masks:
            known = _known(plan.sequences[i], before)
            if known is None:
                lost.add(i)
            else:
                tokens[i] = known
        found = self._masks.now(constrained_rows(plan.sequences, tokens, frozenset(lost)))
        for reason in found.faults.values():
            log.warning("a constrained output ends: %s", reason)
        last = max(lines.masks, key=lambda i: lines.masks[i])
        count = lines.masks[last] + plan.sequences[last].num_sampled
        bits = np.full((count, self._words), 0xFFFFFFFF, np.uint32)
        for i, own in found.bits.items():
            bits[lines.masks[i] : lines.masks[i] + len(own)] = own
        gone = frozenset(plan.sequences[i].seq_id for i in lost.union(found.faults))
        return FoundMasks(bits, frozenset(found.faults), gone)


def _known(row: ScheduledSequence, before: StepBefore | None) -> tuple[int, ...] | None:
    """The tokens of its rows, those in flight filled in; None when it drew none that counts."""
    in_flight = row.token_ids.count(IN_FLIGHT)
    if not in_flight:
        return row.token_ids
    assert before is not None  # or the plan would have been refused
    before.wait()
    drawn = before.results.tokens(*before.rows[row.seq_id])
    if drawn is None or row.seq_id in before.gone:
        return None
    return (*row.token_ids[: len(row.token_ids) - in_flight], *drawn[-in_flight:])
