"""How many prompt tokens a step takes beside its decodes. Pure.

While sequences decode, every prompt token in a step makes all of them wait; the step-time model tells how many fit into
the target of a token's latency. While none does, a step is as large as it may be.
"""

from __future__ import annotations

from shared.contracts.parts import ItlTarget
from shared.engine.step_time import StepTimeModel

LEAST = 16
"""Prompt tokens that a step takes whatever the target says, so that prompts go on."""
NO_TARGET = ItlTarget()
AUTO_TARGET = ItlTarget(least_s=0.039, times=1.0, times_each=0.075)
"""25 tokens a second are more than anybody reads. Where decoding is slower than that, a step with prompts takes longer
than one without, and the more so the more are there: then more wait for their first token, more prompts must come
through for as many to end, and fewer steps are cheaper. `loadtest.itl` shows what other figures do."""


def step_limit_s(model: StepTimeModel, target: ItlTarget, num_live: int, context_tokens: int) -> float:
    """Seconds that a step may take where so many sequences decode or soon will; 0: as long as it does."""
    times = target.times + target.times_each * num_live
    return max(target.least_s, times * model.predict(num_live, num_live, context_tokens))


def prompt_budget(
    model: StepTimeModel,
    target: ItlTarget,
    most: int,
    num_decodes: int,
    num_prompts: int,
    context_tokens: int,
    start: int,
) -> int:
    """Prompt tokens of a step, at most `most` of them: what the target leaves, and never less than costs nothing.

    Args:
        num_decodes: sequences that get one token in this step; 0: nobody waits for its end.
        num_prompts: sequences whose prompts are to be computed.
        context_tokens: positions attended to by those that decode, summed.
        start: position of the first prompt token, of the prompt that is furthest along.
    """
    limit_s = step_limit_s(model, target, num_decodes + num_prompts, context_tokens)
    if not limit_s or not num_decodes:
        return most
    products_s = max(model.floor_s, limit_s - model.context_s * context_tokens)
    spare_s = products_s - model.base_s - model.token_s * num_decodes - model.sequence_s * (num_decodes + 1)
    token_s = model.token_s + model.context_s * start
    fitting = int(min(spare_s / token_s, most)) if token_s > 0 else most
    return min(most, max(LEAST, fitting))
