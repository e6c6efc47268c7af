"""The ingress side of one request: which tokens are the client's, which attempt may still speak, how it ends.

Pure: no I/O and no clock, `now` is passed in (seconds, monotonic). Every input returns the effects to carry out, in
order. Both ingresses drive it. What it does not know: text, HTTP, the bus.

- Records of older attempts, and tokens already committed, are dropped; a gap is held and asked for.
- The epoch rises only when an attempt is declared lost; the core then cancels the old attempt at the old worker.
- The first terminal event wins. There is exactly one `End` and one `SettleRequest`; nothing is resumed after it.
- A missing final is an error, never a stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from shared.contracts.attempt import Attempt
from shared.contracts.errors import (
    WORKER_STOPPING,
    BatonError,
    Cancelled,
    DeadlineExceeded,
    ErrorInfo,
    Internal,
    Unavailable,
    from_wire,
)
from shared.contracts.ids import Dispatch, Epoch, RequestId, Term, WorkerId
from shared.contracts.logprobs import cut_logprobs
from shared.contracts.messages import Placed
from shared.contracts.parts import HeldAttempt, StreamRecord, Totals
from shared.contracts.tokens import unpack_tokens
from shared.text.stream_account import ALL_CHOICES, StreamAccount
from shared.text.stream_choice import MAX_PENDING, ChoiceState, StreamRules
from shared.text.stream_effects import (
    AckFinal,
    AskReplay,
    Commit,
    Effect,
    End,
    EndChoice,
    SendCancel,
    SendFinish,
    SettleRequest,
    SubmitAttempt,
)
from shared.text.stream_submission import StreamSubmission

FindStop = Callable[[int, int, Sequence[int]], int | None]
"""(choice, first_seq, new token ids) -> how many output tokens the choice keeps if a stop string is complete."""
NO_TERM = Term(0)
FIRST_EPOCH = Epoch(1)


class StreamCommit:
    """One request at its ingress.

    Args:
        request_id: minted by the ingress.
        prompt: token ids of the prompt.
        num_choices: outputs wanted.
        arrived: when the client's request arrived.
        budget_s: seconds it may take from then on.
        find_stop: called once with all tokens in order as they are committed; None: no stop strings.
        term: the scheduler's term known at the start; 0: none.
        epoch: the first one; above every epoch this request had before, if another ingress held it.
    """

    def __init__(
        self,
        request_id: RequestId,
        prompt: Sequence[int],
        *,
        arrived: float,
        budget_s: float,
        num_choices: int = 1,
        find_stop: FindStop | None = None,
        rules: StreamRules | None = None,
        term: Term = NO_TERM,
        epoch: Epoch = FIRST_EPOCH,
    ) -> None:
        self.attempt = Attempt(request_id, epoch)
        self.worker = WorkerId("")
        self.placed: Placed | None = None
        """The newest placement told; may lag behind `attempt`, whose dispatch records can raise too."""
        self.term = term
        self.lost = 0
        """Attempts declared lost, for whatever reason."""
        self.died = 0
        """Those of them whose worker died or fell silent, while it ran."""
        self.moved = 0
        """Those of them whose worker was stopped on purpose, and said so."""
        self.end: End | None = None
        self.settled = False
        self.totals = Totals()
        """The final's account, zeros before it came."""
        self._choices = [ChoiceState() for _ in range(num_choices)]
        self._deadline = arrived + budget_s
        self._find_stop = find_stop
        self._rules = rules or StreamRules()
        self._submission = StreamSubmission(prompt, arrived, self._rules)
        self._first_epoch = epoch
        self._token_in_epoch = False
        self._news_at = arrived
        self._absent_at = -1.0
        self._awaiting: set[tuple[str, int]] = set()
        self._close_at = 0.0
        self._cancelled: dict[tuple[Attempt, WorkerId], float] = {}
        self._spent = StreamAccount()
        self._ack: tuple[Attempt, WorkerId] | None = None  # whose final to acknowledge after the settlement

    def committed(self, choice: int = 0) -> list[int]:
        """The choice's output token ids so far. Not a copy."""
        return self._choices[choice].committed

    @property
    def num_committed(self) -> int:
        """Output tokens over all choices."""
        return sum(len(choice.committed) for choice in self._choices)

    @property
    def num_choices(self) -> int:
        """Outputs wanted."""
        return len(self._choices)

    # ------------------------------------------------------------------------------------------ scheduler

    def restore(self, token_ids: Sequence[int]) -> list[Effect]:
        """Output tokens of a single choice that an earlier ingress committed. Call before `start`.

        Raises Internal when they complete a stop string: that ingress should have ended there.
        """
        assert len(self._choices) == 1
        committed = self._choices[0].committed
        if self._find_stop is not None and self._find_stop(0, 0, token_ids) is not None:
            raise Internal("tokens of an earlier run go on behind its end")
        committed += token_ids
        return [Commit(0, 0, list(token_ids))]

    def start(self, now: float) -> list[Effect]:
        """The first submit. Call once."""
        self._submission.begin(now)
        return [self._submit(now)]

    def on_queued(self, term: Term, now: float) -> list[Effect]:
        """The scheduler of `term` took the current epoch."""
        self._submission.taken = True
        if term < self.term:  # taken by a leader that has been replaced since
            return self._resend(now)
        self.term = term
        return []

    def on_submit_failed(self, error: BatonError, now: float) -> list[Effect]:
        """The submit was refused or not answered: tried again, a request never taken only for `first_submit_s`.

        Safe, as submits are idempotent. An Overloaded ends a request never taken: the scheduler means it.
        """
        if self.end is not None or self.worker:
            return []
        if self._submission.retry(error, now, first=self.attempt.epoch == self._first_epoch):
            return []
        return self._finish("error", error, now)

    def on_scheduler_term(self, term: Term, now: float) -> list[Effect]:
        """A scheduler beat. At a new term the same epoch is sent again if it has no token yet."""
        if term <= self.term:
            return []
        known, self.term = self.term, term
        return self._resend(now) if known else []

    def on_placed(self, placed: Placed, now: float) -> list[Effect]:
        """The scheduler placed an attempt."""
        if placed.attempt == self.attempt and placed.decode_worker == self.worker:
            self.placed = placed
            if self.end is not None:  # its tokens were quicker, to the last of them
                return []
        if not self._adopt(placed.attempt, placed.decode_worker, now):
            return self._refuse(placed.attempt, placed.decode_worker, now)
        self.placed = placed
        self.term = max(self.term, placed.term)
        self._submission.numerics = placed.numerics or self._submission.numerics
        return []

    def on_placement_refused(self, attempt: Attempt, error: ErrorInfo, now: float) -> list[Effect]:
        """The scheduler gave the attempt up."""
        if self.end is not None or attempt.epoch != self.attempt.epoch or attempt < self.attempt:
            return []
        return self._finish("error", from_wire(error), now)

    def on_worker_lost(self, worker: WorkerId, now: float) -> list[Effect]:
        """A worker is gone. Only the decode worker of the current attempt matters here."""
        if self.end is not None or not worker or worker != self.worker:
            return []
        self.died += 1
        return self._lose("worker lost", now)

    # ------------------------------------------------------------------------------------------ worker

    def on_record(self, worker: WorkerId, record: StreamRecord, now: float) -> list[Effect]:
        """News of one choice."""
        if not self._adopt(record.attempt, worker, now):
            if record.finish and not self._awaiting:
                return [AckFinal(record.attempt, worker)]
            return self._refuse(record.attempt, worker, now)
        if not 0 <= record.choice < len(self._choices):
            return []
        choice = self._choices[record.choice]
        if choice.finish:
            return []
        if record.first_seq > len(choice.committed):
            if len(choice.pending) < MAX_PENDING:
                choice.pending[record.first_seq] = record
            return self._ask_replay(record.choice, now)
        effects: list[Effect] = []
        self._take(record, now, effects)
        # losing the attempt empties `pending`
        while choice.pending and self.end is None and not choice.finish and (ready := choice.pop_ready()) is not None:
            self._take(ready, now, effects)
        if choice.replays and not choice.pending:
            choice.replayed()
        return effects

    def on_listing(self, worker: WorkerId, held: HeldAttempt | None, now: float) -> list[Effect]:
        """A worker's complete listing: what it holds of this request, or None."""
        if held is None:
            if self.end is not None or worker != self.worker:
                return []
            if self._absent_at < 0:
                self._absent_at = now
            elif now - self._absent_at >= self._rules.absent_s:
                return self._lose("worker no longer holds the attempt", now)
            return []
        if not self._adopt(held.attempt, worker, now):
            return self._refuse(held.attempt, worker, now)
        effects: list[Effect] = []
        for index, next_seq in enumerate(held.next_seq[: len(self._choices)]):
            choice = self._choices[index]
            if not choice.finish and next_seq > len(choice.committed):
                effects += self._ask_replay(index, now)
        return effects

    def on_replayed(
        self, attempt: Attempt, worker: WorkerId, choice: int, held: bool, records: Iterable[StreamRecord], now: float
    ) -> list[Effect]:
        """The answer to `AskReplay`."""
        if self.end is not None or attempt != self.attempt or worker != self.worker:
            return []
        if not held:
            return self._lose("worker has forgotten the attempt", now)
        state = self._choices[choice]
        state.replayed()
        effects: list[Effect] = []
        for record in records:
            effects += self.on_record(worker, record, now)
        return effects

    def on_finish_reply(self, choice: int, totals: Totals | None, now: float) -> list[Effect]:
        """The answer to `SendFinish`; None: there was none."""
        if ("finish", choice) not in self._awaiting:
            return []
        self._awaiting.discard(("finish", choice))
        if totals is not None and self._ack is not None:
            self._account(*self._ack, totals, choice)
        return self._settle_if_done()

    def on_cancel_reply(self, attempt: Attempt, worker: WorkerId, totals: Totals | None, now: float) -> list[Effect]:
        """The answer to a `SendCancel` to a decode worker; None: there was none, or nothing was held."""
        if totals is not None and not self.settled:
            self._account(attempt, worker, totals)
        if attempt != self.attempt or ("cancel", 0) not in self._awaiting:
            return []
        self._awaiting.discard(("cancel", 0))
        return self._settle_if_done()

    # ------------------------------------------------------------------------------------------ client and clock

    def on_stop_match(self, choice: int, num_tokens: int, now: float) -> list[Effect]:
        """A stop string is complete at `num_tokens` output tokens of `choice`; later ones are taken back."""
        state = self._choices[choice]
        if self.end is not None or state.finish or num_tokens > len(state.committed):
            return []
        del state.committed[num_tokens:]
        effects: list[Effect] = []
        self._stop(choice, effects, now)
        return effects

    def on_client_gone(self, reason: str, now: float) -> list[Effect]:
        """The client left, is too slow, or an operator ended the request."""
        if self.end is not None:
            return []
        return self._finish("cancelled", Cancelled(f"request cancelled: {reason}", code=reason), now)

    def on_error(self, error: BatonError, now: float) -> list[Effect]:
        """The ingress itself must end the request (shutting down, a fault of its own)."""
        return [] if self.end is not None else self._finish("error", error, now)

    def on_tick(self, now: float, worker_seen: float | None = None) -> list[Effect]:
        """Let time pass; call a few times a second.

        Args:
            worker_seen: when anything last came from this request's worker; None: only the news given here count.
        """
        if self.settled:
            return []
        if self.end is not None:
            if now < self._close_at:
                return []
            self._awaiting.clear()
            return self._settle_if_done()
        if now >= self._deadline:
            return self._finish("error", DeadlineExceeded("the request's time budget is over"), now)
        if not self.worker:
            return [self._submit(now)] if self._submission.due(now) else []
        if now - max(self._news_at, worker_seen or 0.0) > self._rules.worker_silence_s:
            self.died += 1
            return self._lose("no news from the worker", now)
        effects: list[Effect] = []
        for index, choice in enumerate(self._choices):
            if choice.replay_at < 0 or now - choice.replay_at < self._rules.replay_timeout_s:
                continue
            if choice.replays >= self._rules.max_replays:
                return self._lose("replay not answered", now)
            choice.replay_at = -1.0
            effects += self._ask_replay(index, now)
        return effects

    # ------------------------------------------------------------------------------------------ inside

    def _adopt(self, attempt: Attempt, worker: WorkerId, now: float) -> bool:
        """True if `attempt` is the current one, or a newer dispatch of this epoch, which then becomes current."""
        current = self.attempt
        if self.end is not None or attempt.epoch != current.epoch or attempt.dispatch < current.dispatch:
            return False
        if attempt.dispatch > current.dispatch or not self.worker:
            self.attempt = attempt
            self.worker = worker
            self._submission.placed()
            for choice in self._choices:
                choice.forget()
        elif worker != self.worker:
            return False
        self._news_at = now
        self._absent_at = -1.0
        return True

    def _refuse(self, attempt: Attempt, worker: WorkerId, now: float) -> list[Effect]:
        """A worker holds what nobody wants: cancel it, at most once a second. Old dispatches are the scheduler's."""
        ended = self.end is not None and not self._awaiting
        if not ended and attempt.epoch >= self.attempt.epoch:
            return []
        if now - self._cancelled.get((attempt, worker), float("-inf")) < 1.0:
            return []
        self._cancelled[attempt, worker] = now
        return [SendCancel(attempt, worker, "over" if ended else "superseded")]

    def _take(self, record: StreamRecord, now: float, effects: list[Effect]) -> None:
        """Commit what is new in a record that has no gap before it."""
        index = record.choice
        choice = self._choices[index]
        committed = choice.committed
        have, ids = len(committed), unpack_tokens(record.token_ids)
        known = have - record.first_seq
        if known and not choice.agrees(record.first_seq, ids):
            effects += self._lose("worker sent other tokens than before", now)
            return
        new = ids[known:] if known else ids
        if new:
            keep = self._find_stop(index, have, new) if self._find_stop is not None else None
            if keep is not None:
                new = new[: keep - have]
            committed += new
            self._token_in_epoch = True
            if new:
                logprobs = record.logprobs and cut_logprobs(record.logprobs, len(ids), known, known + len(new))
                effects.append(Commit(index, have, new, logprobs, b"" if have else record.prompt_logprobs))
            if keep is not None:
                self._stop(index, effects, now)
                return
        if record.finish:
            self._final(record, effects, now)

    def _stop(self, index: int, effects: list[Effect], now: float) -> None:
        self._choices[index].finish = "stop"
        self._awaiting.add(("finish", index))
        self._ack = (self.attempt, self.worker)
        effects.append(EndChoice(index, "stop"))
        effects.append(SendFinish(self.attempt, self.worker, index, len(self._choices[index].committed)))
        self._end_if_done(effects, now)

    def _final(self, record: StreamRecord, effects: list[Effect], now: float) -> None:
        totals = record.totals or Totals()
        if record.finish not in ("stop", "length"):
            error = from_wire(record.error) if record.error is not None else Cancelled("the worker ended the request")
            if isinstance(error, Unavailable):  # the worker cannot go on, another can
                self.moved += error.code == WORKER_STOPPING
                effects += self._lose(error.message, now)
                return
            self._ack = (self.attempt, self.worker)
            self._account(*self._ack, totals, record.choice)
            effects += self._finish("error", error, now, worker_done=True)
            return
        self._ack = (self.attempt, self.worker)
        self._account(*self._ack, totals, record.choice)
        choice = self._choices[record.choice]
        if not choice.is_whole(record.first_seq + len(record.token_ids) // 4, totals):
            error = Internal("the output does not match the worker's account of it", code="checksum_mismatch")
            effects += self._finish("error", error, now, worker_done=True)
            return
        choice.finish = record.finish
        effects.append(EndChoice(record.choice, record.finish))
        self._end_if_done(effects, now)

    def _end_if_done(self, effects: list[Effect], now: float) -> None:
        if all(choice.finish for choice in self._choices):
            effects += self._finish(self._choices[0].finish, None, now, worker_done=True)

    def _finish(self, finish: str, error: BatonError | None, now: float, *, worker_done: bool = False) -> list[Effect]:
        self.end = End(finish, error)
        self._close_at = now + self._rules.close_reply_s
        effects: list[Effect] = [self.end]
        if self.worker and not worker_done:
            self._awaiting = {("cancel", 0)}
            self._cancelled[self.attempt, self.worker] = now
            reason = error.code if error is not None else finish
            effects.append(SendCancel(self.attempt, self.worker, reason))
            if self.placed is not None and self.placed.prefill_worker:
                effects.append(SendCancel(self.attempt, self.placed.prefill_worker, reason, "prefill"))
        return effects + self._settle_if_done()

    def _settle_if_done(self) -> list[Effect]:
        if self.end is None or self.settled or self._awaiting:
            return []
        self.settled = True
        completion = self.num_committed
        finish = self.end.finish
        prompt = len(self._submission.prompt) if completion or finish in ("stop", "length") else 0
        cached = min(self.totals.cached_tokens, prompt)
        effects: list[Effect] = [SettleRequest(self.attempt, prompt, completion, cached, finish, self._spent.rows())]
        if self._ack is not None:
            effects.append(AckFinal(*self._ack))
        return effects

    def _account(self, attempt: Attempt, worker: WorkerId, totals: Totals, choice: int = ALL_CHOICES) -> None:
        if attempt == self.attempt:
            self.totals = totals
        self._spent.add(attempt, worker, totals, choice)

    def _lose(self, reason: str, now: float) -> list[Effect]:
        """Declare the current attempt lost: fence it, cancel it, go on elsewhere or give up."""
        old, worker = self.attempt, self.worker
        self.lost += 1
        if self.lost - min(self.moved, self._rules.max_moves) >= self._rules.max_lost:
            message = f"{self.lost} workers were lost while the request ran; the last: {reason}"
            return self._finish("error", Unavailable(message, retry_after_s=1.0, code="worker_lost"), now)
        self.attempt = Attempt(old.request_id, Epoch(old.epoch + 1), Dispatch(0))
        self.worker = WorkerId("")
        self.placed = None
        self._token_in_epoch = False
        self._absent_at = -1.0
        for choice in self._choices:
            choice.forget()
        self._cancelled[old, worker] = now
        return [SendCancel(old, worker, reason), self._submit(now)]

    def _resend(self, now: float) -> list[Effect]:
        return [] if self.end is not None or self._token_in_epoch else [self._submit(now)]

    def _submit(self, now: float) -> SubmitAttempt:
        # choices differ, and a submit holds one sequence: several start over, and what is known is dropped by number
        output = self._choices[0].committed if len(self._choices) == 1 else []
        return self._submission.make(self.attempt, output, now)

    def _ask_replay(self, index: int, now: float) -> list[Effect]:
        choice = self._choices[index]
        if choice.replay_at >= 0:
            return []
        choice.replay_at = now
        choice.replays += 1
        return [AskReplay(self.attempt, self.worker, index, len(choice.committed))]
