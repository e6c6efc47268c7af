"""How many drafted tokens a step verifies: as many as make the most tokens of its time, by the step-time model. Pure.

A row more costs next to nothing while reading the weights is what takes time, and its full price beyond. The draft's
j-th token counts if all before it were right too, so it brings chance^j of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.engine.step_time import StepTimeModel

OVERHEAD_S = 1e-3
"""What a step that verifies costs beside its rows: it is planned behind the one before, and laid out anew."""
MARGIN = 0.05
"""Gain below which nothing is drafted: the model is not exact."""


@dataclass(frozen=True, slots=True)
class Draftable:
    """A sequence that may speculate."""

    chance: float  # of each drafted token to be right if those before it were; below 1
    most: int  # drafted tokens
    context: int  # positions its own row attends to


def draft_lengths(
    model: StepTimeModel,
    wants: Sequence[Draftable],
    num_decodes: int,
    context: int,
    most: int,
    dearer: float = 1.0,
) -> list[int]:
    """Tokens to draft for each of `wants`; all 0 where that does not pay.

    Args:
        num_decodes: sequences of the step, all with one row of their own.
        context: positions that those rows attend to, summed.
        most: drafted tokens of the step.
        dearer: times that a step which verifies takes beyond what the model says.
    """
    lengths = [0] * len(wants)
    plain_s = model.predict(num_decodes, num_decodes, context)
    best_rate, best = num_decodes * (1.0 + MARGIN) * dearer / max(plain_s, 1e-9), 0
    if _most_rate(model, wants, num_decodes, context, most) <= best_rate:
        return lengths
    gains = [(want.chance**j, -j, i) for i, want in enumerate(wants) for j in range(1, want.most + 1)]
    gains.sort(reverse=True)
    expected, seen, rate = float(num_decodes), context, 0.0
    for count, (gain, minus_j, i) in enumerate(gains[:most], start=1):
        before = rate
        expected += gain
        seen += wants[i].context - minus_j
        rate = expected / (model.predict(num_decodes + count, num_decodes, seen) + OVERHEAD_S)
        if rate > best_rate:
            best_rate, best = rate, count
        if rate < before:  # gains fall and costs rise: it never comes back
            break
    for _, _, i in gains[:best]:
        lengths[i] += 1
    return lengths


def _most_rate(model: StepTimeModel, wants: Sequence[Draftable], num_decodes: int, context: int, most: int) -> float:
    """Tokens a second that no draft can exceed: as if each token were as likely as the likeliest, and saw nothing.

    Between the shortest draft and the longest it is highest at an end or where the floor ends. Where many decode, this
    settles it at once.
    """
    total = min(most, sum(want.most for want in wants))
    if total < 1:
        return 0.0
    chance = max(want.chance for want in wants)
    free_s = model.floor_s - model.base_s - model.sequence_s * num_decodes
    kink = int(free_s / model.token_s) - num_decodes if model.token_s else total
    counts = {1, total, *(min(max(1, kink + i), total) for i in (0, 1))}
    times = ((count, model.predict(num_decodes + count, num_decodes, context) + OVERHEAD_S) for count in counts)
    return max((num_decodes + chance * count) / seconds for count, seconds in times)
