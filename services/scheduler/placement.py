"""Which workers run a request, and whether its prompt is computed locally or handed off. Pure.

Knows nothing of clocks, queues or the bus: it sees what workers last said of themselves and how much of the prompt
each holds. The one step-time model comes from the workers' beats; `StepModel` says what its terms count.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from services.scheduler.affinity import TYPICAL_OUTPUT, Home, Load, choose_home
from services.scheduler.handoff_cost import HandoffCost
from shared.contracts.grants import CLASSES, class_rank
from shared.contracts.ids import Incarnation, WorkerId
from shared.contracts.parts import UNKNOWN_END, ClassRoom, ItlTarget, KvEnd, KvLink, StepModel
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
    class_tokens: tuple[int, ...] = ()  # the same by class; () where it does not tell classes apart
    step_model: StepModel = field(default_factory=StepModel)
    itl_target: ItlTarget = NO_TARGET
    numerics: str = ""
    fingerprint: str = ""
    draining: bool = False
    fake: bool = False
    kv: KvEnd = UNKNOWN_END  # where its pool lies
    links: tuple[KvLink, ...] = ()  # what it measured of its pulls
    rooms: tuple[ClassRoom, ...] = ()  # what each class can have; () where it does not tell classes apart
    classes: tuple[str, ...] = ()  # that it takes; (): all

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

    def room_for(self, rank: int) -> ClassRoom:
        """What a newcomer of a class can have now, by what lower classes would give up too."""
        if rank < len(self.rooms):
            return self.rooms[rank]
        free = self.max_sequences - self.running - self.waiting if self.max_sequences else sys.maxsize
        return ClassRoom(free, self.room)

    def tokens_before(self, rank: int) -> int:
        """Prompt tokens it computes before those of a newcomer of a class: its own class's and higher ones'."""
        return sum(self.class_tokens[: rank + 1]) if self.class_tokens else self.queue_tokens

    def takes(self, klass: str) -> bool:
        """True if it serves requests of that class."""
        return not self.classes or klass in self.classes


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be placed. `held` is how many leading tokens of it each worker holds, by the index's word."""

    num_tokens: int  # prompt and committed tokens
    max_new_tokens: int = 1  # per choice
    choices: int = 1
    held: Mapping[WorkerId, int] = field(default_factory=dict)
    numerics: str = ""  # of earlier epochs' worker: preferred
    excluded: frozenset[WorkerId] = frozenset()
    klass: str = CLASSES[0]
    open_ended: bool = False  # it ends where the largest pool does, if that is sooner
    scores_prompt: bool = False  # log-probabilities of the prompt are wanted, from where it is computed

    def blocks(self, view: WorkerView) -> tuple[int, ...]:
        """Blocks per layer group its reservation takes: of its tokens and, for each choice, one more to grow into.

        The prompt's full blocks are shared.
        """
        needs = []
        for size in view.block_sizes:
            shared = self.num_tokens // size
            most = -(-(self.num_tokens + self.max_new_tokens - 1) // size)
            own = min(-(-self.num_tokens // size) + 1, most) - shared
            needs.append(shared + own * self.choices)
        return tuple(needs)

    def most_blocks(self, view: WorkerView) -> tuple[int, ...]:
        """Blocks per layer group that one choice can come to need. Its last token is never computed."""
        return tuple(-(-(self.num_tokens + self.max_new_tokens - 1) // size) for size in view.block_sizes)


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


def local_cost_s(view: WorkerView, num_uncached: int, start: int, rank: int = len(CLASSES) - 1) -> float:
    """Seconds until the first token by the decode worker's own chunked prefill, and the delay to those it decodes.

    Args:
        rank: of the request's class, which does not wait for lower ones' prompts.
    """
    own = steps_s(
        view.step_model,
        num_uncached,
        start=start,
        chunk=chunk_of(view, start),
        running=view.running,
        queue_tokens=view.tokens_before(rank),
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
        model, waiting = prefill.step_model, prefill.tokens_before(class_rank(ask.klass))
        return steps_s(model, num_tokens, start=start, chunk=chunk, running=0, queue_tokens=waiting)

    moved = last - min(ask.held.get(decode.worker, 0), last)
    whole, tail = (cost.seconds(tokens * decode.token_bytes, bytes_s) for tokens in (moved, min(moved, chunk)))
    there_s = max(compute_s(last - start) + tail, compute_s(min(last - start, chunk)) + whole)
    return there_s + steps_s(decode.step_model, 1, start=last, chunk=1, running=decode.running)


def fits(view: WorkerView, ask: Ask) -> bool:
    """True if the worker has slots for all choices, and blocks, now, or lower classes hold what is missing."""
    return view.worker not in ask.excluded and _holds(view, ask, class_rank(ask.klass))


def takes_from_others(view: WorkerView, ask: Ask) -> bool:
    """True if what the request needs is not free there."""
    return not _holds(view, ask, len(CLASSES) - 1)


def _holds(view: WorkerView, ask: Ask, rank: int) -> bool:
    room = view.room_for(rank)
    if ask.choices > room.sequences:
        return False
    return all(n <= there for n, there in zip(ask.blocks(view), room.blocks, strict=False))


def could_ever(view: WorkerView, ask: Ask) -> bool:
    """True if the worker would have slots and blocks when idle, to begin and to the end."""
    if 0 < view.max_sequences < ask.choices:
        return False
    needs = zip(ask.blocks(view), ask.most_blocks(view), view.total_blocks, strict=False)
    return all(max(begin, most) <= total for begin, most, total in needs)


def room_of_idle(views: Sequence[WorkerView], ask: Ask) -> int | None:
    """Token slots of the largest pool among decode workers, where all are too small for the request; else None."""
    decodes = [v for v in views if v.role == "decode" and v.takes(ask.klass) and v.total_blocks]
    if not decodes or any(could_ever(v, ask) for v in decodes):
        return None
    rooms = [min(n * size for n, size in zip(v.total_blocks, v.block_sizes, strict=False)) for v in decodes]
    return max(rooms) if max(rooms) < ask.num_tokens + ask.max_new_tokens - 1 else None


def within_pools(ask: Ask, views: Sequence[WorkerView]) -> Ask:
    """The request, its output no longer than the largest pool bears if nobody asked for that length."""
    room = room_of_idle(views, ask) if ask.open_ended else None
    return ask if room is None else replace(ask, max_new_tokens=max(1, room + 1 - ask.num_tokens))


def decode_candidates(ask: Ask, views: Sequence[WorkerView]) -> list[WorkerView]:
    """Decode workers that may be asked now. Where none could ever hold the request, any of them says so; but not while
    one drains that could: its successor will."""
    decodes = [v for v in views if v.role == "decode" and v.takes(ask.klass)]
    possible = [v for v in decodes if could_ever(v, ask)]
    if possible:
        return [v for v in possible if not v.draining and fits(v, ask)]
    return [v for v in decodes if not v.draining and v.worker not in ask.excluded]


def can_start_now(view: WorkerView, ask: Ask) -> bool:
    """True if a prefill worker would begin this prompt at once; only then are decode blocks reserved for it."""
    if view.draining or not view.takes(ask.klass) or not view.has_slot or view.waiting or view.worker in ask.excluded:
        return False
    needs = (-(-(ask.num_tokens - 1) // size) for size in view.block_sizes)
    return all(n <= free for n, free in zip(needs, view.free_blocks, strict=False))


def choose(ask: Ask, views: Sequence[WorkerView], cost: HandoffCost) -> Choice | None:
    """The decode worker by numerics, room that is free, how few classes it serves, then `affinity`; the path by the
    smaller estimate.

    Returns None when no decode worker has room: the request stays where it is in the queue.
    """
    ask = within_pools(ask, views)
    candidates = decode_candidates(ask, views)
    if not candidates:
        return None

    def rank(view: WorkerView) -> tuple[bool, bool, int]:
        other = bool(ask.numerics) and view.numerics != ask.numerics
        return other, takes_from_others(view, ask), len(view.classes) or len(CLASSES)

    best = min(map(rank, candidates))
    decode = _home([view for view in candidates if rank(view) == best], ask, views)
    held = min(ask.held.get(decode.worker, 0), ask.num_tokens - 1)
    local_s = first_token_s(decode, ask)

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


def _home(equals: Sequence[WorkerView], ask: Ask, views: Sequence[WorkerView]) -> WorkerView:
    """The one of several decode workers that `affinity` takes."""
    if len(equals) == 1:
        return equals[0]
    homes = [
        Home(
            worker=view.worker,
            first_s=first_token_s(view, ask),
            output_s=output_s(view, ask),
            held=ask.held.get(view.worker, 0),
            room=min(view.room, default=0),
            load=load_of(view),
        )
        for view in equals
    ]
    home = choose_home(homes, [load_of(v) for v in views if v.role == "decode" and not v.draining])
    return next(view for view in equals if view.worker == home.worker)


def first_token_s(view: WorkerView, ask: Ask) -> float:
    """Seconds to the first token by a decode worker alone, with what it holds, and the delay to those it decodes."""
    held = min(ask.held.get(view.worker, 0), ask.num_tokens - 1)
    return local_cost_s(view, ask.num_tokens - held, held, class_rank(ask.klass))


def output_s(view: WorkerView, ask: Ask) -> float:
    """Seconds that the output takes beside what the worker decodes, of TYPICAL_OUTPUT tokens at most."""
    rows = view.running + ask.choices
    return min(ask.max_new_tokens, TYPICAL_OUTPUT) * from_wire(view.step_model).predict(rows, rows, 0)


def load_of(view: WorkerView) -> Load:
    """What a worker does, by its beat and what was placed on it since."""
    used = max(
        (1 - free / total for free, total in zip(view.free_blocks, view.total_blocks, strict=False) if total),
        default=0.0,
    )
    return Load(view.running + view.waiting, view.max_sequences, used)
