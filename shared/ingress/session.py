"""One request in flight: drives its `StreamCommit`, does what that asks, keeps its text until it is taken."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode, Tracer

from shared.bus.bus import Bus
from shared.contracts import subjects
from shared.contracts.errors import BatonError, from_wire
from shared.contracts.grants import Grant, SignedGrant
from shared.contracts.ids import Epoch, Term
from shared.contracts.messages import (
    Cancel,
    Cancelled,
    FinalAck,
    FinalAcked,
    Finish,
    Finished,
    Queued,
    Refusal,
    Settle,
    StreamReplay,
    StreamReplayed,
    Submit,
    Withdraw,
)
from shared.contracts.tokens import pack_tokens
from shared.ingress.choice_output import Piece
from shared.ingress.completion_body import Usage
from shared.ingress.config import IngressConfig
from shared.ingress.request_metrics import RequestMetrics
from shared.ingress.request_output import RequestOutput
from shared.ingress.request_plan import RequestPlan
from shared.ingress.served_models import ServedModel
from shared.ingress.settlement import publish_settlement
from shared.telemetry import attributes as a
from shared.telemetry.metrics import Metrics
from shared.telemetry.token_timings import TokenTimings
from shared.text import stream_effects as fx
from shared.text.stream_choice import StreamRules
from shared.text.stream_commit import StreamCommit

log = logging.getLogger("baton.ingress")

WORKER_REPLY_S = 1.0


@dataclass(frozen=True, slots=True)
class SessionHooks:
    """What an ingress does with a request beside sending it to a client.

    `before_settle` is awaited once the request has ended, with what is about to be settled, and returns what shall be:
    `unbilled` of it books only the compute. When it raises, nothing is settled. `on_died` is called each time a worker
    died while it ran the request, with how often that happened in this session.
    """

    before_settle: Callable[[Session, Settle], Awaitable[Settle]]
    on_died: Callable[[int], None]


class Session:
    """A request from its grant to its settlement.

    Effects are applied in the task that brought the news; hops run in tasks of their own under the request's span.

    Args:
        span: the root span; ended here.
        arrived: when the request arrived, monotonic seconds.
        epoch: the first one; above every epoch the request had in earlier sessions.
        on_settled: called once, when nothing more is to be done.
        news: shared with the other sessions of a `RequestGroup`.
        committed: output tokens of an earlier session, from which this one goes on.
    """

    def __init__(
        self,
        plan: RequestPlan,
        signed: SignedGrant,
        grant: Grant,
        *,
        model: ServedModel,
        bus: Bus,
        config: IngressConfig,
        tracer: Tracer,
        span: Span,
        arrived: float,
        term: Term,
        epoch: Epoch,
        on_settled: Callable[[Session], None],
        hooks: SessionHooks | None = None,
        metrics: Metrics,
        news: asyncio.Event | None = None,
        committed: Sequence[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self.klass = grant.klass
        self.scope = grant.scope
        self.num_choices = plan.n
        self.model = model
        self.request_id = grant.request_id
        self.created = int(time.time())
        output = self._output = RequestOutput(plan, model.codec.tokenizer)
        self.stream = StreamCommit(
            grant.request_id,
            plan.prompt,
            arrived=arrived,
            budget_s=grant.budget_s,
            num_choices=plan.n,
            # not by way of self: what refers to itself waits for the garbage collector
            find_stop=lambda choice, first_seq, ids: output.push(choice, ids),
            rules=StreamRules(worker_silence_s=config.worker_silence_s, first_submit_s=config.submit_s),
            term=term,
            epoch=epoch,
        )
        self.booked = asyncio.Event()
        """The settlement was taken by the bus; not set when it could not be, or was not to be."""
        self.over = asyncio.Event()
        """Nothing more is to be done."""
        self.aborted = asyncio.Event()
        """The client is too slow: stop sending, close the connection."""
        self._signed = signed
        self._bus = bus
        self._config = config
        self._clock = clock
        self._span = span
        self._context = trace.set_span_in_context(span)
        self._stream_span = tracer.start_span(f"{config.service}.stream", context=self._context)
        self._timings = TokenTimings(arrived)
        self._metrics = RequestMetrics(metrics, model.name, arrived=arrived, epoch=epoch)
        self._metrics.admitted(plan.n, plan.sampling.max_tokens)
        self._sent_bytes = 0
        self._placed_at: float | None = None
        self._arrived = arrived
        self._news = news or asyncio.Event()
        self._taken_at = clock()
        self._replays = 0
        self._died = 0
        self._restored = committed
        self._hooks = hooks
        self._on_settled = on_settled
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Submit to the scheduler."""
        if self._restored:
            self.apply(self.stream.restore(self._restored))
        self.apply(self.stream.start(self._clock()))

    @property
    def end(self) -> fx.End | None:
        """How it ended for the client; None while it runs."""
        return self.stream.end

    def usage(self) -> Usage:
        """Token counts so far."""
        prompt = len(self.plan.prompt)
        cached = min(self.stream.totals.cached_tokens, prompt)
        guesses = None
        if self.plan.sampling.prediction:
            totals = self.stream.totals  # a worker's own, which may not have heard yet where the text was cut
            right = min(totals.predicted_right_tokens, self.stream.num_committed)
            guesses = right, totals.predicted_tokens - right
        return Usage(prompt, self.stream.num_committed, cached, self._output.thought_tokens, guesses)

    # ------------------------------------------------------------------------------------------ client side

    async def wait(self) -> None:
        """Returns when there is text to send, a choice has finished, or the request is over."""
        await self._news.wait()

    def take(self) -> list[Piece]:
        """What came since the last call, choice by choice; each choice's finish reason is given once."""
        pieces = self._output.take()
        self._taken_at = self._clock()
        if self.end is None:
            self._news.clear()
        return pieces

    def timings(self) -> dict[str, float]:
        """Milliseconds since the request arrived, and output tokens a second behind the first; what is known of it."""
        now, timings = self._clock(), self._timings
        found = {"total_ms": (now - self._arrived) * 1000}
        if self._placed_at is not None:
            # the scheduler's word of it may come behind the worker's first token
            first_token_s = timings.ttft_s if timings.ttft_s is not None else math.inf
            found["queue_ms"] = min(self._placed_at - self._arrived, first_token_s) * 1000
        if timings.ttft_s is not None:
            found["first_token_ms"] = timings.ttft_s * 1000
            rest = now - self._arrived - timings.ttft_s
            if timings.count > 1 and rest > 0:
                found["tokens_per_second"] = (timings.count - 1) / rest
        return {name: round(value, 3) for name, value in found.items()}

    def sent(self, num_bytes: int) -> None:
        """Count bytes given to the client's connection."""
        self._sent_bytes += num_bytes
        self._taken_at = self._clock()

    def cancel(self, reason: str) -> None:
        """The client left: `client_gone`, `slow_client`."""
        self.apply(self.stream.on_client_gone(reason, self._clock()))

    def fail(self, error: BatonError) -> None:
        """End it with an error of the ingress's own."""
        self.apply(self.stream.on_error(error, self._clock()))

    def tick(self, now: float, worker_seen: float | None) -> None:
        """Let time pass."""
        if self.plan.stream and self.stream.end is None and self._output.unsent_bytes:
            blocked = now - self._taken_at > self._config.max_blocked_s
            if blocked or self._output.unsent_bytes > self._config.max_unsent_bytes:
                self.aborted.set()
                self.cancel("slow_client")
        self.apply(self.stream.on_tick(now, worker_seen))

    # ------------------------------------------------------------------------------------------ effects

    def apply(self, effects: list[fx.Effect]) -> None:
        """Carry effects out, in order."""
        if self._placed_at is None and self.stream.placed is not None:
            self._placed_at = self._clock()
            self._metrics.placed(self._placed_at)
        settle: fx.SettleRequest | None = None
        acks: list[fx.AckFinal] = []
        for effect in effects:
            match effect:
                case fx.Commit(token_ids=ids):
                    now = self._clock()
                    self._timings.add(now, len(ids))
                    self._metrics.tokens(now, len(ids))
                    if self._output.commit(effect):
                        self._news.set()
                case fx.EndChoice(choice=choice, finish=finish):
                    self._output.end(choice, finish)
                    self._news.set()
                case fx.End():
                    self._news.set()
                    self._end_stream_span(effect)
                    if effect.finish in ("cancelled", "error"):
                        self._run(self._withdraw())
                    self._metrics.ended(self._clock(), effect, len(self.plan.prompt))
                case fx.SubmitAttempt():
                    self._metrics.submitted(effect.attempt.epoch)
                    self._run(self._submit(effect))
                case fx.AskReplay():
                    self._replays += 1
                    self._metrics.replayed()
                    self._run(self._replay(effect))
                case fx.SendCancel():
                    self._run(self._send_cancel(effect))
                case fx.SendFinish():
                    self._run(self._send_finish(effect))
                case fx.SettleRequest():
                    settle = effect
                case fx.AckFinal():
                    acks.append(effect)
        if settle is not None:
            self._run(self._close(settle, acks))
        else:
            for ack in acks:
                self._run(self._acknowledge(ack))
        if self._hooks is not None and self.stream.died > self._died:
            self._died = self.stream.died
            self._hooks.on_died(self._died)

    def _run(self, hop: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._guarded(hop))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, hop: Coroutine[Any, Any, None]) -> None:
        otel_context.attach(self._context)  # for this task only
        try:
            await hop
        except BatonError as exc:
            log.warning("request %s: %s", self.request_id, exc.message)
        except Exception:
            log.exception("request %s: a hop failed", self.request_id)

    async def _submit(self, effect: fx.SubmitAttempt) -> None:
        message = Submit(
            attempt=effect.attempt,
            ingress_id=self._config.ingress_id,
            grant=self._signed,
            token_ids=pack_tokens(effect.token_ids),
            num_prompt_tokens=effect.num_prompt_tokens,
            sampling=self.plan.choices,
            age_s=effect.age_s,
            numerics=effect.numerics,
        )
        subject = subjects.sched_submit(self.model.pool)
        error: BatonError | None = None
        term = Term(0)
        try:
            reply = await self._bus.request(subject, message, Queued | Refusal, timeout_s=self._config.hop_timeout_s)
            if isinstance(reply, Refusal):
                error = from_wire(reply.error)
            else:
                term = reply.term
        except BatonError as exc:
            error = exc
        if effect.attempt.epoch != self.stream.attempt.epoch:
            return
        now = self._clock()
        self.apply(self.stream.on_queued(term, now) if error is None else self.stream.on_submit_failed(error, now))

    async def _withdraw(self) -> None:
        """The scheduler must not begin what nobody waits for; of what it has placed it forgets the place."""
        await self._bus.publish(subjects.sched_withdraw(self.model.pool), Withdraw(attempt=self.stream.attempt))

    async def _replay(self, effect: fx.AskReplay) -> None:
        message = StreamReplay(attempt=effect.attempt, choice=effect.choice, from_seq=effect.from_seq)
        subject = subjects.decode(effect.worker, "replay")
        # without an answer the core asks again
        reply = await self._bus.request(subject, message, StreamReplayed, timeout_s=WORKER_REPLY_S)
        self.apply(
            self.stream.on_replayed(
                effect.attempt, effect.worker, effect.choice, reply.held, reply.records, self._clock()
            )
        )

    async def _send_cancel(self, effect: fx.SendCancel) -> None:
        subject = (subjects.decode if effect.role == "decode" else subjects.prefill)(effect.worker, "cancel")
        message = Cancel(attempt=effect.attempt, reason=effect.reason)
        totals = None
        try:
            totals = (await self._bus.request(subject, message, Cancelled, timeout_s=WORKER_REPLY_S)).totals
        finally:
            if effect.role == "decode":
                now = self._clock()
                self.apply(self.stream.on_cancel_reply(effect.attempt, effect.worker, totals, now))

    async def _send_finish(self, effect: fx.SendFinish) -> None:
        message = Finish(attempt=effect.attempt, choice=effect.choice, num_tokens=effect.num_tokens)
        totals = None
        try:
            subject = subjects.decode(effect.worker, "finish")
            totals = (await self._bus.request(subject, message, Finished, timeout_s=WORKER_REPLY_S)).totals
        finally:
            self.apply(self.stream.on_finish_reply(effect.choice, totals, self._clock()))

    async def _acknowledge(self, effect: fx.AckFinal) -> None:
        subject = subjects.decode(effect.worker, "ack")
        # the worker sends the final again until it hears this
        await self._bus.request(subject, FinalAck(attempts=(effect.attempt,)), FinalAcked, timeout_s=WORKER_REPLY_S)

    async def _close(self, settle: fx.SettleRequest, acks: list[fx.AckFinal]) -> None:
        message = Settle(
            attempt=settle.attempt,
            grant=self._signed,
            prompt_tokens=settle.prompt_tokens,
            completion_tokens=settle.completion_tokens,
            cached_tokens=settle.cached_tokens,
            finish=settle.finish,
            compute=settle.compute,
        )
        try:
            if self._hooks is not None:
                message = await self._hooks.before_settle(self, message)
            await publish_settlement(self._bus, message)
            self.booked.set()
            self._metrics.settled(self._clock())
            for ack in acks:
                await self._acknowledge(ack)
        finally:
            if not self.booked.is_set():
                self._metrics.unsettled()
            self._end_root_span(message)
            self.over.set()
            self._on_settled(self)

    # ------------------------------------------------------------------------------------------ spans

    def _end_stream_span(self, end: fx.End) -> None:
        span = self._stream_span
        span.set_attributes(self._timings.summary())
        span.set_attribute(a.COMPLETION_TOKENS, self.stream.num_committed)
        span.set_attribute(a.FINISH, end.finish)
        span.set_attribute(a.REPLAYS, self._replays)
        span.set_attribute(a.LOST_WORKERS, self.stream.lost)
        span.end()

    def _end_root_span(self, settle: Settle) -> None:
        span, end, placed = self._span, self.stream.end, self.stream.placed
        span.set_attributes(self._timings.summary())
        span.set_attribute(a.PROMPT_TOKENS, len(self.plan.prompt))
        span.set_attribute(a.CACHED_TOKENS, settle.cached_tokens)
        span.set_attribute(a.COMPLETION_TOKENS, settle.completion_tokens)
        span.set_attribute(a.FINISH, settle.finish)
        span.set_attribute(a.EPOCH, settle.attempt.epoch)
        span.set_attribute(a.SENT_BYTES, self._sent_bytes)
        if placed is not None:
            span.set_attribute(a.PATH, placed.path)
            span.set_attribute(a.LOCAL_S, placed.local_s)
            span.set_attribute(a.HANDED_OFF_S, placed.handed_off_s)
        error = end.error if end is not None else None
        span.set_attribute(a.STATUS, "ok" if error is None else error.code)
        if error is not None:
            span.set_status(Status(StatusCode.ERROR))
        span.end()
