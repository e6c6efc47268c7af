"""What goes between an engine's threads, and what runs its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_int32
from dataclasses import dataclass, replace
from typing import Protocol

from shared.engine.step_plan import StepOutput, StepPlan

Blocks = tuple[tuple[int, int], ...]  # (group, block id)
Steps = Sequence[tuple[float, Sequence[int]]]
"""Of steps one after the other: when each ended, on the monotonic clock, and what its rows drew."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How far a runner goes on by itself; at least one step."""

    most: int  # steps
    until: float  # monotonic seconds: no step begins that is expected, by the one before it, to end later
    ending: frozenset[int]  # no step begins behind one that drew such a token
    halt: c_int32  # nor one while it is not 0, which any thread may make it


Again = Callable[[Callable[[], object], Limits], Steps | None]
"""As `Engine`'s `again`."""


PendingStep = Callable[[], StepOutput]
"""A launched step: a call waits for its end. Called once, by the collector thread, in the order of the launches."""


class Runner(Protocol):
    """What runs steps; called by the executor thread only."""

    def run(self, plan: StepPlan) -> StepOutput | PendingStep:
        """Compute one step, or launch it. Anything raised, here or by the wait, ends its sequences with an error."""
        ...

    def zero_blocks(self, blocks: Sequence[tuple[int, int]]) -> Callable[[], object] | None:
        """Overwrite (group, block id) with zeros; or launch it before any later step, and return what waits for it."""
        ...


@dataclass(frozen=True, slots=True)
class Command:
    """Something to do between steps; `refuse` where the engine has stopped."""

    run: Callable[[], None]
    refuse: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Done:
    """A step has ended. Seconds of all of it."""

    plan: StepPlan
    result: StepOutput | Exception
    duration_s: float


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the collector is to wait for, or one that ended or failed at once."""

    plan: StepPlan
    result: StepOutput | Exception | PendingStep
    started: float


@dataclass(frozen=True, slots=True)
class Zeroing:
    """Blocks whose zeroing was launched."""

    blocks: Blocks
    wait: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Zeroed:
    """Blocks are zeroed, or stay as they are."""

    blocks: Blocks
    error: Exception | None


class Stop:
    """The last thing a thread takes."""


def zeroed(blocks: Blocks, wait: Callable[[], object]) -> Zeroed:
    """Wait for a zeroing that was launched."""
    try:
        wait()
    except Exception as exc:
        return Zeroed(blocks, exc)
    return Zeroed(blocks, None)


def widen(plan: StepPlan, part: StepOutput, sound: tuple[int, ...]) -> StepOutput:
    """The output of a whole plan from that of some of its rows; the others get tokens that nobody will read."""
    if len(part.sampled) != len(sound):
        raise ValueError(f"step {plan.step}: the output does not fit the plan")
    sampled = [(0,) * row.num_sampled for row in plan.sequences]
    for i, tokens in zip(sound, part.sampled, strict=True):
        sampled[i] = tokens
    logprobs = {sound[i]: found for i, found in part.logprobs.items()}
    bad_rows = frozenset(sound[i] for i in part.bad_rows)
    stuck = frozenset(sound[i] for i in part.stuck)
    return replace(part, sampled=tuple(sampled), bad_rows=bad_rows, logprobs=logprobs, stuck=stuck)


def widen_later(plan: StepPlan, part: PendingStep, sound: tuple[int, ...]) -> PendingStep:
    """As `widen`, of a step that was launched."""
    return lambda: widen(plan, part(), sound)
