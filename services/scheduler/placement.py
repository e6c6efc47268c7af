"""Which workers run a request, and whether its prompt is computed locally or handed off. Pure.

Knows nothing of clocks, queues or the bus: it sees what workers last said of themselves and how much of the prompt
each holds. The one step-time model comes from the workers' beats; `StepModel` says what its terms count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.scheduler.handoff_cost import HandoffCost
from shared.contracts.ids import Incarnation, WorkerId
from shared.contracts.parts import UNKNOWN_END, ItlTarget, KvEnd, KvLink, StepModel
from shared.engine.prompt_budget import NO_TARGET, prompt_budget
from shared.engine.step_time import chunk_context, from_wire

LOCAL = "local"
HANDED_OFF = "handed_off"
NO_WORKER = WorkerId("")
DEFAULT_TOKEN_BUDGET = 128
_NO_INCARNATION = Incarnation(0)


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as placement sees it: its last beat, less what was placed on it since."""

    worker: WorkerId
    role: str  # prefill | decode
    incarnation: Incarnation = _NO_INCARNATION
    free_blocks: tuple[int, ...] = ()  # per layer group
    held_back: tuple[int, ...] = ()  # free blocks it gives to no newcomer
    total_blocks: tuple[int, ...] = ()
    block_sizes: tuple[int, ...] = ()
    token_bytes: int = 0  # KV of one token over all groups
    token_budget: int = DEFAULT_TOKEN_BUDGET  # most tokens in one step
    running: int = 0
    waiting: int = 0
    max_sequences: int = 0  # 0: no bound known
    queue_tokens: int = 0  # prompt tokens it has taken and not computed
    step_model: StepModel = field(default_factory=StepModel)
    itl_target: ItlTarget = NO_TARGET
    numerics: str = ""
    fingerprint: str = ""
    draining: bool = False
    fake: bool = False
    kv: KvEnd = UNKNOWN_END  # where its pool lies
    links: tuple[KvLink, ...] = ()  # what it measured of its pulls

    @property
    def has_slot(self) -> bool:
        return self.has_slots(1)

    def has_slots(self, count: int) -> bool:
        """True if it would take so many sequences more."""
        return self.max_sequences == 0 or self.running + self.waiting + count <= self.max_sequences

    @property
    def room(self) -> tuple[int, ...]:
        """Blocks per layer group that a newcomer can have now."""
        held_back = self.held_back or (0,) * len(self.free_blocks)
        return tuple(free - held for free, held in zip(self.free_blocks, held_back, strict=False))


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be placed. `held` is how many leading tokens of it each worker holds, by the index's word."""

    num_tokens: int  # prompt and committed tokens
    max_new_tokens: int = 1  # per choice
    choices: int = 1
    held: Mapping[WorkerId, int] = field(default_factory=dict)
    numerics: str = ""  # of earlier epochs' worker: preferred
    excluded: frozenset[WorkerId] = frozenset()
    scores_prompt: bool = False  # log-probabilities of the prompt are wanted, from where it is computed

    def blocks(self, view: WorkerView) -> tuple[int, ...]:
        """Blocks per layer group its reservation takes: of its tokens and, for each choice, one more to grow into.

        The prompt's full blocks are shared.
        """
        needs = []
        for size in view.block_sizes:
            shared = self.num_tokens // size
            most = -(-(self.num_tokens + self.max_new_tokens) // size)
            own = min(-(-self.num_tokens // size) + 1, most) - shared
            needs.append(shared + own * self.choices)
        return tuple(needs)

    def most_blocks(self, view: WorkerView) -> tuple[int, ...]:
        """Blocks per layer group that one choice can come to need."""
        return tuple(-(-(self.num_tokens + self.max_new_tokens) // size) for size in view.block_sizes)


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision with both estimates (seconds; 0 where there was nothing to estimate) and the reason for the path."""

    decode_worker: WorkerId
    decode_incarnation: Incarnation
    path: str
    reason: str  # estimate | prompt_logprobs | one_token | cached | no_prefill_worker | no_kv_path
    prefill_worker: WorkerId = NO_WORKER
    local_s: float = 0.0
    handed_off_s: float = 0.0
    matched_tokens: int = 0
    candidates: int = 0
    numerics: str = ""


def steps_s(model: StepModel, num_tokens: int, *, start: int, chunk: int, running: int, queue_tokens: int = 0) -> float:
    """Seconds a worker takes to compute `num_tokens` from position `start`, `chunk` a step beside `running` decodes.

    Args:
        queue_tokens: other prompts' tokens computed before; where they start is not known, taken as one prompt's.
    """
    total = queue_tokens + num_tokens
    steps, rest = divmod(total, chunk)
    context = chunk_context(0, queue_tokens) + chunk_context(start, num_tokens)
    times = from_wire(model)
    whole_s = steps * times.predict(chunk + running, running + 1, 0) if steps else 0.0
    rest_s = times.predict(rest + running, running + 1, 0) if rest else 0.0
    return whole_s + rest_s + model.context_s * context


def chunk_of(view: WorkerView, start: int = 0) -> int:
    """Prompt tokens that a step of the worker takes beside what it decodes: as the engine itself decides."""
    most = max(1, view.token_budget - view.running)
    return prompt_budget(from_wire(view.step_model), view.itl_target, most, view.running, 1, 0, start)


def local_cost_s(view: WorkerView, num_uncached: int, start: int) -> float:
    """Seconds until the first token by the decode worker's own chunked prefill, and the delay to those it decodes."""
    own = steps_s(
        view.step_model,
        num_uncached,
        start=start,
        chunk=chunk_of(view, start),
        running=view.running,
        queue_tokens=view.queue_tokens,
    )
    return own + view.running * view.step_model.token_s * num_uncached


def handed_off_cost_s(prefill: WorkerView, decode: WorkerView, ask: Ask, cost: HandoffCost) -> float:
    """Seconds until the first token when `prefill` computes the prompt but its last token and `decode` pulls it.

    Pulls go on beside the computing: what is slower counts whole, and of the other the chunk that cannot overlap.
    Infinite where no KV can be pulled.
    """
    bytes_s = cost.bytes_s(prefill.worker, prefill.kv, decode.kv, decode.links)
    if bytes_s <= 0:
        return math.inf
    last = ask.num_tokens - 1
    start = min(ask.held.get(prefill.worker, 0), last)
    chunk = max(1, prefill.token_budget)

    def compute_s(num_tokens: int) -> float:
        model, waiting = prefill.step_model, prefill.queue_tokens
        return steps_s(model, num_tokens, start=start, chunk=chunk, running=0, queue_tokens=waiting)

    moved = last - min(ask.held.get(decode.worker, 0), last)
    whole, tail = (cost.seconds(tokens * decode.token_bytes, bytes_s) for tokens in (moved, min(moved, chunk)))
    there_s = max(compute_s(last - start) + tail, compute_s(min(last - start, chunk)) + whole)
    return there_s + steps_s(decode.step_model, 1, start=last, chunk=1, running=decode.running)


def fits(view: WorkerView, ask: Ask) -> bool:
    """True if the worker has slots for all choices, and blocks, now."""
    if not view.has_slots(ask.choices) or view.worker in ask.excluded:
        return False
    return all(n <= room for n, room in zip(ask.blocks(view), view.room, strict=False))


def could_ever(view: WorkerView, ask: Ask) -> bool:
    """True if the worker would have slots and blocks when idle, to begin and to the end."""
    if 0 < view.max_sequences < ask.choices:
        return False
    needs = zip(ask.blocks(view), ask.most_blocks(view), view.total_blocks, strict=False)
    return all(max(begin, most) <= total for begin, most, total in needs)


def decode_candidates(ask: Ask, views: Sequence[WorkerView]) -> list[WorkerView]:
    """Decode workers that may be asked now. Where none could ever hold the request, one with a slot says so."""
    decodes = [v for v in views if v.role == "decode" and not v.draining]
    if any(could_ever(v, ask) for v in decodes):
        return [v for v in decodes if fits(v, ask)]
    return [v for v in decodes if v.has_slot and v.worker not in ask.excluded]


def can_start_now(view: WorkerView, ask: Ask) -> bool:
    """True if a prefill worker would begin this prompt at once; only then are decode blocks reserved for it."""
    if view.draining or not view.has_slot or view.waiting or view.worker in ask.excluded:
        return False
    needs = (-(-(ask.num_tokens - 1) // size) for size in view.block_sizes)
    return all(n <= free for n, free in zip(needs, view.free_blocks, strict=False))


def choose(ask: Ask, views: Sequence[WorkerView], cost: HandoffCost) -> Choice | None:
    """The decode worker by numerics, prefix match, then room; the path by the smaller estimate.

    Returns None when no decode worker has room: the request stays where it is in the queue.
    """
    candidates = decode_candidates(ask, views)
    if not candidates:
        return None

    def rank(view: WorkerView) -> tuple[bool, int, int, WorkerId]:
        other = bool(ask.numerics) and view.numerics != ask.numerics
        return other, -ask.held.get(view.worker, 0), -min(view.room, default=0), view.worker

    decode = min(candidates, key=rank)
    held = min(ask.held.get(decode.worker, 0), ask.num_tokens - 1)
    local_s = local_cost_s(decode, ask.num_tokens - held, held)

    def chosen(path: str, reason: str, prefill: WorkerId = NO_WORKER, handed_off_s: float = 0.0) -> Choice:
        return Choice(
            decode_worker=decode.worker,
            decode_incarnation=decode.incarnation,
            path=path,
            reason=reason,
            prefill_worker=prefill,
            local_s=local_s,
            handed_off_s=handed_off_s,
            matched_tokens=held,
            candidates=len(candidates),
            numerics=decode.numerics,
        )

    if ask.scores_prompt:
        return chosen(LOCAL, "prompt_logprobs")
    if ask.num_tokens <= 1:
        return chosen(LOCAL, "one_token")
    if held >= ask.num_tokens - 1:
        return chosen(LOCAL, "cached")
    free = [v for v in views if v.role == "prefill" and v.fingerprint == decode.fingerprint and can_start_now(v, ask)]
    if not free:
        return chosen(LOCAL, "no_prefill_worker")
    handed_off_s, prefill = min((handed_off_cost_s(v, decode, ask, cost), v.worker) for v in free)
    if math.isinf(handed_off_s):
        return chosen(LOCAL, "no_kv_path")
    if handed_off_s < local_s:
        return chosen(HANDED_OFF, "estimate", prefill, handed_off_s)
    return chosen(LOCAL, "estimate", handed_off_s=handed_off_s)
