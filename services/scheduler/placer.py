"""Takes requests from the head of the queue through match, reserve and prefill. No I/O: effects out, answers in.

Reserve only when the prefill worker can start now; a worker's refusal puts the request back where it stood, unless it
says that no retry can help. The dispatch rises with every reserve, so whatever an earlier one left behind is fenced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from services.scheduler.book import Book
from services.scheduler.effects import AskMatch, AskPrefill, AskReserve
from services.scheduler.forecast import Takers, TurnClock
from services.scheduler.handoff_cost import HandoffCost
from services.scheduler.placement import HANDED_OFF, LOCAL, NO_WORKER, Ask, Choice, choose, could_ever, within_pools
from services.scheduler.queue import class_of
from services.scheduler.record import Record, State
from services.scheduler.worker_registry import WorkerRegistry
from shared.contracts import messages as m
from shared.contracts.attempt import Attempt
from shared.contracts.errors import from_wire
from shared.contracts.grants import class_rank
from shared.contracts.ids import Dispatch, WorkerId

GRACE_S = 0.25
"""A hop counts as unanswered this long after its time-out, if the shell has not said so itself."""

MOST_TRIED = 16
"""Requests of a class that are tried for one place; one that asks for no less than another that had none is not."""
MOST_OVERTAKEN = 16
"""Requests of its own and lower classes that may begin while one that stands first in its class has no room; then the
workers are emptied of those until it has."""
STALE_REFUSALS = 3
"""How often in a row a worker may refuse what it seemed to have room for before others are tried there."""

TERM_SHIFT = 16
"""Dispatches of term t begin at ((t - 1) << TERM_SHIFT) + 1: from 1 in the first term."""


@dataclass(frozen=True, slots=True)
class TableLimits:
    """Bounds, in seconds unless named otherwise."""

    queue_bound: int = 1024  # requests
    slo_ttft_s: Mapping[str, float] = field(default_factory=lambda: {"interactive": 60.0})
    """By class, predicted time to first token above which a request is refused; none: only its budget bounds it."""
    max_wait_s: Mapping[str, float] = field(default_factory=dict)
    """By class, wait after which a request is late; none: never."""
    max_placing: int = 16  # requests with a hop under way
    gather_s: float = 1.5  # a beat interval and its delay
    hop_s: float = 2.0  # reserve and prefill.run
    lease_s: float = 10.0  # of reservations and hand-off sources
    refused_wait_s: float = 1.0  # before a worker that refused is asked again, unless it beats
    match_fresh_s: float = 2.0  # how long the index's answer serves a request put back
    remember_s: float = 60.0  # how long an ended request is remembered
    event_resend_s: float = 1.0
    no_worker_s: float = 5.0  # how long what has no token yet waits for a decode worker while there is none


class Placer:
    """The way from QUEUED to PLACED."""

    def __init__(self, book: Book, registry: WorkerRegistry, cost: HandoffCost, limits: TableLimits) -> None:
        self._book = book
        self._registry = registry
        self._cost = cost
        self._limits = limits
        self.turns = TurnClock()
        self.takers = Takers()

    def pump(self, now: float) -> None:
        """Begin with requests in the order of the queue, as long as there is one that has room."""
        room = self._limits.max_placing - self._book.placing()
        while room > 0 and (found := self._next(now)) is not None:
            room -= 1
            self._begin(now, *found)

    def _next(self, now: float) -> tuple[Record, Choice] | None:
        """The first request of the queue that has room, and where.

        One that has none is passed by those behind it, so that no capacity lies idle; but by those of its own and lower
        classes only `MOST_OVERTAKEN` times while it stands first of its class: then nothing of those begins until it
        fits, but on workers that are not for its class.
        """
        views = self._registry.pools()
        firsts: dict[str, tuple[Record, Ask]] = {}  # by class, who has no room
        too_large: list[Ask] = []
        tried: Counter[str] = Counter()
        for request_id in self._book.queue.turns(now):
            record = self._book.records[request_id]
            klass = class_of(record.grant.klass)
            if tried[klass] >= MOST_TRIED:
                continue
            ask = record.ask(now, {})
            if any(no_smaller(ask, than) for than in too_large):
                continue
            tried[klass] += 1
            choice = choose(ask, views, self._cost)
            if choice is None:
                firsts.setdefault(klass, (record, within_pools(ask, views)))
                too_large.append(ask)
                continue
            passed = [first for first, wanted in firsts.values() if self._competes(ask, choice, wanted)]
            if all(_may_be_passed(first, now) for first in passed):
                for first in passed:
                    first.overtaken += 1
                return record, choice
        return None

    def _competes(self, ask: Ask, choice: Choice, first: Ask) -> bool:
        """True where it would have room that may be kept for the first: on a worker that takes that and can come to
        hold it, and not from a higher class."""
        view = self._registry.view(choice.decode_worker)
        if class_rank(first.klass) > class_rank(ask.klass):
            return False
        return view is None or (view.takes(first.klass) and could_ever(view, first))

    def _begin(self, now: float, record: Record, tentative: Choice) -> None:
        """Ask the index what is held of it, or a worker at once."""
        book = self._book
        record.queue_s = max(0.0, now - record.arrival_s)
        record.late = book.queue.is_late(record.request_id, now)
        book.take(record, State.MATCHING)
        fresh = record.matched is not None and now - record.matched_s < self._limits.match_fresh_s
        if fresh or not self._has_full_block(record):
            self._reserve(now, record)
            return
        timeout_s = min(0.5, max(0.02, 0.1 * tentative.local_s))
        record.hop_until_s = now + timeout_s + GRACE_S
        message = m.Match(grant=record.submit.grant, token_ids=record.submit.token_ids)
        book.effects.append(AskMatch(record.attempt, message, timeout_s))

    def matched(self, now: float, record: Record, reply: m.Matched | m.Refusal | None) -> None:
        """None or a refusal counts as no match, but for one that says the grant itself is no longer good."""
        if isinstance(reply, m.Refusal) and from_wire(reply.error).status in (401, 403):
            self._book.refuse(now, record, reply.error)
            return
        record.matched = reply if isinstance(reply, m.Matched) else None
        record.matched_s = now
        self._reserve(now, record)

    def reserve_answered(self, now: float, record: Record, reply: m.Reserved | m.Refusal | None) -> None:
        """None: unanswered. Whether that worker holds the request its next beat tells, and then it is adopted."""
        if isinstance(reply, m.Reserved):
            self._reserved(now, record, reply)
        elif reply is not None and reply.never:
            record.choice = None  # that worker holds nothing to cancel
            self._book.refuse(now, record, reply.error)
        else:
            record.not_before[record.decode_worker] = now + self._limits.refused_wait_s
            record.refused += 1
            self._book.requeue(record, "unanswered" if reply is None else reply.error.code)

    def prefill_answered(self, now: float, record: Record, reply: m.PrefillAccepted | m.Refusal | None) -> None:
        if isinstance(reply, m.PrefillAccepted):
            self._placed(now, record)
        else:
            self.prefill_locally(now, record, "prefill_refused" if reply is not None else "prefill_timeout")

    def hop_unanswered(self, now: float, record: Record) -> None:
        """The hop under way ended without a word from the shell."""
        if record.state == State.MATCHING:
            self.matched(now, record, None)
        elif record.state == State.RESERVING:
            self.reserve_answered(now, record, None)
        elif record.state == State.PREFILLING:
            self.prefill_answered(now, record, None)

    def prefill_locally(self, now: float, record: Record, reason: str) -> None:
        """Re-stamp the reservation without a prefill worker: blocks and pulled KV stay, the old attempt is fenced."""
        assert record.choice is not None
        self._book.cancel_at(record, reason, roles=("prefill",))
        self._send_reserve(now, record, localized(record.choice, reason))

    def accept_late(self, now: float, record: Record, reply: m.Reserved) -> None:
        """A yes to a reserve that was taken for unanswered: the request is still queued and the dispatch is its own."""
        self._book.take(record, State.RESERVING)
        self._reserved(now, record, reply)

    def adopt(self, now: float, record: Record, listed: Attempt, beat: m.WorkerBeat) -> None:
        """The worker holds what an earlier term placed, or what it accepted without our hearing of it.

        In the second case a hand-off's prefill leg was never begun: the reserve is sent again, which re-stamps what the
        worker holds, instead of letting it wait for KV until its lease ends.
        """
        told = record.state == State.LOST
        record.paid_before |= record.tried == 0
        if record.state in (State.RESERVING, State.PREFILLING, State.PLACED) and record.decode_worker != beat.worker:
            self._book.cancel_at(record, "fenced")
        record.dispatch = listed.dispatch
        unheard = record.state in (State.QUEUED, State.MATCHING) and record.decode_worker == beat.worker
        if unheard and record.choice is not None and record.choice.path == HANDED_OFF:
            self._book.take(record, State.RESERVING)
            there = record.choice.prefill_worker in self._registry
            self._send_reserve(now, record, record.choice if there else localized(record.choice, "prefill_lost"))
            return
        if record.choice is None or record.decode_worker != beat.worker:
            record.choice = Choice(beat.worker, beat.incarnation, LOCAL, "adopted", numerics=beat.numerics)
        record.unlisted, record.waits_at = 0, None
        self._book.take(record, State.PLACED)
        if not told:
            self._book.tell_placed(record)

    def _has_full_block(self, record: Record) -> bool:
        """A match is capped at floor((n - 1) / block_size) blocks: without one there is nothing to ask the index."""
        sizes = [size for view in self._registry.views() for size in view.block_sizes]
        return not sizes or record.num_tokens - 1 >= min(sizes)

    def _held(self, record: Record) -> dict[WorkerId, int]:
        """Leading tokens each holder has in every layer group."""
        held: dict[WorkerId, int] = {}
        for holder in record.matched.holders if record.matched is not None else ():
            view = self._registry.view(holder.worker)
            if view is not None and holder.blocks:
                pairs = zip(holder.blocks, view.block_sizes, strict=False)
                held[holder.worker] = min((blocks * size for blocks, size in pairs), default=0)
        return held

    def _reserve(self, now: float, record: Record) -> None:
        ask = record.ask(now, self._held(record))
        choice = choose(ask, self._registry.pools(), self._cost)
        if choice is None:
            self._book.requeue(record, "no_room")
            return
        uncached = ask.num_tokens - choice.matched_tokens
        for worker, tokens, sequences in (
            (choice.decode_worker, uncached if choice.path == LOCAL else 1, ask.choices),
            (choice.prefill_worker if choice.path == HANDED_OFF else NO_WORKER, uncached, 1),
        ):
            view = self._registry.view(worker)
            if view is not None:
                rank = class_rank(ask.klass)
                self._registry.note_placed(worker, ask.blocks(view), tokens, sequences, rank=rank)
        self._send_reserve(now, record, choice)

    def _send_reserve(self, now: float, record: Record, choice: Choice) -> None:
        record.choice = choice
        record.dispatch = Dispatch(max(record.dispatch, record.tried, (self._book.term - 1) << TERM_SHIFT) + 1)
        record.tried = record.dispatch
        record.state = State.RESERVING
        message = m.Reserve(
            attempt=record.attempt,
            term=self._book.term,
            ingress_id=record.submit.ingress_id,
            grant=record.submit.grant,
            token_ids=record.submit.token_ids,
            num_prompt_tokens=record.submit.num_prompt_tokens,
            sampling=record.submit.sampling,
            tags=record.matched.tags if record.matched is not None else (),
            prefill_worker=choice.prefill_worker if choice.path == HANDED_OFF else NO_WORKER,
            lease_s=self._limits.lease_s,
        )
        self._book.effects.append(AskReserve(choice.decode_worker, message, self._hop_timeout(now, record)))

    def _reserved(self, now: float, record: Record, reply: m.Reserved) -> None:
        """Start the prefill leg, if by the decode worker's true hit there is anything left to compute."""
        choice = record.choice
        assert choice is not None
        at_prefill = self._held(record).get(choice.prefill_worker, 0) if choice.path == HANDED_OFF else 0
        record.num_cached = max(reply.num_cached_tokens, at_prefill)
        self._book.correct(record)
        if choice.path == LOCAL:
            self._placed(now, record)
        elif reply.already_running or reply.num_cached_tokens >= record.num_tokens - 1:
            record.choice = localized(choice, "running" if reply.already_running else "cached")
            self._placed(now, record)
        elif choice.prefill_worker not in self._registry:
            self.prefill_locally(now, record, "prefill_lost")
        else:
            record.state = State.PREFILLING
            message = m.PrefillRun(
                attempt=record.attempt,
                term=self._book.term,
                grant=record.submit.grant,
                token_ids=record.submit.token_ids[:-4],
                decode_worker=choice.decode_worker,
                lease_token=reply.lease_token,
                decode_incarnation=reply.incarnation,
                first_token=reply.num_cached_tokens,
                tags=record.matched.tags if record.matched is not None else (),
                lease_s=self._limits.lease_s,
            )
            timeout_s = self._hop_timeout(now, record)
            self._book.effects.append(AskPrefill(choice.prefill_worker, message, timeout_s))

    def _placed(self, now: float, record: Record) -> None:
        record.unlisted, record.refused, record.waits_at = 0, 0, None
        self._book.take(record, State.PLACED)
        self._book.queue.count_placed(record.grant.klass, record.cost, late=record.late)
        self.takers.placed(record.grant.tenant, record.grant.klass)
        num_slots = record.num_tokens + record.guessed_output
        self.turns.placed(now, others_waited=len(self._book.queue) > 0, num_slots=num_slots)
        self._book.tell_placed(record)

    def _hop_timeout(self, now: float, record: Record) -> float:
        timeout_s = max(0.05, min(self._limits.hop_s, record.deadline_s - now))
        record.hop_until_s = now + timeout_s + GRACE_S
        return timeout_s


def _may_be_passed(first: Record, now: float) -> bool:
    """A worker that has just refused is waited for, unless it goes on so: what it last said of itself is no longer
    true, and others would be refused too."""
    stale = any(until_s > now for until_s in first.not_before.values()) and first.refused < STALE_REFUSALS
    return first.overtaken < MOST_OVERTAKEN and not stale


def no_smaller(ask: Ask, than: Ask) -> bool:
    """True if `ask` has no room where `than` had none."""
    needs = ask.num_tokens, ask.max_new_tokens, ask.choices
    others = than.num_tokens, than.max_new_tokens, than.choices
    larger = all(a >= b for a, b in zip(needs, others, strict=True))
    return larger and ask.klass == than.klass and ask.excluded >= than.excluded


def localized(choice: Choice, reason: str) -> Choice:
    """The same decode worker without a prefill leg."""
    return replace(choice, path=LOCAL, reason=reason, prefill_worker=NO_WORKER)
