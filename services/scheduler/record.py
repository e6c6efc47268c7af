"""One request as the scheduler knows it, and what a worker's beat says about it. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from services.scheduler.costs import request_cost
from services.scheduler.placement import Ask, Choice
from services.scheduler.shares import Charge
from shared.contracts import messages as m
from shared.contracts.attempt import Attempt
from shared.contracts.grants import Grant
from shared.contracts.ids import Dispatch, RequestId, WorkerId


class State(enum.Enum):
    QUEUED = "queued"
    MATCHING = "matching"
    RESERVING = "reserving"
    PREFILLING = "prefilling"  # the prefill worker's answer is awaited
    PLACED = "placed"
    LOST = "lost"  # its decode worker is gone; the ingress will raise the epoch


PLACING = (State.MATCHING, State.RESERVING, State.PREFILLING)


@dataclass(slots=True)
class Record:
    """Mutable; only the request table writes it. Times are the table's clock, seconds."""

    submit: m.Submit
    grant: Grant
    arrival_s: float
    deadline_s: float
    order: int
    submitted_s: float
    dispatch: Dispatch
    tried: int = 0  # the highest dispatch of ours
    state: State = State.QUEUED
    hop_until_s: float = 0.0  # when the hop under way counts as unanswered
    matched: m.Matched | None = None
    matched_s: float = 0.0
    choice: Choice | None = None
    queue_s: float = 0.0
    not_before: dict[WorkerId, float] = field(
        default_factory=dict
    )  # workers that refused, until they beat or this time
    unlisted: int = 0  # beats in a row of its worker that did not list it
    waits_at: tuple[WorkerId, Attempt] | None = None  # taken back; that worker goes on with it if nobody else begins
    num_cached: int = 0  # tokens that need not be computed, by the workers' word
    guessed_output: float = 0.0  # tokens of all choices together
    num_output: int = 0  # the same, as its worker counts them
    output_ended: bool = False  # no more come
    num_tokens: int = field(init=False)  # prompt and committed tokens
    charge: Charge | None = None  # while it is not queued
    paid_before: bool = False  # an earlier leader placed it: under this term it costs nothing
    late: bool = False  # begun because it had waited for too long
    late_cost: float = 0.0  # for which others have the next turns then
    refused: int = 0  # how often a worker that seemed to have room had none
    overtaken: int = 0  # requests that began while it stood first and had no room

    def __post_init__(self) -> None:
        self.num_tokens = len(self.submit.token_ids) // 4

    @property
    def request_id(self) -> RequestId:
        return self.submit.attempt.request_id

    @property
    def attempt(self) -> Attempt:
        return Attempt(self.request_id, self.submit.attempt.epoch, self.dispatch)

    @property
    def has_begun(self) -> bool:
        """Its client has tokens of an earlier attempt."""
        return self.num_tokens > self.submit.num_prompt_tokens

    @property
    def max_new_tokens(self) -> int:
        """Most tokens that one choice has still to come."""
        emitted = self.num_tokens - self.submit.num_prompt_tokens
        return max(1, max((s.max_tokens for s in self.submit.sampling), default=1) - emitted)

    @property
    def choices(self) -> int:
        return max(1, len(self.submit.sampling))

    @property
    def cost(self) -> float:
        """What its tenant is charged. A prompt that a lost worker had computed is not charged again."""
        return request_cost(self.charged_tokens, self.num_cached, self.guessed_output)

    @property
    def charged_tokens(self) -> int:
        """Of its prompt."""
        return self.num_tokens if self.submit.attempt.epoch <= 1 else 0

    @property
    def decode_worker(self) -> WorkerId:
        return self.choice.decode_worker if self.choice is not None else WorkerId("")

    @property
    def prefill_worker(self) -> WorkerId:
        return self.choice.prefill_worker if self.choice is not None else WorkerId("")

    @property
    def _where_it_waits(self) -> frozenset[WorkerId]:
        return frozenset((self.waits_at[0],)) if self.waits_at is not None else frozenset()

    def ask(self, now: float, held: dict[WorkerId, int]) -> Ask:
        """What placement needs to know of this request."""
        return Ask(
            num_tokens=self.num_tokens,
            max_new_tokens=self.max_new_tokens,
            choices=self.choices,
            klass=self.grant.klass,
            open_ended=all(s.open_ended for s in self.submit.sampling),
            scores_prompt=any(s.prompt_logprobs >= 0 for s in self.submit.sampling),
            held=held,
            numerics=self.submit.numerics,
            excluded=frozenset(w for w, until in self.not_before.items() if until > now) | self._where_it_waits,
        )


class Verdict(enum.Enum):
    """What to do about an attempt a decode worker's beat lists."""

    IGNORE = "ignore"
    CONFIRM = "confirm"
    ADOPT = "adopt"
    CANCEL = "cancel"  # the worker holds what is fenced
    OBSOLETE = "obsolete"  # the record is what is fenced


def judge(record: Record, listed: Attempt, worker: WorkerId) -> Verdict:
    """Compare a record with what `worker` says it holds of the same request.

    The record's own newer attempt at the same worker is no reason to cancel there: its reserve re-stamps the old one.
    """
    own = record.attempt
    if record.waits_at == (worker, listed) and record.state != State.PLACED:
        # Taken back from there. Since it has blocks again it is that worker's, unless another is being asked.
        return Verdict.ADOPT if record.state in (State.QUEUED, State.MATCHING) else Verdict.IGNORE
    if listed.epoch > own.epoch:
        return Verdict.OBSOLETE
    if own.fences(listed):
        return Verdict.IGNORE if record.decode_worker == worker and record.state != State.QUEUED else Verdict.CANCEL
    if listed.dispatch > own.dispatch:
        return Verdict.ADOPT
    if record.state in (State.QUEUED, State.MATCHING, State.LOST):
        return Verdict.ADOPT
    if record.decode_worker != worker:
        return Verdict.IGNORE
    return Verdict.CONFIRM if record.state == State.PLACED else Verdict.IGNORE
