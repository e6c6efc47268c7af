"""How many prompt tokens a step takes beside its decodes. Pure.

While sequences decode, every prompt token in a step makes all of them wait; the step-time model tells how many fit into
the target of a token's latency. While none does, a step is as large as it may be.
"""

from __future__ import annotations

from shared.engine.step_time import StepTimeModel

LEAST = 64
"""Prompt tokens that a step takes whatever the target says: fewer would read all weights for little."""
MULTIPLE = 8
"""Matrix products pad their rows to this many."""


def prompt_budget(
    model: StepTimeModel, target_s: float, most: int, num_decodes: int, context_tokens: int, start: int
) -> int:
    """Prompt tokens of a step, at most `most` of them.

    Args:
        target_s: how long the step may take; 0: as long as it does.
        num_decodes: sequences that get one token in this step; 0: nobody waits for its end.
        context_tokens: positions attended to by those, summed.
        start: position of the first prompt token, of the prompt that is furthest along.
    """
    if not target_s or not num_decodes:
        return most
    spare_s = target_s - model.predict(num_decodes, num_decodes + 1, context_tokens)
    token_s = model.token_s + model.context_s * start
    fitting = int(min(spare_s / token_s, most)) if token_s > 0 else most
    if num_decodes + fitting < most:
        fitting -= (num_decodes + fitting) % MULTIPLE
    return min(most, max(LEAST, fitting))
