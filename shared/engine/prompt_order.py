"""In which order prompts that wait are computed: in each class those with least left first, within bounds. Pure.

Of prompts computed one after the other, the mean wait for a first token is shortest when the shortest comes first. None
must wait for ever: once later arrivals have had `OVERTAKING` tokens computed before it, a prompt goes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from shared.contracts.ids import TenantId
from shared.engine.sequence import Sequence

OVERTAKING = 512
"""Prompt tokens of later arrivals that may go before a prompt: a large step's. More would shorten the median wait
further where many wait, and leave the longest to the end, where little decodes beside them: `loadtest.itl` shows both.
"""

Waiting = Seq[tuple[Sequence, int]]
"""Sequences with the tokens that each has left to compute, earliest arrival first."""


def least_first(waiting: Waiting) -> list[tuple[Sequence, int]]:
    """The order in which they should be computed. Who was at its output already, before it was preempted or its worker
    was lost, is not kept waiting for others' beginnings either."""
    return sorted(waiting, key=_left)


def count_overtaking(waiting: Waiting, granted: Mapping[str, int]) -> None:
    """Note on each sequence what a step gives to later arrivals of its tenant.

    Args:
        granted: tokens of each in the step.
    """
    later: dict[TenantId, int] = {}
    for seq, _ in reversed(waiting):
        tenant = seq.spec.tenant
        seq.overtaken += later.get(tenant, 0)
        later[tenant] = later.get(tenant, 0) + granted.get(seq.spec.seq_id, 0)


def _left(one: tuple[Sequence, int]) -> tuple[int, int, int]:
    seq, left = one
    return (0, 0, 0) if seq.overtaken >= OVERTAKING or seq.num_output_tokens else (1, seq.spec.rank, left)
